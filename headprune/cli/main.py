"""The ``headprune`` command; every subcommand is a file of its own and imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from headprune.cli.agree import agree
from headprune.cli.bench import bench
from headprune.cli.inspect import inspect
from headprune.cli.ls import ls
from headprune.cli.pick import pick
from headprune.cli.prune import prune
from headprune.cli.report import report
from headprune.cli.run import run
from headprune.cli.score import score
from headprune.cli.show import show
from headprune.cli.sweep import sweep
from headprune.cli.validate import validate

app = typer.Typer(
    name="headprune",
    help="Finds which attention heads a trained transformer does not need, and takes them out.",
    epilog="Exit codes: 0 done, 1 failed or interrupted, 2 bad input.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run, ls, show, validate, inspect, score, agree, prune, sweep, pick, bench, report):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from headprune import __version__

        typer.echo(f"headprune {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """The console script."""
    app()
