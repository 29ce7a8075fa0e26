"""Printed form of scores, masks and plans: a grid of sites and heads in text, rich markup, HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

#: Nine steps from least to most important. The colours go from light to dark, so that they are
#: readable without colour too.
SHADES = " ▁▂▃▄▅▆▇█"
RAMP = (
    "#f7fbff",
    "#deebf7",
    "#c6dbef",
    "#9ecae1",
    "#6baed6",
    "#4292c6",
    "#2171b5",
    "#08519c",
    "#08306b",
)


#: First step whose colour is too dark for black text.
_DARK = 5

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&])")
#: Characters that move a terminal's cursor or reverse its text, or that no document may hold.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    """Remove terminal colours; other control characters become U+FFFD.

    >>> clean("a\\x1b[31m red \\x07")
    'a red \ufffd'
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return CONTROL.sub("\ufffd", _ANSI.sub("", lines))


def escape(text: object) -> str:
    """Escape text for Markdown, on one line; safe inside a table cell.

    >>> print(escape("a|b <i>"))
    a\\|b \\<i\\>
    """
    line = " ".join(clean(str(text)).split())
    return _SPECIAL.sub(r"\\\1", line)


def html_text(text: str) -> str:
    """Escape text for HTML, also inside an attribute.

    >>> html_text("<i>\\x1b[1m")
    '&lt;i&gt;'
    """
    return html.escape(clean(text))


@dataclass(frozen=True)
class Cell:
    """One head of the grid, or a part of a bar of neurons.

    Args:
        head: Original index; None in a bar.
        level: Importance from 0 to 1; None where it is not known.
        kept: Whether it is kept.
        title: Text under the mouse pointer.
    """

    head: int | None
    level: float | None
    kept: bool
    title: str


@dataclass(frozen=True)
class Row:
    """One site of the grid.

    Args:
        label: Its name.
        cells: Its heads.
        kind: Its kind of attention; empty where the grid has only one.
        note: What the marks cannot say, such as the number of neurons.
    """

    label: str
    cells: tuple[Cell, ...]
    kind: str = ""
    note: str = ""


def levels(values: Sequence[float]) -> list[float]:
    """Map values to 0..1, lowest to highest; if all are equal, to 0.5.

    >>> levels([1.0, 3.0, 2.0])
    [0.0, 1.0, 0.5]
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high > low:
        return [(value - low) / (high - low) for value in values]
    # Nothing to compare: the middle, neither light nor dark.
    return [0.5] * len(values)


def _step(level: float | None) -> int:
    """Which of the nine steps a level is; the middle one where it is not known."""
    if level is None:
        level = 0.5
    return min(int(level * len(RAMP)), len(RAMP) - 1)


def _mark(cell: Cell) -> str:
    if not cell.kept:
        return "·"
    if cell.level is None:
        return "■"
    return SHADES[max(_step(cell.level), 1)]  # step 0 is a blank, which would look removed


def _labels(rows: Sequence[Row]) -> list[str]:
    """Labels in a column, and kinds in a second one if there are any."""
    label_width = max((len(row.label) for row in rows), default=0)
    kind_width = max((len(row.kind) for row in rows), default=0)
    labels = []
    for row in rows:
        label = f"{row.label:<{label_width}}"
        if kind_width:
            label += f"  {row.kind:<{kind_width}}"
        labels.append(label)
    return labels


def text_grid(title: str, rows: Sequence[Row]) -> str:
    """Draw the grid with block characters, one line per site; removed heads are dots."""
    lines = [title]
    for label, row in zip(_labels(rows), rows, strict=True):
        marks = " ".join(map(_mark, row.cells))
        lines.append(f"  {label}  {marks}{row.note and '  '}{row.note}")
    return clean("\n".join(lines))


def rich_grid(title: str, rows: Sequence[Row]) -> str:
    """Draw the same grid as coloured rich markup; without colours the marks remain."""
    from rich.markup import escape

    lines = [escape(clean(title))]
    for label, row in zip(_labels(rows), rows, strict=True):
        cells = "".join(map(_rich_cell, row.cells))
        lines.append(f"  {escape(clean(label))}  {cells}{row.note and '  '}{escape(row.note)}")
    return "\n".join(lines)


def _rich_cell(cell: Cell) -> str:
    if not cell.kept:
        return "[dim]·· [/]"
    step = _step(cell.level)
    ink = "#000000" if step < _DARK else "#ffffff"
    mark = " " if cell.level is None else _mark(cell)
    head = "" if cell.head is None else cell.head
    return f"[{ink} on {RAMP[step]}]{head:>2}{mark}[/]"


def rich_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()
) -> Table:
    """Make a table for a terminal.

    Cells are broken into lines and never cut off; their text is not read as markup.

    Args:
        title: Above the table; empty for none.
        header: Names of the columns.
        rows: Their cells.
        notes: Lines below the table.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title_justify="left", caption_justify="left", box=None)
    if title:
        table.title = Text(clean(title))
    if notes:
        lines = [f"note: {note}" for note in notes]
        table.caption = Text(clean("\n".join(lines)))
    for name in header:
        table.add_column(Text(clean(name)), overflow="fold")
    for row in rows:
        cells = [Text(clean(cell)) for cell in row]
        table.add_row(*cells)
    return table


def html_grid(title: str, rows: Sequence[Row]) -> str:
    """Draw the same grid as an HTML table without scripts or style sheets, safe to embed."""
    parts = [f'<caption style="text-align:left">{html_text(title)}</caption>']
    for row in rows:
        label = html_text(row.label)
        if row.kind:
            label += f" <i>{html_text(row.kind)}</i>"
        style = "text-align:right;padding-right:8px;font-weight:normal"
        cells = "".join(map(_html_cell, row.cells))
        if row.note:
            cells += f'<td style="padding-left:8px">{html_text(row.note)}</td>'
        parts.append(f'<tr><th scope="row" style="{style}">{label}</th>{cells}</tr>')
    style = "border-collapse:collapse;font-family:monospace"
    return f'<table style="{style}">{"".join(parts)}</table>'


def _html_cell(cell: Cell) -> str:
    if cell.kept:
        step = _step(cell.level)
        ink = "#000" if step < _DARK else "#fff"
        fill = f"background:{RAMP[step]};color:{ink};"
    else:
        fill = "background:repeating-linear-gradient(45deg,#bbb 0 2px,#fff 2px 6px);color:#555;"
    style = f"{fill}padding:2px 6px;text-align:center;border:1px solid #999"
    head = "&nbsp;" if cell.head is None else cell.head
    return f'<td style="{style}" title="{html_text(cell.title)}">{head}</td>'
