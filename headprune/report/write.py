"""Puts reports into a folder: both forms of one record, of a comparison of several, or of a
sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headprune.core.agreement import Agreement
from headprune.core.files import write_atomic
from headprune.core.record import RunRecord
from headprune.core.sweeps import SweepTable
from headprune.report.comparison import Compared
from headprune.report.html import render_comparison_html, render_html, render_sweep_html
from headprune.report.inputs import NOTHING, ReportInputs
from headprune.report.markdown import render_comparison_markdown, render_markdown
from headprune.report.tradeoff import draw_tradeoff, render_tradeoff

HTML_NAME = "report.html"
MARKDOWN_NAME = "report.md"
COMPARISON = "comparison"
SUMMARY = "summary.md"


def write_report(
    record: RunRecord, folder: str | Path, inputs: ReportInputs = NOTHING
) -> tuple[Path, Path]:
    """Writes ``report.html`` and ``report.md`` into ``folder`` and returns their paths.

    Each file is written whole or not at all; both are rendered before either is written.

    Args:
        record: Any record, also of a run that failed or still runs.
        folder: Made if it does not exist.
        inputs: Other values to show: attention pictures, other scores, their agreement.
    """
    html, markdown = render_html(record, inputs), render_markdown(record, inputs)
    return _write(Path(folder) / HTML_NAME, html, Path(folder) / MARKDOWN_NAME, markdown)


def write_comparison(
    compared: Sequence[Compared], folder: str | Path, agreement: Agreement | None = None
) -> tuple[Path, Path]:
    """Writes ``comparison.html`` and ``comparison.md``, a column a record; returns their paths.

    Args:
        compared: Two records or more, each with the name of its column.
        folder: Made if it does not exist.
        agreement: How alike their scores order the heads.

    Raises:
        InvalidValue: fewer than two records, or names that are not different.
    """
    html, markdown = (
        render_comparison_html(compared, agreement),
        render_comparison_markdown(compared, agreement),
    )
    return _write(
        Path(folder) / f"{COMPARISON}.html", html, Path(folder) / f"{COMPARISON}.md", markdown
    )


def write_tradeoff(
    table: SweepTable, folder: str | Path, sweep: str | Path | None = None
) -> list[Path]:
    """Writes ``report.html``, ``summary.md``, ``tradeoff.svg`` and ``tradeoff.png`` of a sweep;
    returns their paths.

    Without a finished run there is nothing to draw, and only the page and the summary are written.

    Args:
        table: The sweep's table.
        folder: Made if it does not exist.
        sweep: The sweep's own folder, where that is another.
    """
    folder = Path(folder)
    drawn = (
        [draw_tradeoff(table, folder / f"tradeoff.{kind}") for kind in ("svg", "png")]
        if table.rows
        else []
    )
    pages = _write(
        folder / HTML_NAME,
        render_sweep_html(table, sweep or "."),
        folder / SUMMARY,
        render_tradeoff(table),
    )
    return [*drawn, *pages]


def _write(page: Path, html: str, twin: Path, markdown: str) -> tuple[Path, Path]:
    return (
        write_atomic(page, html.encode("utf-8", "replace")),
        write_atomic(twin, markdown.encode("utf-8", "replace")),
    )
