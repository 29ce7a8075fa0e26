"""Matplotlib pictures for notebooks and papers; no function sets a title.

    hp.plot.head_map(scores, plan)              # every head by score; removed heads are hatched
    hp.plot.attention(maps, example=2)          # what every head attends to in one example
    hp.plot.attention(maps, hp.HeadId(site, 3)) # one head, with its tokens along the axes
    hp.plot.tradeoff(records)                   # quality against heads kept, of runs or of a sweep
    hp.plot.agreement(hp.agreement(a, b))       # how alike scores order the heads

Every function takes and returns axes. Without any it opens a figure with pyplot, as matplotlib's
own functions do. ``picture.figure.savefig("heads.pdf")`` writes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.core.agreement import MEASURES, Agreement, Measure
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId
from headprune.core.metrics import LOWER, RATIO, is_one_of
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.core.sweeps import SweepTable
from headprune.maps.attention_maps import AttentionMaps
from headprune.report.curve import COLOURS, DASHES, MARKS
from headprune.report.formats import significant
from headprune.report.series import (
    Comparable,
    Series,
    TradeoffPoint,
    comparable,
    differ_in_heads_alone,
    points_of_sweep,
    series_of,
)

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["agreement", "attention", "head_map", "tradeoff"]

#: A colour map from light to dark, so that it also reads in black and white.
_COLOURS = "Blues"
#: Grey of cells without a head.
_MISSING = "0.93"
#: Up to so many tokens are written along the axes of a map.
_MAX_TOKENS = 40
_DARK, _LIGHT = "#08306b", "#2171b5"
#: A kept head without a score, and the frame of a removed head.
_KEPT, _REMOVED = "#9ecae1", "#b2182b"


def head_map(
    scores: HeadScores | None = None,
    plan: PruningPlan | None = None,
    *,
    ax: Axes | None = None,
    values: bool = False,
) -> Axes:
    """Draw layers by heads: colour is the score, removed heads are hatched.

    Heads that were removed before have an empty cell. A feed-forward is a bar; its hatched part is
    the share of neurons that are removed.

    Args:
        scores: Importance; None shows the plan alone.
        plan: Which heads are kept; None hatches nothing.
        ax: Where to draw.
        values: Write every score, with its standard error where it has one, into its cell.

    Raises:
        InvalidValue: neither scores nor a plan, or a plan for other sites.
    """
    import numpy as np

    # 1. Collect the rows.
    if scores is not None:
        rows = _scored_rows(scores)
    elif plan is not None:
        rows = _planned_rows(plan)
    else:
        raise InvalidValue("head_map", "given scores, a plan or both", "neither")
    kept = None if plan is None else _kept_heads(plan, rows)
    # 2. Colour every head by its score.
    grid = _score_grid(rows)
    if ax is None:
        ax = _axes(0.42 * grid.shape[1] + 2.6, 0.36 * grid.shape[0] + 0.9)
    ax.set_facecolor("white" if scores is None else _MISSING)
    picture = ax.imshow(np.ma.masked_invalid(grid), cmap=_COLOURS, aspect="auto")
    # 3. Mark what the plan does, and write the scores.
    _draw_bars(ax, rows, kept, grid.shape[1])
    if kept is not None:
        _mark_heads(ax, rows, kept, colour_kept=scores is None)
    if values:
        _write_scores(ax, rows, dark_above=_threshold(grid))
    # 4. Label the axes.
    ax.set_xticks(range(grid.shape[1]))
    ax.set_yticks(range(grid.shape[0]), [plain(row.site) for row in rows])
    ax.tick_params(length=0, labelsize=8)
    ax.set_xlabel("head")
    if scores is not None:
        label = plain(scores.scorer)
        bar = ax.figure.colorbar(picture, ax=ax, label=label, fraction=0.046, pad=0.02)
        _no_tex(bar.ax)
    _no_tex(ax)
    return ax


def attention(
    maps: AttentionMaps,
    head: HeadId | str | None = None,
    *,
    plan: PruningPlan | None = None,
    example: int = 0,
    query: int | None = None,
    ax: Axes | None = None,
    axes: Any = None,
) -> Any:
    """Draw what heads attend to in one example; darker is more weight.

    Rows are queries, columns are keys.

    Args:
        maps: The return value of ``hp.attention_maps``.
        head: A `HeadId` draws one head, large, with its tokens; a site's name draws all of its
            heads; None draws every head, small.
        plan: Heads that it removes get a dashed frame and a cross; ignored for one head.
        example: Its index in the batch.
        query: For maps of image patches, the query whose weights are laid out as the image; None
            takes the first. Ignored for text.
        ax: Where to draw one head.
        axes: An array of axes for several heads, one row per site.

    Returns:
        The axes of one head, or an array of them, ``[sites, heads]``.

    Raises:
        InvalidValue: no such example.
        UnknownName: no such site.
    """
    if not 0 <= example < maps.n_examples:
        raise InvalidValue("plot.attention(example=)", f"0 to {maps.n_examples - 1}", example)
    if isinstance(head, HeadId):
        return _draw_head(maps, head, example, query, ax)
    sites = list(maps.sites) if head is None else [maps.of(head)]
    if axes is None:
        axes = _panels(len(sites), max(len(site.heads) for site in sites))
    for site, row in zip(sites, axes, strict=True):
        for panel, index in zip(row, site.heads, strict=False):
            one = HeadId(site.site, index)
            _draw_weights(panel, _grid(maps, one, example, query))
            removed = plan is not None and one not in plan.mask
            _title_panel(panel, index, removed)
        # Sites with fewer heads than the widest one have panels to spare.
        for panel in row[len(site.heads) :]:
            panel.set_visible(False)
        row[0].set_ylabel(plain(site.site), fontsize=7, rotation=0, ha="right", va="center")
        _no_tex(row[0])
    return axes


def tradeoff(
    records: RunRecord | Iterable[RunRecord] | SweepTable,
    *,
    split: str = "test",
    ax: Axes | None = None,
) -> Axes:
    """Draw quality against heads kept: a line per method, a grey band for random heads.

    Args:
        records: Runs of one model and metric, each with its budget; or the table of a sweep.
        split: ``test`` or ``validation`` rows.
        ax: Where to draw.

    Raises:
        InvalidValue: nothing measured on those rows, several metrics, runs of several tasks,
            models or data, or models that keep other numbers of neurons.
    """
    from matplotlib.ticker import MaxNLocator

    points, metric = _one_group(records, split)
    if ax is None:
        ax = _axes(5.2, 3.6)
    drawn: Counter[str] = Counter()
    for series in series_of(points):
        _draw_series(ax, series, drawn[series.role])
        drawn[series.role] += 1
    lower = is_one_of(metric, (*RATIO, *LOWER))
    label = f"{plain(metric)} on {split} rows"
    if lower:
        label += ", lower is better"
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("heads kept")
    ax.set_ylabel(label)
    ax.grid(alpha=0.3)
    # Above the axes, where it covers no line and no band.
    ax.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    _no_tex(ax)
    return ax


def agreement(found: Agreement, *, axes: Any = None) -> Any:
    """Draw how alike scores order the heads: a panel per measure, a row per pair.

    Lines are confidence intervals.

    Args:
        found: The return value of ``hp.agreement``.
        axes: Three axes, one per measure.

    Returns:
        The axes.
    """
    n = len(found.pairs)
    if axes is None:
        axes = _panels(1, len(MEASURES), (3.3, 0.9 + 0.35 * n), sharey=True)[0]
    for panel, name, label in zip(axes, MEASURES, found.header[1:], strict=True):
        measures = [getattr(pair, name) for pair in found.pairs]
        _draw_measures(panel, measures)
        panel.set_xlabel(label, fontsize=9)
        panel.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(n), [plain(found.label(pair)) for pair in found.pairs])
    axes[0].set_ylim(n - 0.5, -0.5)
    _no_tex(axes[0])
    return axes


# ----------------------------------------------------------------------------------------------
# head maps


#: A score, NaN where there is none, and its standard error.
_Score = tuple[float, float | None]


@dataclass(frozen=True)
class _ScoreRow:
    """One site of a head map; score and standard error of each of its heads.

    ``neurons`` are the present ones of a feed-forward, which has a bar and no cells; else 0.
    """

    site: str
    n_heads: int
    scores: dict[int, _Score]
    neurons: int = 0


def _scored_rows(scores: HeadScores) -> list[_ScoreRow]:
    rows = {}
    for site in scores.sites:
        if site.is_feed_forward:
            rows[site.name] = _ScoreRow(site.name, 1, {}, len(site.heads))
        else:
            rows[site.name] = _ScoreRow(site.name, site.n_query_heads, {})
    for unit in scores.without_neurons().units():
        rows[unit.name].scores.update(dict.fromkeys(unit.heads, (unit.value, unit.standard_error)))
    return list(rows.values())


def _planned_rows(plan: PruningPlan) -> list[_ScoreRow]:
    """Rows of a plan without scores: NaN for every head."""
    unscored: _Score = (math.nan, None)
    rows = []
    for row in plan.mask.rows:
        if row.neurons:
            rows.append(_ScoreRow(row.site, 1, {}, row.n_heads))
        else:
            unscored_heads = dict.fromkeys(range(row.n_heads), unscored)
            rows.append(_ScoreRow(row.site, row.n_heads, unscored_heads))
    return rows


def _kept_heads(plan: PruningPlan, rows: Sequence[_ScoreRow]) -> dict[str, set[int]]:
    """Kept heads per site; refuse a plan that lacks a site of the scores."""
    kept = {row.site: set(row.kept) for row in plan.mask.rows}
    for row in rows:
        if row.site not in kept:
            raise InvalidValue(
                "head_map(plan=)", "a plan for the sites of the scores", f"none for {row.site}"
            )
    return kept


def _score_grid(rows: Sequence[_ScoreRow]) -> NDArray[np.float64]:
    """Lay out scores as [sites, heads], NaN where there is no score."""
    import numpy as np

    grid = np.full((len(rows), max(row.n_heads for row in rows)), np.nan)
    for y, row in enumerate(rows):
        for x, (value, _) in row.scores.items():
            grid[y, x] = value
    return grid


#: Parts of cells and bars that are removed.
_HATCHED: dict[str, Any] = {
    "facecolor": (1, 1, 1, 0.55),
    "edgecolor": "0.55",
    "hatch": "////",
    "linewidth": 0,
}


def _draw_bars(
    ax: Axes, rows: Sequence[_ScoreRow], kept: dict[str, set[int]] | None, n_columns: int
) -> None:
    """Draw a bar for every feed-forward, over the width of all columns."""
    from matplotlib.patches import Rectangle

    for y, row in enumerate(rows):
        if not row.neurons:
            continue
        n_kept = row.neurons if kept is None else len(kept[row.site])
        filled = n_columns * n_kept / row.neurons
        ax.add_patch(Rectangle((-0.5, y - 0.4), n_columns, 0.8, facecolor="white"))
        ax.add_patch(Rectangle((-0.5, y - 0.4), filled, 0.8, facecolor=_KEPT))
        rest = n_columns - filled
        ax.add_patch(Rectangle((filled - 0.5, y - 0.4), rest, 0.8, **_HATCHED))
        words = f"{row.neurons:,} neurons"
        if kept is not None:
            words = f"{n_kept:,} of {words}"
        ax.text(-0.3, y, words, va="center", fontsize=7, color="black")


def _mark_heads(
    ax: Axes, rows: Sequence[_ScoreRow], kept: dict[str, set[int]], colour_kept: bool
) -> None:
    """Hatch the removed heads; colour the others where no score does."""
    from matplotlib.patches import Rectangle

    for y, row in enumerate(rows):
        for x in row.scores:
            corner = (x - 0.5, y - 0.5)
            if x not in kept[row.site]:
                ax.add_patch(Rectangle(corner, 1, 1, **_HATCHED))
            elif colour_kept:
                ax.add_patch(Rectangle(corner, 1, 1, facecolor=_KEPT, edgecolor="white"))


def _write_scores(ax: Axes, rows: Sequence[_ScoreRow], dark_above: float) -> None:
    """Write score and standard error into every cell that has them."""
    for y, row in enumerate(rows):
        for x, (value, error) in row.scores.items():
            if math.isnan(value):
                continue
            text = significant(value, 2)
            if error is not None:
                text += f"\n±{significant(error, 1)}"
            colour = "white" if value > dark_above else "black"
            ax.text(x, y, text, ha="center", va="center", fontsize=6, color=colour)


def _threshold(grid: NDArray[np.float64]) -> float:
    """Score above which a cell is dark, so that the text on it must be white."""
    import numpy as np

    if np.isnan(grid).all():
        return math.inf
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    return low + 0.6 * (high - low)


# ----------------------------------------------------------------------------------------------
# attention


def _draw_head(
    maps: AttentionMaps, head: HeadId, example: int, query: int | None, ax: Axes | None
) -> Axes:
    """Draw one head, large; maps of text get their tokens."""
    grid = _grid(maps, head, example, query)
    if ax is None:
        # Images are square; maps of text grow with their tokens.
        size = (4.2, 4.2)
        if maps.image is None:
            size = _text_size(grid.shape)
        ax = _axes(*size)
    _draw_weights(ax, grid)
    if maps.image is None:
        queries, keys = maps.labels(head.site, example)
        _write_tokens(ax, queries, keys)
        ax.set_xlabel("key")
        ax.set_ylabel("query")
    _no_tex(ax)
    return ax


def _grid(
    maps: AttentionMaps, head: HeadId, example: int, query: int | None
) -> NDArray[np.float32]:
    """The weights to draw: [queries, keys], or of an image one query's over [rows, columns]."""
    shown = maps.shown(head, example)
    if maps.image is None:
        return shown
    rows, columns = maps.image
    # Tokens before the patches, such as a class token, have no place in the image.
    n_before = shown.shape[1] - rows * columns
    if n_before < 0:
        must = f"at most {shown.shape[1]} patches, as many as there are keys at {head.site}"
        raise InvalidValue("AttentionMaps.image", must, f"{rows} x {columns}")
    return shown[query or 0, n_before:].reshape(rows, columns)


def _draw_weights(ax: Axes, grid: NDArray[np.float32]) -> None:
    # An empty range of colours would draw a map of zeros in the middle colour.
    highest = max(float(grid.max()), 1e-12)
    ax.imshow(grid, cmap=_COLOURS, vmin=0.0, vmax=highest, interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])


def _title_panel(panel: Axes, head: int, removed: bool) -> None:
    title = str(head)
    if removed:
        title += " ×"
        panel.spines[:].set(color=_REMOVED, linewidth=1.5, linestyle="--")
    panel.set_title(title, fontsize=7, pad=2)


def _write_tokens(ax: Axes, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Write tokens along the axes, where they are few enough to read."""
    if len(keys) <= _MAX_TOKENS:
        ax.set_xticks(range(len(keys)), list(map(plain, keys)), fontsize=7, rotation=90)
    if len(queries) <= _MAX_TOKENS:
        ax.set_yticks(range(len(queries)), list(map(plain, queries)), fontsize=7, rotation=0)
    ax.tick_params(length=0)


def _text_size(shape: Sequence[int]) -> tuple[float, float]:
    """Width and height in inches for a map of text, [queries, keys]."""
    n_queries, n_keys = shape
    return min(max(0.2 * n_keys, 2.5), 8) + 1, min(max(0.2 * n_queries, 2.5), 8) + 1


# ----------------------------------------------------------------------------------------------
# trade-off and agreement


def _one_group(
    records: RunRecord | Iterable[RunRecord] | SweepTable, split: str
) -> tuple[list[TradeoffPoint], str]:
    """Collect the points to draw and their metric; refuse what cannot share one picture."""
    if isinstance(records, SweepTable):
        groups = [Comparable((records.name,), tuple(points_of_sweep(records, split)))]
    else:
        if isinstance(records, RunRecord):
            records = [records]
        groups = comparable(((record.name, record) for record in records), split)
    points: list[TradeoffPoint] = []
    for group in groups:
        points += group.points
    metrics = {point.metric for point in points}
    if len(metrics) != 1:
        got = ", ".join(sorted(metrics)) or "nothing"
        raise InvalidValue("plot.tradeoff(records)", f"one metric, measured on {split} rows", got)
    if len(groups) > 1:
        names = "; ".join(", ".join(group.names) for group in groups)
        raise InvalidValue(
            "plot.tradeoff(records)",
            "of one task, model and data",
            f"several: {names}",
            "Draw them one by one, each with its axes: ax=.",
        )
    if not differ_in_heads_alone(points):
        must = "of models that keep as many neurons, because the axis is heads"
        hint = "Compare runs by `headprune report RUN RUN`, settings by the sweep's tradeoff.png."
        raise InvalidValue("plot.tradeoff(records)", must, "other numbers of neurons", hint)
    return points, metrics.pop()


def _draw_series(ax: Axes, series: Series, number: int) -> None:
    """Draw one method: a dashed line without a cut, a band for random heads, else error bars.

    Of 56 methods each has its own colour and mark, by its number among the series of its role; of
    28 kinds of random heads each has its own mark and dash.
    """
    kept, means, spreads = zip(*series.points, strict=True)
    name = plain(series.method)
    if series.role == "base":
        ax.axhline(means[-1], color="0.4", linestyle="--", linewidth=1, label="all heads")
    elif series.role == "random":
        low, high = band(means, spreads)
        ax.fill_between(kept, low, high, color="0.85", linewidth=0)
        ax.plot(kept, means, label=name, **style_of_random(number))
    else:
        ax.errorbar(kept, means, spreads, label=name, **style(number))


def style(number: int) -> dict[str, Any]:
    """Return matplotlib's arguments for the line of a method, by its number."""
    return {
        "color": COLOURS[number % len(COLOURS)][0],
        "marker": list(MARKS.values())[number % len(MARKS)],
        "markersize": 5,
        "capsize": 2,
        "linewidth": 1.2,
    }


def style_of_random(number: int) -> dict[str, Any]:
    """Return matplotlib's arguments for a grey line of random heads, by its number."""
    dash = DASHES[number % len(DASHES)]
    return {
        "color": "0.6",
        "linestyle": (0, tuple(map(float, dash.split()))) if dash else ":",
        "marker": list(MARKS.values())[number % len(MARKS)],
        "markersize": 4,
        "linewidth": 1.2,
    }


def band(means: Sequence[float], spreads: Sequence[float]) -> tuple[list[float], list[float]]:
    """Compute the lower and the upper edge of a band of one spread around the means."""
    low, high = [], []
    for mean, spread in zip(means, spreads, strict=True):
        low.append(mean - spread)
        high.append(mean + spread)
    return low, high


def _draw_measures(panel: Any, measures: Sequence[Measure]) -> None:
    """Draw one measure of every pair: a dot, with a line for its interval."""
    lowest = 0.0
    for y, measure in enumerate(measures):
        if measure.low is not None and measure.high is not None:
            panel.plot([measure.low, measure.high], [y, y], color=_LIGHT, linewidth=2)
        if not math.isnan(measure.value):
            panel.plot(measure.value, y, "o", color=_DARK)
        # An agreement below chance is negative and widens the axis; NaN is never lower.
        for end in (measure.value, measure.low):
            if end is not None and end < lowest:
                lowest = end
    panel.set_xlim(lowest - 0.05, 1.05)


# ----------------------------------------------------------------------------------------------
# axes and text


def _axes(width: float, height: float) -> Axes:
    axes: Axes = _panels(1, 1, (width, height))[0][0]
    return axes


def _panels(
    rows: int, columns: int, size: tuple[float, float] | None = None, sharey: bool = False
) -> Any:
    """Open a figure of axes [rows, columns]; ``size`` is that of one panel, in inches."""
    import matplotlib.pyplot as plt

    if size is None:
        # Small panels, with room for the names of sites.
        figsize = (0.8 * columns + 1.5, 0.85 * rows)
    else:
        figsize = (size[0] * columns, size[1] * rows)
    _, axes = plt.subplots(
        rows, columns, figsize=figsize, squeeze=False, layout="constrained", sharey=sharey
    )
    return axes


def plain(text: str) -> str:
    """Escape text so that matplotlib draws it letter by letter.

    ``$`` would begin a formula; control characters have no glyph.
    """
    return "".join(filter(str.isprintable, text)).replace("$", r"\$")


def _no_tex(ax: Axes) -> None:
    """Draw labels without LaTeX even under ``text.usetex``: names in files would be commands."""
    from matplotlib.text import Text

    for part in (ax.xaxis, ax.yaxis, ax.get_legend()):
        # Axes without a legend return None.
        if part is not None:
            for text in part.findobj(Text):
                text.set_usetex(False)
