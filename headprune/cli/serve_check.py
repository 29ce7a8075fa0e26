"""``headprune serve-check``: compare a folder's answers in every engine that is installed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headprune.cli._shared import FAILED, AsJson, Debug, Quiet, emit, guarded, show, watching
from headprune.core.errors import InvalidValue

if TYPE_CHECKING:
    from headprune.serving.check import EngineRow, ServeCheck


def serve_check(
    folder: Annotated[Path, typer.Argument(help="A model's folder, in any format.")],
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Ask this engine only; may be repeated. Default all."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="The same model in another format, to compare with; needed for GGUF files."
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE=PATH",
            help="The Python of an environment where an engine is installed; may be repeated.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the modelling file of the format remote-code."
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Open a folder in every installed engine; compare outputs and 32 greedy tokens."""
    with guarded(debug):
        pythons = _pythons(python or [])

        from headprune.run.subject import quiet as quiet_libraries
        from headprune.serving.check import serve_check as check

        quiet_libraries()
        found = check(
            folder,
            engine or (),
            reference_folder=reference,
            trust_remote_code=trust_remote_code,
            pythons=pythons,
            say=watching(quiet)["say"],
        )
        if as_json:
            emit({**asdict(found), "failed": found.failed})
        else:
            _print(found)
        if found.failed:
            raise typer.Exit(FAILED)


def _pythons(given: list[str]) -> dict[str, str]:
    """The Python of each engine."""
    pythons = {}
    for words in given:
        name, _, path = words.partition("=")
        if not Path(path).is_file():
            raise InvalidValue("--python", "ENGINE=PATH of a Python that exists", repr(words))
        pythons[name] = path
    return pythons


def _print(found: ServeCheck) -> None:
    """Print the table for people."""
    show(None, f"{found.model}, compared with {found.reference}")
    lines = [("engine", "version", "result", "difference", "tokens", "")]
    lines += map(_cells, found.rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = map(str.ljust, line, widths)
        show(None, "  ".join(padded).rstrip())


def _cells(row: EngineRow) -> tuple[str, str, str, str, str, str]:
    # A version may name a build, too.
    version = (row.version or "-").split("-")[0] or "-"
    difference = "-" if row.difference is None else f"{row.difference:.1e} in {row.compared}"
    tokens = "-" if row.tokens is None else f"{row.tokens_equal} of {row.tokens}"
    return (row.engine, version, row.status, difference, tokens, row.note)
