"""``headprune score``: run a recipe as far as the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import (
    AsJson,
    Debug,
    Quiet,
    RecipeName,
    Settings,
    emit,
    guarded,
    say,
    watching,
)
from headprune.cli._shared import show as show_value


def score(
    recipe: RecipeName,
    settings: Settings = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=(
                "What may be removed where query heads share a key/value head: group, balanced "
                "or free. Default: the recipe's select.policy. A plan made from the scores keeps "
                "it."
            )
        ),
    ] = None,
    feed_forward: Annotated[
        bool,
        typer.Option(
            "--feed-forward", help="Score neurons of feed-forwards too (select.feed_forward)."
        ),
    ] = False,
    until_stable: Annotated[
        int | None,
        typer.Option(
            "--until-stable",
            metavar="K",
            help=(
                "Stop reading calibration rows when the set of the K lowest is settled"
                " (score.until.k)."
            ),
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the scores to this JSON file.")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Score the heads of a recipe's model, after training it if the recipe says so."""
    with guarded(debug):
        from headprune.run.runner import score_recipe

        # No baselines: a run compares plans with them, and here is no plan.
        own = ["score.magnitude=false", "score.random_draws=0"]
        if policy:
            own.append(f"select.policy={policy}")
        if feed_forward:
            own.append("select.feed_forward=true")
        if until_stable is not None:
            own.append(f"score.until.k={until_stable}")
        scores = score_recipe(recipe, [*(settings or ()), *own], **watching(quiet))
        if out is not None:
            say(f"wrote {scores.save(out)}")
        if as_json:
            emit(scores.to_dict())
        else:
            show_value(scores)
