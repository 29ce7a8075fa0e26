"""``headprune run``: run a whole recipe, from data to report."""

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
    echo,
    emit,
    guarded,
    show_estimate,
    watching,
)
from headprune.cli._shared import show as show_value


def run(
    recipe: RecipeName,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default runs/NAME.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a finished run in that folder.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only print what a run works on, and about how much time and memory it needs.",
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run a recipe: data, model, training, scores, plan, cut, proof, recovery, speed, report.

    The processes of torchrun or accelerate launch share the scoring; the first one does the rest.
    """
    with guarded(debug):
        from headprune.recipes.validate import load_recipe
        from headprune.run.launched import launched

        how, launch = watching(quiet), launched()

        # 1. A process of several, but not the first, only shares the scoring.
        if launch is not None and launch.rank:
            if not dry_run:
                from headprune.run.runner import share_scoring

                share_scoring(recipe, settings or (), launch)
            return

        # 2. The recipe. Most mistakes are reported before PyTorch is imported, which takes seconds.
        chosen = load_recipe(recipe, settings or ())

        # 3. An estimate.
        if dry_run:
            from headprune.run.dry import dry_run as estimated

            show_estimate(estimated(chosen, say=how["say"]), as_json)
            return

        # 4. The run.
        from headprune.run.runner import run_recipe

        record = run_recipe(chosen, out=out, overwrite=overwrite, launch=launch, **how)
        if as_json:
            emit(record.to_dict())
        else:
            from headprune.report.verdict import verdict

            echo(f"{verdict(record, str(out) if out is not None else None)}\n")
            show_value(record)
