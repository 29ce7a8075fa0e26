"""Pictures for notebooks and papers: matplotlib axes in and out, without titles of our own.

    hp.plot.head_map(scores, plan)              # heads of every layer, by importance; cut heads are
    hatched hp.plot.attention(maps, example=2)          # what every head attends to in one example
    hp.plot.attention(maps, hp.HeadId(site, 3)) # one head, with the tokens beside it
    hp.plot.tradeoff(records)                   # quality against heads kept, of runs or of a sweep
    hp.plot.agreement(hp.agreement(a, b))       # how alike scores order the heads

Every function draws on the axes that it is given; without any it opens a figure with pyplot, as
matplotlib's own calls do. ``picture.figure.savefig("heads.pdf")`` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from headprune.core.agreement import MEASURES, Agreement
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId
from headprune.core.metrics import LOWER, RATIO, is_one_of
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.core.sweeps import SweepTable
from headprune.maps.attention_maps import AttentionMaps
from headprune.report.formats import significant
from headprune.report.series import Comparable, comparable, points_of_sweep, series_of

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["agreement", "attention", "head_map", "tradeoff"]

#: From light to dark, in black and white too.
_COLOURS = "Blues"
_MISSING = "0.93"
#: Tokens beside a map at most; with more, positions alone.
_WORDS = 40
_DARK, _LIGHT = "#08306b", "#2171b5"


def head_map(
    scores: HeadScores | None = None,
    plan: PruningPlan | None = None,
    *,
    ax: Axes | None = None,
    values: bool = False,
) -> Axes:
    """Layers by heads: colour is importance, hatching what the plan takes out, empty what was gone
    before.

    Args:
        scores: Importance; None shows the plan alone.
        plan: Which heads stay; None hatches nothing.
        ax: Where to draw.
        values: Write every score, with its standard error where it has one, into its cell.

    Raises:
        InvalidValue: neither scores nor a plan, or a plan for other sites.
    """
    import numpy as np
    from matplotlib.patches import Rectangle

    if scores is None and plan is None:
        raise InvalidValue("head_map", "given scores, a plan or both", "neither")
    kept = None if plan is None else {row.site: set(row.kept) for row in plan.mask.rows}
    if scores is not None:
        by_site = _by_head(scores)
        rows = [(site.name, site.n_query_heads, by_site[site.name]) for site in scores.sites]
        if kept is not None and (strange := [name for name, _, _ in rows if name not in kept]):
            raise InvalidValue(
                "head_map(plan=)", "a plan for the sites of the scores", f"none for {strange[0]}"
            )
    else:
        assert plan is not None
        rows = [
            (row.site, row.n_heads, dict.fromkeys(range(row.n_heads), (math.nan, None)))
            for row in plan.mask.rows
        ]
    grid = np.full((len(rows), max(n for _, n, _ in rows)), np.nan)
    for y, (_, _, found) in enumerate(rows):
        for x, (value, _) in found.items():
            grid[y, x] = value
    ax = ax or _axes(0.42 * grid.shape[1] + 2.6, 0.36 * grid.shape[0] + 0.9)
    ax.set_facecolor(_MISSING if scores is not None else "white")
    picture = ax.imshow(np.ma.masked_invalid(grid), cmap=_COLOURS, aspect="auto")
    dark = _threshold(grid)
    for y, (name, _, found) in enumerate(rows):
        for x, (value, error) in found.items():
            if kept is not None and x not in kept[name]:
                ax.add_patch(_hatched(Rectangle, x, y))
            elif scores is None:
                ax.add_patch(
                    Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="#9ecae1", edgecolor="white")
                )
            if values and not math.isnan(value):
                text = significant(value, 2) + (
                    "" if error is None else f"\n±{significant(error, 1)}"
                )
                ax.text(
                    x,
                    y,
                    text,
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white" if value > dark else "black",
                )
    ax.set_xticks(range(grid.shape[1]))
    ax.set_yticks(range(grid.shape[0]), [plain(name) for name, _, _ in rows])
    ax.tick_params(length=0, labelsize=8)
    ax.set_xlabel("head")
    if scores is not None:
        bar = ax.figure.colorbar(
            picture, ax=ax, label=plain(scores.scorer), fraction=0.046, pad=0.02
        )
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
    """What heads attend to in one example: rows are queries, columns are keys, darker is more
    weight.

    Args:
        maps: What ``hp.attention_maps`` returned.
        head: One head, large, with tokens beside it; a site's name, all of its heads; None, every
            head, small.
        plan: Of several heads, those that it removes get a dashed frame and a cross.
        example: Its number in the batch.
        query: Of maps that know the image's patches, the query whose weights are laid out as the
            image; None takes the first. Text ignores it.
        ax: Where to draw one head.
        axes: An array of axes for several, one row a site.

    Returns:
        The axes of one head, or an array of them, ``[sites, heads]``.

    Raises:
        InvalidValue: no such example.
        UnknownName: no such site.
    """
    if not 0 <= example < maps.n_examples:
        raise InvalidValue("plot.attention(example=)", f"0 to {maps.n_examples - 1}", example)
    if isinstance(head, HeadId):
        grid = _grid(maps, head, example, query)
        ax = ax or _axes(*([4.2, 4.2] if maps.image else _size(grid.shape)))
        _map(ax, grid)
        if maps.image is None:
            _words(ax, *maps.labels(head.site, example))
            ax.set_xlabel("key")
            ax.set_ylabel("query")
        _no_tex(ax)
        return ax
    sites = [maps.of(head)] if head is not None else list(maps.sites)
    widest = max(len(site.heads) for site in sites)
    if axes is None:
        axes = _panels(len(sites), widest)
    for site, row in zip(sites, axes, strict=True):
        for place, panel in enumerate(row):
            if place >= len(site.heads):
                panel.set_visible(False)
                continue
            _map(panel, _grid(maps, HeadId(site.site, site.heads[place]), example, query))
            one = HeadId(site.site, site.heads[place])
            gone = plan is not None and one not in plan.mask
            panel.set_title(f"{one.head}{' ×' if gone else ''}", fontsize=7, pad=2)
            if gone:
                panel.spines[:].set(color="#b2182b", linewidth=1.5, linestyle="--")
        row[0].set_ylabel(plain(site.site), fontsize=7, rotation=0, ha="right", va="center")
        _no_tex(row[0])
    return axes


def tradeoff(
    records: RunRecord | Iterable[RunRecord] | SweepTable,
    *,
    split: str = "test",
    ax: Axes | None = None,
) -> Axes:
    """Quality against heads kept, of several runs or of a sweep: a line a method, a grey band for
    chance.

    Args:
        records: Runs of one model and metric, each with its budget; or the table of a sweep.
        split: ``test`` or ``validation`` rows.
        ax: Where to draw.

    Raises:
        InvalidValue: nothing measured on those rows, several metrics, or runs of several tasks,
            models or data.
    """
    from matplotlib.ticker import MaxNLocator

    if isinstance(records, SweepTable):
        groups = [Comparable((records.name,), tuple(points_of_sweep(records, split)))]
    else:
        records = [records] if isinstance(records, RunRecord) else records
        groups = comparable(((record.name, record) for record in records), split)
    points = [point for group in groups for point in group.points]
    metrics = {point.metric for point in points}
    if len(metrics) != 1:
        got = ", ".join(sorted(metrics)) if metrics else "nothing"
        raise InvalidValue("plot.tradeoff(records)", f"one metric, measured on {split} rows", got)
    if len(groups) > 1:
        got = "; ".join(", ".join(group.names) for group in groups)
        hint = "Draw them one by one, on axes of their own: ax=."
        raise InvalidValue(
            "plot.tradeoff(records)", "of one task, model and data", f"several: {got}", hint
        )
    ax = ax or _axes(5.2, 3.6)
    for series in series_of(points):
        kept, means, spreads = zip(*series.points, strict=True)
        if series.role == "base":
            ax.axhline(means[-1], color="0.4", linestyle="--", linewidth=1, label="all heads")
        elif series.role == "random":
            low, high = (
                [m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1)
            )
            ax.fill_between(kept, low, high, color="0.85", linewidth=0)
            ax.plot(kept, means, color="0.6", linestyle=":", marker=".", label=plain(series.method))
        else:
            name = plain(series.method)
            ax.errorbar(
                kept, means, spreads, marker="o", markersize=4, capsize=2, linewidth=1.2, label=name
            )
    metric = metrics.pop()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("heads kept")
    lower = is_one_of(metric, (*RATIO, *LOWER))
    ax.set_ylabel(f"{plain(metric)} on {split} rows" + (", lower is better" if lower else ""))
    ax.grid(alpha=0.3)
    ax.legend(
        fontsize=8, loc="upper right" if lower else "lower right"
    )  # where many heads seldom end; no search
    _no_tex(ax)
    return ax


def agreement(found: Agreement, *, axes: Any = None) -> Any:
    """How alike scores order the heads: a panel a measure, a row a pair, intervals as lines.

    Args:
        found: What ``hp.agreement`` returned.
        axes: Three axes, one a measure.

    Returns:
        The axes.
    """
    n = len(found.pairs)
    if axes is None:
        axes = _panels(1, len(MEASURES), (3.3, 0.9 + 0.35 * n), sharey=True)[0]
    for panel, name, label in zip(axes, MEASURES, found.header[1:], strict=True):
        left = 0.0  # agreement worse than chance widens the axis
        for y, pair in enumerate(found.pairs):
            measure = getattr(pair, name)
            left = min(
                left,
                *(v for v in (measure.value, measure.low) if v is not None and not math.isnan(v)),
                0.0,
            )
            if measure.low is not None and measure.high is not None:
                panel.plot([measure.low, measure.high], [y, y], color=_LIGHT, linewidth=2)
            if not math.isnan(measure.value):
                panel.plot(measure.value, y, "o", color=_DARK)
        panel.set_xlabel(label, fontsize=9)
        panel.set_xlim(left - 0.05, 1.05)
        panel.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(n), [plain(found.label(p)) for p in found.pairs])
    axes[0].set_ylim(n - 0.5, -0.5)
    _no_tex(axes[0])
    return axes


# ----------------------------------------------------------------------------------------------
# parts


def _axes(width: float, height: float) -> Axes:
    axes: Axes = _panels(1, 1, (width, height))[0][0]
    return axes


def _panels(
    rows: int, columns: int, size: tuple[float, float] | None = None, sharey: bool = False
) -> Any:
    """Fresh axes ``[rows, columns]``; ``size`` is that of one panel, in inches."""
    import matplotlib.pyplot as plt

    width, height = size or (0.8, 0.85)
    asked = {"squeeze": False, "layout": "constrained", "sharey": sharey}
    return plt.subplots(
        rows, columns, figsize=(width * columns + (0 if size else 1.5), height * rows), **asked
    )[1]


def _by_head(scores: HeadScores) -> dict[str, dict[int, tuple[float, float | None]]]:
    """Score and standard error of every head of every site."""
    found: dict[str, dict[int, tuple[float, float | None]]] = {
        site.name: {} for site in scores.sites
    }
    for unit in scores.units():
        found[unit.name].update(dict.fromkeys(unit.heads, (unit.value, unit.standard_error)))
    return found


def _threshold(grid: NDArray[np.float64]) -> float:
    """Above it a cell is dark, and what is written on it is white."""
    import numpy as np

    if np.isnan(grid).all():
        return math.inf
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    return low + 0.6 * (high - low)


def _hatched(rectangle: Any, x: int, y: int) -> Any:
    return rectangle(
        (x - 0.5, y - 0.5),
        1,
        1,
        facecolor=(1, 1, 1, 0.55),
        edgecolor="0.55",
        hatch="////",
        linewidth=0,
    )


def _grid(
    maps: AttentionMaps, head: HeadId, example: int, query: int | None
) -> NDArray[np.float32]:
    """What is drawn of a head: its map; of an image, one query's weights over the patches."""
    shown = maps.shown(head, example)
    if maps.image is None:
        return shown
    rows, columns = maps.image
    if shown.shape[1] < rows * columns:
        must = f"at most {shown.shape[1]} patches, as many as there are keys at {head.site}"
        raise InvalidValue("AttentionMaps.image", must, f"{rows} x {columns}")
    return shown[query or 0, shown.shape[1] - rows * columns :].reshape(rows, columns)


def _map(ax: Axes, grid: NDArray[np.float32]) -> None:
    ax.imshow(
        grid, cmap=_COLOURS, vmin=0.0, vmax=max(float(grid.max()), 1e-12), interpolation="nearest"
    )
    ax.set_xticks([])
    ax.set_yticks([])


def plain(text: str) -> str:
    """Text that matplotlib draws letter by letter: ``$`` begins a formula, control characters have
    no picture."""
    return "".join(c for c in text if c.isprintable()).replace("$", r"\$")


def _no_tex(ax: Axes) -> None:
    """Labels without LaTeX, whatever ``text.usetex`` says: names out of files would be commands to
    it."""
    from matplotlib.text import Text

    for part in filter(None, (ax.xaxis, ax.yaxis, ax.get_legend())):
        for text in part.findobj(Text):
            text.set_usetex(False)


def _words(ax: Axes, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Tokens along the axes."""
    for words, ticks, turn in ((keys, ax.set_xticks, 90), (queries, ax.set_yticks, 0)):
        if len(words) <= _WORDS:
            ticks(range(len(words)), list(map(plain, words)), fontsize=7, rotation=turn)
    ax.tick_params(length=0)


def _size(shape: Sequence[int]) -> tuple[float, float]:
    height, width = (min(max(0.2 * n, 2.5), 8) + 1 for n in shape)
    return width, height
