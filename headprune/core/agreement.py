"""Agreement: how alike several scorers order the heads, with intervals, as a value that can be
printed and stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.core.codec import Value
from headprune.core.display import html_text, rich_table
from headprune.core.errors import InvalidValue, UnknownName, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

#: The measures, in the order in which they are shown, and their lowest value.
MEASURES = {"spearman": -1.0, "kendall": -1.0, "jaccard": 0.0}


@dataclass(frozen=True)
class Measure:
    """A measure of agreement and its interval; NaN where it is not defined, no interval where
    nothing was sampled.

    Two that are not defined are equal, unlike NaN, so that an agreement equals what is read back
    from its file.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def _key(self) -> tuple[float | None, ...]:
        return None if math.isnan(self.value) else self.value, self.low, self.high

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Measure) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not defined"
        interval = (
            "" if self.low is None or self.high is None else f" [{self.low:.2f}, {self.high:.2f}]"
        )
        return f"{self.value:.2f}{interval}"


@dataclass(frozen=True)
class Pair:
    """Two scores, by their places in ``Agreement.names``.

    Args:
        first, second: Their places.
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
        n_units: Units that were scored.
        confidence: Of the intervals.
        pairs: Every pair.
        notes: What the reader should know.
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
        if first == second:
            raise UnknownName(
                "Agreement.between", "two different names of those compared", f"{first!r} twice"
            )
        for pair in self.pairs:
            if {self.names[pair.first], self.names[pair.second]} == {first, second}:
                return pair
        wrong = next((name for name in (first, second) if name not in self.names), first)
        raise UnknownName(
            "Agreement.between", "two of the compared names", wrong, did_you_mean(wrong, self.names)
        )

    def label(self, pair: Pair) -> str:
        """A pair in words."""
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
        return [(self.label(p), *(str(getattr(p, name)) for name in MEASURES)) for p in self.pairs]

    def __str__(self) -> str:
        table = [self.header, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join(
            [self.title, *("  " + line for line in lines), *(f"  note: {n}" for n in self.notes)]
        )

    def __rich__(self) -> Table:
        return rich_table(self.title, self.header, self.rows(), self.notes)

    def _repr_html_(self) -> str:
        def line(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html_text(c)}</{tag}>" for c in cells) + "</tr>"

        body = "".join(line(row, "td") for row in self.rows())
        notes = "".join(f"<p>{html_text(n)}</p>" for n in self.notes)
        head = f"<caption>{html_text(self.title)}</caption>{line(self.header, 'th')}"
        return f"<table>{head}{body}</table>{notes}"
