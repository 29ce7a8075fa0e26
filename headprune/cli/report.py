"""``headprune report``: draws the reports of a record anew, or one page over several records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import AsJson, Debug, emit, guarded


def report(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORD...", help="A record.json or the folder of a run; several: compared.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the reports; default that of the record. Several records need it.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write report.html and report.md from a record; of several records, comparison.html and comparison.md.

    Also from a record of a run that did not finish. Attention pictures (attention.json) and other scores of the same
    model (scores-*.json) are taken from the record's folder.
    """
    with guarded(debug):
        from headprune.core.errors import InvalidValue
        from headprune.core.record import RunRecord
        from headprune.run.journal import record_path
        from headprune.run.reporting import compare_runs, report_run

        if len(records) > 1:
            if out is None:
                raise InvalidValue("--out", "given, to compare several records", "nothing")
            html, markdown = compare_runs(records, out)
        else:
            path = record_path(records[0])
            html, markdown = report_run(RunRecord.load(path), path.parent, out)
        if as_json:
            emit({"html": str(html), "markdown": str(markdown)})
        else:
            typer.echo(f"wrote {html}\nwrote {markdown}")
