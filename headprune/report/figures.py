"""Geometry of the inline SVG figures, in percent of their width; the templates draw it, and
escape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headprune.core.agreement import MEASURES, Agreement, Measure
from headprune.core.record import SpeedRow
from headprune.report.quality import QualityGroup


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
    """The bar chart of one accuracy table: change from the original model, or plain values where
    there is none."""
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


@dataclass(frozen=True)
class AgreementDot:
    """One measure of one pair of scores: in words, and on an axis from the measure's lowest value
    to 1."""

    words: str
    middle: float | None
    low: float | None
    high: float | None
    zero: float


def agreement_dots(found: Agreement) -> list[tuple[str, list[AgreementDot]]]:
    """For every pair of scores, its dots in the order of ``MEASURES``; all on one axis."""
    pairs = [
        (found.label(pair), [getattr(pair, name) for name in MEASURES]) for pair in found.pairs
    ]
    axis = _Axis.over(
        [v for _, row in pairs for m in row for v in (m.value, m.low or 0.0)] + [1.0], 0.0
    )
    return [(label, [_dot(measure, axis) for measure in row]) for label, row in pairs]


def _dot(measure: Measure, axis: _Axis) -> AgreementDot:
    low, high = ((None if v is None else axis.at(v)) for v in (measure.low, measure.high))
    middle = axis.at(measure.value) if math.isfinite(measure.value) else None
    return AgreementDot(str(measure), middle, low, high, axis.at(0.0))
