"""Geometry of the trade-off curve: quality against heads kept, spread and the random band."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headprune.core.metrics import LOWER, RATIO, is_one_of
from headprune.report.formats import fixed, significant
from headprune.report.series import Series, TradeoffPoint, differ_in_heads_alone, series_of

#: Size of the drawing, and the margins around its axes.
WIDTH, HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 16, 14, 52
#: A template has a shape for each mark; the second is matplotlib's.
MARKS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle": "^",
    "wedge": "v",
    "plus": "P",
    "cross": "X",
}
#: Colours of methods on white and on black. There is one more than marks, so that 56 methods differ
#: in one or the other; none of them means good or bad.
COLOURS = (
    ("#0067a5", "#6cb8f0"),
    ("#b8520a", "#f5a35c"),
    ("#7a3e9d", "#c79be8"),
    ("#00796b", "#4fc9b4"),
    ("#b03a74", "#f08fbd"),
    ("#7d6a00", "#d8c24a"),
    ("#4a4f55", "#b9c0c6"),
    ("#8c3b2e", "#e59a8c"),
)
DASHES = ("", "7 4", "2 4", "9 3 2 3")
#: Lines are drawn in this order, so that methods cover the band of chance.
_LAYERS = ("random", "base", "method")


@dataclass(frozen=True)
class CurvePoint:
    """A measurement: its place, its whisker (None without spread), and its text."""

    x: float  # pixels
    y: float  # pixels, downwards
    whisker: tuple[float, float] | None  # upper and lower end, in pixels
    title: str


@dataclass(frozen=True)
class CurveLine:
    """A method; ``band`` outlines one standard deviation around chance, empty for others."""

    name: str
    role: str  # base, random or method
    mark: str  # one of `MARKS`
    colour: int  # place in `COLOURS`
    dash: str  # an SVG dash array
    points: tuple[CurvePoint, ...]
    path: str  # SVG points of the line
    band: str  # SVG points of the outline


@dataclass(frozen=True)
class Curve:
    """The drawing with its axes."""

    lines: tuple[CurveLine, ...]
    x_ticks: tuple[tuple[float, str], ...]  # (pixel, label)
    y_ticks: tuple[tuple[float, str], ...]  # (pixel, label)
    metric: str
    split: str
    direction: str  # empty where higher is better
    title: str  # all values as text, for screen readers


@dataclass(frozen=True)
class _AxisScale:
    """Map values from ``low`` to ``high`` onto pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> _AxisScale:
        low, high = min(values), max(values)
        # Equal values get an axis around them, also around zero.
        room = 0.06 * (high - low) or 0.5 * (abs(high) or 1)
        return cls(low - room, high + room, start, end)

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return four to eight round numbers."""
        span = self.high - self.low
        power_of_ten = 10.0 ** math.floor(math.log10(span))
        for part in (1, 0.5, 0.2, 0.1):
            step = power_of_ten * part
            if span / step >= 4:
                break
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [round(step * i, 12) for i in range(first, last + 1)]


def curve(points: Iterable[TradeoffPoint], split: str) -> Curve | None:
    """Draw the first metric's points.

    None unless methods keep two numbers of heads or more, and as many neurons.
    """
    points = _first_metric(points)
    n_sizes = len({point.kept for point in points if point.method != "base"})
    if n_sizes < 2 or not differ_in_heads_alone(points):
        return None
    metric = points[0].metric
    series = series_of(points)
    kept = sorted({point.kept for point in points})
    x = _AxisScale.over(kept, _LEFT, WIDTH - _RIGHT)
    # Pixels count downwards.
    y = _AxisScale.over(_ends(series), HEIGHT - _BOTTOM, _TOP)
    lines = _lines(series, x, y)
    texts = "; ".join(map(_series_text, series))
    return Curve(
        lines=tuple(sorted(lines, key=lambda line: _LAYERS.index(line.role))),
        x_ticks=tuple((x.at(n), f"{n:,}") for n in kept),
        y_ticks=tuple((y.at(value), significant(value)) for value in y.ticks()),
        metric=metric,
        split=split,
        direction="lower is better" if is_one_of(metric, (*RATIO, *LOWER)) else "",
        title=f"{metric} on {split} rows against heads kept; {texts}",
    )


def _first_metric(points: Iterable[TradeoffPoint]) -> list[TradeoffPoint]:
    """Keep the finite points of the metric that comes first."""
    kept: list[TradeoffPoint] = []
    for point in points:
        finite = math.isfinite(point.value) and math.isfinite(point.spread)
        if finite and (not kept or point.metric == kept[0].metric):
            kept.append(point)
    return kept


def _ends(lines: Sequence[Series]) -> list[float]:
    """List both ends of all whiskers."""
    ends = []
    for series in lines:
        for _, value, spread in series.points:
            ends += [value - spread, value + spread]
    return ends


def _lines(lines: Sequence[Series], x: _AxisScale, y: _AxisScale) -> list[CurveLine]:
    """Draw every method; marks and dashes are numbered separately for each role."""
    drawn = []
    counts: Counter[str] = Counter()
    for series in lines:
        drawn.append(_line(series, counts[series.role], x, y))
        counts[series.role] += 1
    return drawn


def _line(series: Series, number: int, x: _AxisScale, y: _AxisScale) -> CurveLine:
    points, path, upper, lower = [], [], [], []
    for kept, value, spread in series.points:
        px, py = x.at(kept), y.at(value)
        low, high = y.at(value - spread), y.at(value + spread)
        whisker = (low, high) if spread else None
        title = f"{series.method}: {_point_text(kept, value, spread)}"
        points.append(CurvePoint(px, py, whisker, title))
        path.append(f"{px},{py}")
        upper.append(f"{px},{high}")
        lower.append(f"{px},{low}")
    # The outline of the band runs along its upper edge and back along the lower one.
    outline = [*upper, *reversed(lower)]
    # Templates draw the base as one level line, and a band for chance alone.
    name = series.method
    if series.role == "base":
        name = "all heads"
    return CurveLine(
        name=name,
        role=series.role,
        mark=list(MARKS)[number % len(MARKS)],
        colour=number % len(COLOURS),
        dash=DASHES[number % len(DASHES)],
        points=tuple(points),
        path=" ".join(path),
        band=" ".join(outline) if series.role == "random" else "",
    )


def _point_text(kept: int, value: float, spread: float) -> str:
    text = f"{kept:,} heads {significant(value)}"
    return f"{text} ± {fixed(spread, 4)}" if spread else text


def _series_text(series: Series) -> str:
    texts = ", ".join(_point_text(*point) for point in series.points)
    return f"{series.method}: {texts}"
