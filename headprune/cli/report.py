"""``headprune report``: draw the report of a record, a sweep, or several records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import AsJson, Debug, echo, emit, guarded


def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORD...",
            help="A record.json, the folder of a run or of a sweep; several runs: compared.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the reports; default that of the record. Several records need it."
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write report.html and report.md of a record, or comparison.html and .md of several.

    For a sweep's folder: its page, summary and pictures. A run need not have finished. Attention
    pictures (attention.json) and other scores of the same model (scores-*.json) are taken from the
    record's folder.
    """
    with guarded(debug):
        from headprune.core.errors import InvalidValue
        from headprune.core.record import RunRecord
        from headprune.run.journal import record_path
        from headprune.run.reporting import compare_runs, report_run
        from headprune.sweep.reporting import is_sweep, report_sweep

        # 1. Several records: one page.
        if len(records) > 1:
            if out is None:
                raise InvalidValue("--out", "given, to compare several records", "nothing")
            written = list(compare_runs(records, out))
        # 2. A sweep.
        elif is_sweep(records[0]):
            written = report_sweep(records[0], out)
        # 3. One record.
        else:
            path = record_path(records[0])
            written = list(report_run(RunRecord.load(path), path.parent, out))
        if as_json:
            # By kind of file, such as "html".
            kinds = {".md": "markdown"}
            emit({kinds.get(path.suffix, path.suffix[1:]): str(path) for path in written})
        else:
            echo("\n".join(f"wrote {path}" for path in written))
