"""Geometry of the trade-off curve of records or of a sweep: quality against heads kept, spread and
the random band."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headprune.core.metrics import LOWER, RATIO, is_one_of
from headprune.report.formats import fixed, significant
from headprune.report.series import Series, TradeoffPoint, series_of

#: Size of the drawing, and of what lies inside of its axes.
WIDTH, HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44
#: Marks by which lines differ without colour; a template has a shape for each.
MARKS = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class CurvePoint:
    """A measurement: its place, its whisker (None without spread), and what it says."""

    x: float
    y: float
    whisker: tuple[float, float] | None
    title: str


@dataclass(frozen=True)
class CurveLine:
    """A method: ``band`` is the outline of one standard deviation around chance, empty for
    others."""

    name: str
    role: str
    mark: str
    dash: str
    points: tuple[CurvePoint, ...]
    path: str
    band: str


@dataclass(frozen=True)
class Curve:
    """The drawing with its axes."""

    lines: tuple[CurveLine, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    metric: str
    split: str
    direction: str
    title: str


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> _Scale:
        low, high = min(values), max(values)
        room = 0.06 * (high - low) or 0.5 * (abs(high) or 1)
        return cls(low - room, high + room, start, end)

    def at(self, value: float) -> float:
        return round(
            self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1
        )

    def ticks(self) -> list[float]:
        """Four to eight round numbers."""
        step = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(
            step * f for f in (1, 0.5, 0.2, 0.1) if (self.high - self.low) / (step * f) >= 4
        )
        first = math.ceil(self.low / step)
        return [round(step * i, 12) for i in range(first, math.floor(self.high / step) + 1)]


def curve(points: Iterable[TradeoffPoint], split: str) -> Curve | None:
    """The curve of the first metric among points of a split; None where all sizes are the same, or
    without any."""
    points = [p for p in points if math.isfinite(p.value) and math.isfinite(p.spread)]
    points = [p for p in points if p.metric == points[0].metric]
    cut = {p.kept for p in points if p.method != "base"}
    if len(cut) < 2:
        return None
    found = series_of(points)
    ends = [v + sign * s for series in found for _, v, s in series.points for sign in (-1, 1)]
    x = _Scale.over([p.kept for p in points], _LEFT, WIDTH - _RIGHT)
    y = _Scale.over(ends, HEIGHT - _BOTTOM, _TOP)
    methods = [s.method for s in found if s.role == "method"]
    lines = tuple(
        _line(s, methods.index(s.method) if s.role == "method" else 0, x, y) for s in found
    )
    metric = points[0].metric
    return Curve(
        lines=tuple(sorted(lines, key=lambda line: ("random", "base", "method").index(line.role))),
        x_ticks=tuple((x.at(kept), f"{kept:,}") for kept in sorted({p.kept for p in points})),
        y_ticks=tuple((y.at(v), significant(v)) for v in y.ticks()),
        metric=metric,
        split=split,
        direction="lower is better" if is_one_of(metric, (*RATIO, *LOWER)) else "",
        title=f"{metric} on {split} rows against heads kept; "
        + "; ".join(_words(s) for s in found),
    )


def _line(series: Series, number: int, x: _Scale, y: _Scale) -> CurveLine:
    places = [(x.at(kept), y.at(value)) for kept, value, _ in series.points]
    edges = [(x.at(kept), y.at(v - s), y.at(v + s)) for kept, v, s in series.points]
    points = tuple(
        CurvePoint(
            px,
            py,
            (low, high) if spread else None,
            f"{series.method}: {_value(kept, value, spread)}",
        )
        for (px, py), (_, low, high), (kept, value, spread) in zip(
            places, edges, series.points, strict=True
        )
    )
    outline = [(px, high) for px, _, high in edges] + [(px, low) for px, low, _ in reversed(edges)]
    return CurveLine(
        name="all heads" if series.role == "base" else series.method,
        role=series.role,
        mark=MARKS[number % len(MARKS)],
        dash=("", "7 4", "2 4", "9 3 2 3")[number % 4],
        points=points,
        path=" ".join(f"{px},{py}" for px, py in places),
        band=" ".join(f"{px},{py}" for px, py in outline) if series.role == "random" else "",
    )


def _value(kept: int, value: float, spread: float) -> str:
    return f"{kept:,} heads {significant(value)}" + (f" ± {fixed(spread, 4)}" if spread else "")


def _words(series: Series) -> str:
    return f"{series.method}: " + ", ".join(_value(*point) for point in series.points)
