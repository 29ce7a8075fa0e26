"""Puts both reports of a record into a folder."""

from __future__ import annotations

from pathlib import Path

from headprune.core.files import write_atomic
from headprune.core.record import RunRecord
from headprune.report.html import render_html
from headprune.report.markdown import render_markdown

HTML_NAME = "report.html"
MARKDOWN_NAME = "report.md"


def write_report(record: RunRecord, folder: str | Path) -> tuple[Path, Path]:
    """Writes ``report.html`` and ``report.md`` into ``folder`` and returns their paths.

    Each file is written whole or not at all; both are rendered before either is written.

    Args:
        record: Any record, also of a run that failed or still runs.
        folder: Made if it does not exist.
    """
    html, markdown = render_html(record), render_markdown(record)
    folder = Path(folder)
    return (
        write_atomic(folder / HTML_NAME, html.encode("utf-8", "replace")),
        write_atomic(folder / MARKDOWN_NAME, markdown.encode("utf-8", "replace")),
    )
