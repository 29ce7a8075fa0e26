"""Geometry of the inline SVG figures, in percent of their width; templates draw and escape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headprune.core.agreement import MEASURES, Agreement, Measure
from headprune.core.record import SpeedRow
from headprune.report.quality import QualityGroup, QualityLine


@dataclass(frozen=True)
class Bar:
    """One horizontal bar from the zero line; ``whisker`` is the spread over draws."""

    name: str
    text: str  # value and change
    tone: str  # base, good, bad or plain
    x: float  # left end, percent
    width: float  # percent
    whisker: tuple[float, float] | None  # both ends, percent; None without a spread


@dataclass(frozen=True)
class BarChart:
    """Bars that start at one zero line, so that their lengths compare."""

    bars: tuple[Bar, ...]
    zero: float  # place of the zero line, percent
    label: str  # of the axis
    title: str  # all values as text, for screen readers


@dataclass(frozen=True)
class Interval:
    """Positions of a ratio and its interval on an axis that all rows share."""

    low: float
    high: float
    middle: float
    one: float  # place of a ratio of 1: no change


@dataclass(frozen=True)
class _PercentAxis:
    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], always: float) -> _PercentAxis:
        """Span all finite values, and ``always``."""
        shown = [always, *filter(math.isfinite, values)]
        low, high = min(shown), max(shown)
        # Equal values stand in the middle.
        if low == high:
            low, high = low - 1, high + 1
        return cls(low, high)

    def at(self, value: float) -> float:
        """Return the position of a value, from 1 to 99 percent."""
        inside = min(max(value, self.low), self.high)
        return round(1 + 98 * (inside - self.low) / (self.high - self.low), 2)


def bars(group: QualityGroup) -> BarChart | None:
    """Lay out the bar chart of one quality table; None with fewer than two bars to compare.

    Bars are changes from the original model, whose own is empty, or plain values without one.
    """
    # 1. Find an axis for bars and whiskers.
    drawn = []
    ends = []
    for row in group.rows:
        if row.amount is not None and math.isfinite(row.amount):
            spread = row.spread_amount or 0.0
            ends += [row.amount - spread, row.amount + spread]
            drawn.append((row, row.amount))
    if sum(row.role != "base" for row, _ in drawn) < 2:
        return None
    axis = _PercentAxis.over(ends, 0.0)
    # 2. Draw every bar from the zero line.
    chart, texts = [], []
    for row, amount in drawn:
        bar = _bar(row, amount, axis)
        chart.append(bar)
        texts.append(f"{bar.name}: {bar.text}")
    return BarChart(tuple(chart), axis.at(0.0), group.chart_label, "; ".join(texts))


def _bar(row: QualityLine, amount: float, axis: _PercentAxis) -> Bar:
    start, end = sorted((axis.at(0.0), axis.at(amount)))
    whisker = None
    if row.spread_amount is not None:
        whisker = (axis.at(amount - row.spread_amount), axis.at(amount + row.spread_amount))
    text = row.value
    if row.role != "base" and row.delta:
        text += f"  ({row.delta})"
    return Bar(row.name, text, row.tone, start, round(end - start, 2), whisker)


def intervals(rows: Sequence[SpeedRow]) -> list[Interval]:
    """Lay out one interval per row of the speed table, all on one axis that holds 1."""
    values: list[float] = []
    for row in rows:
        values += [row.low, row.high, row.ratio]
    axis = _PercentAxis.over(values, 1.0)
    drawn = []
    for row in rows:
        low, high, middle = map(_finite, (row.low, row.high, row.ratio))
        drawn.append(Interval(axis.at(low), axis.at(high), axis.at(middle), axis.at(1.0)))
    return drawn


def _finite(ratio: float) -> float:
    """Draw a ratio without a usable timing at 1."""
    return ratio if math.isfinite(ratio) else 1.0


@dataclass(frozen=True)
class AgreementDot:
    """One measure of one pair of scores, as text and on an axis that ends at 1."""

    words: str
    middle: float | None  # None where it is not defined
    low: float | None
    high: float | None
    zero: float  # place of 0: chance agreement


def agreement_dots(agreement: Agreement) -> list[tuple[str, list[AgreementDot]]]:
    """Lay out every pair of scores: its label, and its dots in the order of ``MEASURES``."""
    # 1. All dots share an axis; agreement below chance is negative.
    pairs: list[tuple[str, list[Measure]]] = []
    ends = [1.0]
    for pair in agreement.pairs:
        measures = [getattr(pair, name) for name in MEASURES]
        pairs.append((agreement.label(pair), measures))
        for measure in measures:
            ends += [measure.value, measure.low or 0.0]
    axis = _PercentAxis.over(ends, 0.0)
    # 2. Place the dots.
    dots = []
    for label, measures in pairs:
        dots.append((label, [_dot(measure, axis) for measure in measures]))
    return dots


def _dot(measure: Measure, axis: _PercentAxis) -> AgreementDot:
    low = high = middle = None
    if measure.low is not None:
        low = axis.at(measure.low)
    if measure.high is not None:
        high = axis.at(measure.high)
    if math.isfinite(measure.value):
        middle = axis.at(measure.value)
    return AgreementDot(str(measure), middle, low, high, axis.at(0.0))
