"""Write reports into a folder: of one record, of a comparison, or of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headprune.core.agreement import Agreement
from headprune.core.files import write_atomic
from headprune.core.record import RunRecord
from headprune.core.sweeps import SweepTable
from headprune.report.comparison import Compared
from headprune.report.html import render_comparison_html, render_html, render_sweep_html
from headprune.report.inputs import NOTHING, TABLE_ALONE, ReportInputs, SweepInputs
from headprune.report.markdown import render_comparison_markdown, render_markdown
from headprune.report.tradeoff import draw_tradeoff, render_tradeoff

HTML_NAME = "report.html"
MARKDOWN_NAME = "report.md"
COMPARISON = "comparison"
SUMMARY = "summary.md"


def write_report(
    record: RunRecord, folder: str | Path, inputs: ReportInputs = NOTHING
) -> tuple[Path, Path]:
    """Write ``report.html`` and ``report.md`` into a folder; return their paths.

    Each file is written whole or not at all; both are rendered before either is written.

    Args:
        record: Any record, also of a run that failed or still runs.
        folder: Made if it does not exist.
        inputs: Attention pictures, other scores and their agreement.
    """
    html = render_html(record, inputs)
    markdown = render_markdown(record, inputs)
    return _write(Path(folder) / HTML_NAME, html, Path(folder) / MARKDOWN_NAME, markdown)


def write_comparison(
    compared: Sequence[Compared], folder: str | Path, agreement: Agreement | None = None
) -> tuple[Path, Path]:
    """Write ``comparison.html`` and ``comparison.md`` into a folder; return their paths.

    Args:
        compared: Two records or more, each with the name of its column.
        folder: Made if it does not exist.
        agreement: How alike their scores order the heads.

    Raises:
        InvalidValue: fewer than two records, or names that are not different.
    """
    html = render_comparison_html(compared, agreement)
    markdown = render_comparison_markdown(compared, agreement)
    folder = Path(folder)
    return _write(folder / f"{COMPARISON}.html", html, folder / f"{COMPARISON}.md", markdown)


def write_tradeoff(
    table: SweepTable, folder: str | Path, inputs: SweepInputs = TABLE_ALONE
) -> list[Path]:
    """Write the page, the summary and the pictures of a sweep; return their paths.

    The files are ``report.html``, ``summary.md``, ``tradeoff.svg`` and ``tradeoff.png``. Without a
    finished run there are no pictures.

    Args:
        table: The sweep's table.
        folder: Made if it does not exist.
        inputs: Speeds, random heads, and what `pick` answers.
    """
    folder = Path(folder)
    paths = []
    if table.rows:
        paths.append(draw_tradeoff(table, folder / "tradeoff.svg"))
        paths.append(draw_tradeoff(table, folder / "tradeoff.png"))
    html = render_sweep_html(table, inputs)
    markdown = render_tradeoff(table, inputs)
    return [*paths, *_write(folder / HTML_NAME, html, folder / SUMMARY, markdown)]


def _write(page: Path, html: str, text: Path, markdown: str) -> tuple[Path, Path]:
    # Names of files may hold bytes that are no UTF-8.
    page = write_atomic(page, html.encode("utf-8", "replace"))
    text = write_atomic(text, markdown.encode("utf-8", "replace"))
    return page, text
