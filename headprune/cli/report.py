"""``headprune report``: draws the reports of a record anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import AsJson, Debug, emit, guarded


def report(
    record: Annotated[Path, typer.Argument(help="A record.json, or the folder of a run.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the reports; default that of the record.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write report.html and report.md from a record; also from one of a run that did not finish."""
    with guarded(debug):
        from headprune.core.record import RunRecord
        from headprune.report import write_report

        path = record / "record.json" if record.is_dir() else record
        html, markdown = write_report(RunRecord.load(path), out if out is not None else path.parent)
        if as_json:
            emit({"html": str(html), "markdown": str(markdown)})
        else:
            typer.echo(f"wrote {html}\nwrote {markdown}")
