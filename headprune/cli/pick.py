"""``headprune pick``: the smallest model shown to lose no more than allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import FAILED, AsJson, Debug, Quiet, emit, guarded, say, watching
from headprune.cli._shared import show as show_value


def pick(
    sweep: Annotated[Path, typer.Argument(help="The folder of a finished sweep.")],
    # What to allow.
    max_drop: Annotated[
        float,
        typer.Option(
            "--max-drop",
            help="The largest allowed drop: 0.01 is one point of accuracy, or 1 % of perplexity.",
        ),
    ],
    by: Annotated[
        str | None,
        typer.Option(
            help=(
                "The size to minimise: heads, params, macs or kv. By default heads, or params where"
                " neurons are cut, too."
            )
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Confidence that the model loses at most --max-drop.")
    ] = 0.95,
    # Where to save the model.
    out: Annotated[
        Path | None, typer.Option(help="Folder for the plan and the cut, recovered model.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier pick in that folder.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Pick a sweep's smallest model within a drop, and confirm it on test rows."""
    with guarded(debug):
        from headprune.sweep.pick import pick as run_pick

        picked = run_pick(
            sweep,
            max_drop=max_drop,
            by=by,
            confidence=confidence,
            out=out,
            overwrite=overwrite,
            say=watching(quiet)["say"],
        )
        if as_json:
            emit(picked.to_dict())
        else:
            show_value(picked)
        # A shell can tell from the exit code whether a model was picked.
        if picked.run is None:
            raise typer.Exit(FAILED)
        if out is not None:  # `run_pick` has written it
            say(f"wrote {out}")
