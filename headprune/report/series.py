"""Quality against heads kept, method by method: what pictures of the trade-off draw."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from headprune.core.errors import InvalidValue
from headprune.core.record import RunRecord
from headprune.core.sweeps import SweepTable


@dataclass(frozen=True)
class Point:
    """One measurement; ``spread`` is a standard deviation over draws, 0 without."""

    metric: str
    method: str
    kept: int
    value: float
    spread: float


@dataclass(frozen=True)
class Series:
    """One method: heads kept, mean and spread, by heads kept; ``role`` says how it is drawn."""

    method: str
    points: tuple[tuple[int, float, float], ...]

    @property
    def role(self) -> str:
        """``base`` for the uncut model, ``random`` for chance, else ``method``."""
        words = self.method.replace(",", " ").split()  # of a sweep: "scorer random, recover none"
        return "base" if self.method == "base" else "random" if "random" in words else "method"


def points_of(records: Iterable[RunRecord], split: str) -> list[Point]:
    """A point a row of the records' accuracy tables."""
    rows = [row for record in records for row in record.quality if row.split == split]
    return [Point(row.metric, row.name, row.kept_heads, row.value, row.spread or 0.0) for row in rows]


def points_of_sweep(table: SweepTable, split: str) -> list[Point]:
    """The uncut model, and a point a run.

    Raises:
        InvalidValue: no such split.
    """
    if split not in ("test", "validation"):
        raise InvalidValue("split", "test or validation", repr(split))
    base = Point(table.metric, "base", int(table.base["heads"]), float(table.base[split]), 0.0)
    runs = ((setting.method, row) for setting in table.settings() for row in setting.rows)
    return [base, *(Point(table.metric, m, int(row["heads"]), float(row[split]), 0.0) for m, row in runs)]


def series_of(points: Iterable[Point]) -> list[Series]:
    """Points by method; several of one method and size become their mean, with their own spread."""
    methods: dict[str, dict[int, list[Point]]] = {}
    for point in points:
        methods.setdefault(point.method, {}).setdefault(point.kept, []).append(point)
    return [Series(m, tuple(_mean(kept, by_kept[kept]) for kept in sorted(by_kept))) for m, by_kept in methods.items()]


def _mean(kept: int, points: list[Point]) -> tuple[int, float, float]:
    values = [point.value for point in points]
    spread = statistics.stdev(values) if len(values) > 1 else points[0].spread
    return kept, statistics.fmean(values), spread
