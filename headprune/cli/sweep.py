"""``headprune sweep``: run a recipe over a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import (
    FAILED,
    AsJson,
    Debug,
    Quiet,
    RecipeName,
    Settings,
    emit,
    guarded,
    say,
    scorers_of,
    watching,
)
from headprune.cli._shared import show as show_value


def sweep(
    recipe: RecipeName,
    grid: Annotated[
        list[str],
        typer.Option(
            "--grid",
            metavar="KEY=VALUE,VALUE",
            autocompletion=scorers_of("scorer"),
            help=(
                "Values of a key: scorer, keep, selector, recover, calibration, policy, or a path "
                "such as score.settings.reduce. May be repeated; every combination is run."
            ),
        ),
    ],
    settings: Settings = None,
    # How often, where, and with how many processes.
    seeds: Annotated[
        int, typer.Option(help="Draws of calibration rows, and of random scorers.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the sweep; default runs/NAME-sweep.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Processes; -1 is one per core.")] = 1,
    backend: Annotated[
        str, typer.Option(help="joblib backend: loky, or dask for a cluster.")
    ] = "loky",
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run every combination of a grid on one base model; called again, it resumes."""
    with guarded(debug):
        # Most mistakes are reported before PyTorch is imported, which takes seconds.
        from headprune.sweep.grid import lay_out

        lay_out(recipe, settings or (), grid)

        from headprune.sweep.sweeping import sweep as run_sweep

        done = run_sweep(
            recipe,
            grid,
            settings=settings or (),
            seeds=seeds,
            out=out,
            jobs=jobs,
            backend=backend,
            say=watching(quiet)["say"],
        )
        if as_json:
            emit(done.table.to_dict())
        else:
            show_value(done)
        # Failed runs do not end a sweep, but the exit code reports them.
        for failed in done.table.failed:
            say("failed: " + ", ".join(f"{key} {value}" for key, value in failed.items()))
        if done.table.failed:
            raise typer.Exit(FAILED)
