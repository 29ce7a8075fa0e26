"""Agreement: how alike several scorers rank the heads, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.core.codec import Value
from headprune.core.display import html_text, rich_table
from headprune.core.errors import InvalidValue, UnknownName, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

#: The measures in the order of the table, with their lowest value.
MEASURES = {"spearman": -1.0, "kendall": -1.0, "jaccard": 0.0}


@dataclass(frozen=True)
class Measure:
    """A measure of agreement and its interval.

    Two that are not defined are equal, unlike NaN. So an agreement equals itself after a round trip
    through a file.

    Args:
        value: The measure; NaN where it is not defined.
        low, high: Ends of the interval; None where nothing was sampled.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def _key(self) -> tuple[float | None, ...]:
        # NaN differs from itself; None does not.
        value = None if math.isnan(self.value) else self.value
        return value, self.low, self.high

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Measure):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not defined"
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Pair:
    """Agreement of two scores.

    Args:
        first, second: Their positions in ``Agreement.names``.
        spearman: Correlation of ranks; ties have average ranks.
        kendall: Kendall's tau-b.
        jaccard: Of the sets of the k lowest: common units over units in either.
    """

    first: int
    second: int
    spearman: Measure
    kendall: Measure
    jaccard: Measure


@dataclass(frozen=True)
class Agreement(Value):
    """Rank agreement of every pair of scores.

    Args:
        names: Of the scores.
        k: Units in the sets that ``jaccard`` compares.
        n_units: Scored units.
        confidence: Of the intervals.
        pairs: Every pair.
        notes: Messages for the reader.
    """

    names: tuple[str, ...]
    k: int
    n_units: int
    confidence: float
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise InvalidValue("Agreement.names", "different from one another", self.names)

    def between(self, first: str, second: str) -> Pair:
        """The pair of two names, in either order.

        Raises:
            UnknownName: no such pair.
        """
        where = "Agreement.between"
        if first == second:
            must = "two different names of those compared"
            raise UnknownName(where, must, f"{first!r} twice")
        # A pair is stored once, in the order of the names.
        for pair in self.pairs:
            if {self.names[pair.first], self.names[pair.second]} == {first, second}:
                return pair
        # The hint is about the name that is not there.
        wrong = second if first in self.names and second not in self.names else first
        hint = did_you_mean(wrong, self.names)
        raise UnknownName(where, "two of the compared names", wrong, hint)

    def label(self, pair: Pair) -> str:
        """A pair as text."""
        return f"{self.names[pair.first]} - {self.names[pair.second]}"

    @property
    def title(self) -> str:
        return f"Agreement over {self.n_units} units, intervals of {100 * self.confidence:g} %"

    @property
    def header(self) -> tuple[str, ...]:
        """Columns of the table."""
        return ("scores", "Spearman", "Kendall tau-b", f"Jaccard of the {self.k} lowest")

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table."""
        rows = []
        for pair in self.pairs:
            measures = [str(getattr(pair, name)) for name in MEASURES]
            rows.append((self.label(pair), *measures))
        return rows

    def __str__(self) -> str:
        table = [self.header, *self.rows()]
        # zip(*table) gives the columns.
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [self.title]
        for row in table:
            cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
            lines.append("  " + "  ".join(cells).rstrip())
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __rich__(self) -> Table:
        return rich_table(self.title, self.header, self.rows(), self.notes)

    def _repr_html_(self) -> str:
        parts = [f"<caption>{html_text(self.title)}</caption>", _html_line(self.header, "th")]
        parts += [_html_line(row, "td") for row in self.rows()]
        notes = [f"<p>{html_text(note)}</p>" for note in self.notes]
        return f"<table>{''.join(parts)}</table>{''.join(notes)}"


def _html_line(cells: tuple[str, ...], tag: str) -> str:
    marked = [f"<{tag}>{html_text(cell)}</{tag}>" for cell in cells]
    return f"<tr>{''.join(marked)}</tr>"
