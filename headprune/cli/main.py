"""The ``headprune`` command. Every subcommand is a module, which imports what it needs when run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from headprune.cli._shared import guarded
from headprune.cli.agree import agree
from headprune.cli.bench import bench
from headprune.cli.diff import diff
from headprune.cli.explain import explain
from headprune.cli.init import init
from headprune.cli.inspect import inspect
from headprune.cli.ls import ls
from headprune.cli.pick import pick
from headprune.cli.prune import prune
from headprune.cli.report import report
from headprune.cli.run import run
from headprune.cli.score import score
from headprune.cli.serve_check import serve_check
from headprune.cli.show import show
from headprune.cli.sweep import sweep
from headprune.cli.validate import validate
from headprune.run.launched import check_alone

app = typer.Typer(
    name="headprune",
    help="Finds which attention heads a trained transformer does not need and removes them.",
    epilog="Exit codes: 0 done, 1 failed or interrupted, 2 bad input.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)

#: Every command, in the order in which a user meets them, with an example.
COMMANDS: dict[Callable[..., None], str] = {
    run: "headprune run digits-vit",
    prune: "headprune prune --model my-model --data rows.csv --keep 0.5 --out small",
    inspect: "headprune inspect my-model",
    init: "headprune init --model my-model --data rows.csv --out mine.yaml",
    ls: "headprune ls",
    show: "headprune show digits-vit --set select.keep_heads=0.25",
    validate: "headprune validate mine.yaml",
    score: "headprune score mine.yaml --out scores.json",
    agree: "headprune agree taylor.json fisher.json --out agreement.png",
    explain: "headprune explain runs/digits-vit",
    diff: "headprune diff runs/digits-vit runs/other",
    sweep: "headprune sweep digits-vit --grid scorer=taylor,fisher --grid keep=0.75,0.5 --seeds 3",
    pick: "headprune pick runs/digits-vit-sweep --max-drop 0.01 --out small",
    bench: "headprune bench my-model small --batch 1 --batch 32",
    serve_check: "headprune serve-check small",
    report: "headprune report runs/digits-vit runs/other --out compared",
}
# The functions are the commands: typer takes names, options and help from them.
for command, example in COMMANDS.items():
    app.command(epilog=f"Example: {example}")(command)

#: Printed by ``headprune`` alone.
_START = """\
headprune finds which attention heads a trained transformer does not need and removes them.

Start with one of these:
  headprune run digits-vit
      a demonstration of two minutes, on data that is here already
  headprune inspect MODEL
      what of a model can be pruned
  headprune prune --model MODEL --data FILE --keep 0.5 --out small
      your model without half of its heads, refitted on your data, proven and measured

headprune --help lists all commands, headprune COMMAND --help explains one. \
A MODEL is a folder or a hub name."""


def _version(wanted: bool) -> None:
    """Print versions and exit, if ``--version`` is given."""
    # Not through `guarded`: this has to work whatever is broken.
    if wanted:
        from headprune.run.surroundings import in_short

        typer.echo(in_short())
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,  # before a missing command is noticed
            help="Show versions, platform and device, and exit.",
        ),
    ] = False,
) -> None:
    # This runs before every command.
    if context.invoked_subcommand is None:
        typer.echo(_START)
    elif context.invoked_subcommand != "run":  # the only command that several processes share
        with guarded(False):
            check_alone(context.invoked_subcommand)


def main() -> None:
    """The console script."""
    app()
