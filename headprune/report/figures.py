"""Geometry of the inline SVG figures, in percent of their width; the templates draw it, and escape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headprune.core.record import RunRecord, SpeedRow
from headprune.report.heatmap import N_STEPS
from headprune.report.view import QualityGroup


@dataclass(frozen=True)
class Bar:
    """One horizontal bar from the zero line; ``whisker`` is the spread over draws."""

    name: str
    text: str
    tone: str
    x: float
    width: float
    whisker: tuple[float, float] | None


@dataclass(frozen=True)
class BarChart:
    """Bars that start at one zero line, so that their lengths compare."""

    bars: tuple[Bar, ...]
    zero: float
    label: str
    title: str


@dataclass(frozen=True)
class Interval:
    """A ratio and its interval on an axis that all rows share."""

    low: float
    high: float
    middle: float
    one: float


@dataclass(frozen=True)
class AttentionMap:
    """A small multiple: one SVG path for each colour step."""

    title: str
    rows: int
    columns: int
    paths: tuple[tuple[int, str], ...]
    largest: float


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float], always: float) -> _Axis:
        finite = [v for v in values if math.isfinite(v)]
        low, high = min([*finite, always]), max([*finite, always])
        return cls(low, high) if high > low else cls(low - 1, high + 1)

    def at(self, value: float) -> float:
        """Position of a value, from 1 to 99 percent."""
        inside = min(max(value, self.low), self.high)
        return round(1 + 98 * (inside - self.low) / (self.high - self.low), 2)


def bars(group: QualityGroup) -> BarChart | None:
    """The bar chart of one accuracy table: change from the original model, or plain values where there is none."""
    rows = [r for r in group.rows if r.amount is not None and math.isfinite(r.amount)]
    if len(rows) < 2:
        return None
    reach = [(r.amount or 0.0, r.spread_amount or 0.0) for r in rows]
    ends = [amount + sign * spread for amount, spread in reach for sign in (-1, 1)]
    axis = _Axis.over(ends, 0.0)
    drawn = []
    for row in rows:
        amount, spread = row.amount or 0.0, row.spread_amount
        start, end = sorted((axis.at(0.0), axis.at(amount)))
        whisker = None if spread is None else (axis.at(amount - spread), axis.at(amount + spread))
        text = row.value if row.role == "base" or not row.delta else f"{row.value}  ({row.delta})"
        drawn.append(Bar(row.name, text, row.tone, start, round(end - start, 2), whisker))
    title = "; ".join(f"{b.name}: {b.text}" for b in drawn)
    return BarChart(tuple(drawn), axis.at(0.0), group.chart_label, title)


def intervals(rows: Sequence[SpeedRow]) -> list[Interval]:
    """One interval a row of the speed table, all on one axis that holds 1."""
    axis = _Axis.over([v for r in rows for v in (r.low, r.high, r.ratio)], 1.0)

    def at(value: float) -> float:
        return axis.at(value if math.isfinite(value) else 1.0)

    return [Interval(low=at(r.low), high=at(r.high), middle=at(r.ratio), one=at(1.0)) for r in rows]


def attention_maps(record: RunRecord) -> tuple[str, list[AttentionMap]] | None:
    """The attention pictures in ``metrics["attention"]``: ``{"title", "maps": [{"site", "head", "grid"}]}``.

    Each map is coloured from zero to its own largest weight. None where the record has none.
    """
    found = record.metrics.get("attention")
    if not isinstance(found, Mapping):
        return None
    maps = [_attention_map(m) for m in found.get("maps", ()) if isinstance(m, Mapping) and m.get("grid")]
    return (str(found.get("title", "Attention")), maps) if maps else None


def _attention_map(data: Mapping[str, Any]) -> AttentionMap:
    grid = data["grid"]
    largest = max((v for row in grid for v in row if math.isfinite(v)), default=0.0)
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            if math.isfinite(value):
                level = max(value, 0.0) / largest if largest > 0 else 0.0
                paths.setdefault(min(int(level * N_STEPS), N_STEPS - 1), []).append(f"M{x} {y}h1v1h-1z")
    return AttentionMap(
        title=f"{data.get('site', '')} head {data.get('head', '')}",
        rows=len(grid),
        columns=max(map(len, grid)),
        paths=tuple((step, "".join(parts)) for step, parts in sorted(paths.items())),
        largest=largest,
    )
