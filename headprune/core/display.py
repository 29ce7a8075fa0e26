"""How scores, masks and plans look when printed: a grid of sites and heads in text, rich markup and
HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

#: Nine steps from least to most important; the HTML ramp is readable without colour (light to
#: dark).
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


_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&])")
#: What moves a terminal's cursor or turns its text around, and what no document may hold.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    """Text without terminal colours; other characters that a page or a terminal must not be given
    become U+FFFD.

    >>> clean("a\\x1b[31m red \\x07")
    'a red \ufffd'
    """
    return CONTROL.sub("\ufffd", _ANSI.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def escape(text: object) -> str:
    """Text that Markdown shows as it is, in one line; safe inside a table cell.

    >>> print(escape("a|b <i>"))
    a\\|b \\<i\\>
    """
    return _SPECIAL.sub(r"\\\1", " ".join(clean(str(text)).split()))


def html_text(text: str) -> str:
    """Text that HTML shows as it is, in an attribute too.

    >>> html_text("<i>\\x1b[1m")
    '&lt;i&gt;'
    """
    return html.escape(clean(text))


@dataclass(frozen=True)
class Cell:
    """One head: its importance from 0 to 1 (None: unknown), whether it stays, and what a pointer
    over it says."""

    head: int
    level: float | None
    kept: bool
    title: str


@dataclass(frozen=True)
class Row:
    """One site of the grid; ``kind`` is its kind of attention, where the grid has more than one."""

    label: str
    cells: tuple[Cell, ...]
    kind: str = ""


def levels(values: Sequence[float]) -> list[float]:
    """Values mapped to 0..1, lowest to highest; equal values all map to 0.5.

    >>> levels([1.0, 3.0, 2.0])
    [0.0, 1.0, 0.5]
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(v - low) / (high - low) if high > low else 0.5 for v in values]


def _step(level: float) -> int:
    return min(int(level * len(RAMP)), len(RAMP) - 1)


def _mark(cell: Cell) -> str:
    if not cell.kept:
        return "·"
    return "■" if cell.level is None else SHADES[max(_step(cell.level), 1)]


def _labels(rows: Sequence[Row]) -> list[str]:
    """Labels, and kinds where there are any, in columns."""
    width, kinds = (
        max(map(len, column), default=0)
        for column in ([r.label for r in rows], [r.kind for r in rows])
    )
    return [f"{r.label:<{width}}" + (f"  {r.kind:<{kinds}}" if kinds else "") for r in rows]


def text_grid(title: str, rows: Sequence[Row]) -> str:
    """A grid of block characters, one line a site; removed heads are dots."""
    labelled = zip(_labels(rows), rows, strict=True)
    lines = [f"  {label}  {' '.join(_mark(c) for c in r.cells)}" for label, r in labelled]
    return clean("\n".join([title, *lines]))


def rich_grid(title: str, rows: Sequence[Row]) -> str:
    """The same grid as rich markup, coloured; the marks stay where a terminal has no colours
    (``NO_COLOR``)."""
    from rich.markup import escape

    def paint(cell: Cell) -> str:
        if not cell.kept:
            return "[dim]·· [/]"
        colour = RAMP[_step(0.5 if cell.level is None else cell.level)]
        ink = "#000000" if _step(cell.level or 0.5) < 5 else "#ffffff"
        return f"[{ink} on {colour}]{cell.head:>2}{' ' if cell.level is None else _mark(cell)}[/]"

    labels = [escape(clean(label)) for label in _labels(rows)]
    lines = [
        f"  {label}  {''.join(map(paint, r.cells))}" for label, r in zip(labels, rows, strict=True)
    ]
    return "\n".join([escape(clean(title)), *lines])


def rich_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()
) -> Table:
    """A table for a terminal; cells are broken into lines and never cut off, and what they say is
    no markup.

    Args:
        title: Above it; empty for none.
        header: Names of the columns.
        rows: Their cells.
        notes: What the reader should know, below it.
    """
    from rich.table import Table
    from rich.text import Text

    above = Text(clean(title)) if title else None
    below = Text(clean("\n".join(f"note: {note}" for note in notes))) if notes else None
    table = Table(
        title=above, title_justify="left", caption=below, caption_justify="left", box=None
    )
    for name in header:
        table.add_column(Text(clean(name)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    return table


def html_grid(title: str, rows: Sequence[Row]) -> str:
    """The same grid as an HTML table without scripts or style sheets, safe to embed."""

    def paint(cell: Cell) -> str:
        level = 0.5 if cell.level is None else cell.level
        ink = "#000" if _step(level) < 5 else "#fff"
        look = f"background:{RAMP[_step(level)]};color:{ink};"
        if not cell.kept:
            look = "background:repeating-linear-gradient(45deg,#bbb 0 2px,#fff 2px 6px);color:#555;"
        style = f"{look}padding:2px 6px;text-align:center;border:1px solid #999"
        return f'<td style="{style}" title="{html_text(cell.title)}">{cell.head}</td>'

    def label(row: Row) -> str:
        return html_text(row.label) + (f" <i>{html_text(row.kind)}</i>" if row.kind else "")

    body = "".join(
        '<tr><th scope="row"'
        f' style="text-align:right;padding-right:8px;font-weight:normal">{label(r)}</th>'
        f"{''.join(map(paint, r.cells))}</tr>"
        for r in rows
    )
    caption = f'<caption style="text-align:left">{html_text(title)}</caption>'
    return f'<table style="border-collapse:collapse;font-family:monospace">{caption}{body}</table>'
