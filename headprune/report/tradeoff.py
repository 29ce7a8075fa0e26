"""The trade-off of a sweep: its picture with the Pareto curve, its tables and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.core.display import escape
from headprune.core.files import atomic_path
from headprune.core.metrics import POINTS, RATIO, is_one_of
from headprune.core.sweeps import SIZES, Setting, SweepTable, words
from headprune.report.formats import count
from headprune.report.plot import band, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPLITS = ("validation", "test")
_LABELS = {
    "heads": "heads",
    "params": "parameters",
    "macs": "multiply-adds",
    "kv": "KV-cache bytes per token",
}


def draw_tradeoff(table: SweepTable, path: str | Path, by: str = "heads") -> Path:
    """Draw the drop against size, for validation and for test rows.

    One line per method: its mean over calibration draws, with bars of one standard deviation;
    ``random`` is a band. Rings mark the Pareto curve of the validation rows, in both panels. The
    ending of ``path`` gives the format.
    """
    import matplotlib
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    path = Path(path)
    front = table.front(by)
    kind = path.suffix.removeprefix(".")
    # The salt makes identifiers in an SVG, and so the file, depend on the table alone. Names in the
    # table are not to become LaTeX commands.
    with matplotlib.rc_context({"svg.hashsalt": "headprune", "text.usetex": False}):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for panel, split in zip(panels, _SPLITS, strict=True):
            _panel(panel, table, front, split, by)
        panels[0].set_ylabel(plain(_drop_label(table.metric)))
        panels[0].legend(fontsize=8)
        figure.suptitle(f"{plain(table.name)}: {len(table.rows)} runs", fontsize=11)
        # Without a date the same table gives the same file.
        metadata = {"Date": None} if kind == "svg" else None
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata=metadata)
    return path


def _panel(panel: Axes, table: SweepTable, front: Sequence[Setting], split: str, by: str) -> None:
    """Draw one split: every method, and rings around the Pareto curve."""
    from matplotlib.ticker import MaxNLocator

    methods: dict[str, list[Setting]] = {}
    for setting in table.settings():
        methods.setdefault(setting.method, []).append(setting)
    scale = _scale(table.metric)
    for method, settings in methods.items():
        settings.sort(key=lambda setting: setting.size(by))
        _method(panel, plain(method), settings, split, by, scale)
    rings: dict[str, Any] = {"s": 90, "facecolors": "none", "edgecolors": "black", "zorder": 3}
    sizes, drops = [], []
    for setting in front:
        sizes.append(setting.size(by))
        drops.append(scale * getattr(setting, split).mean)
    panel.scatter(sizes, drops, label="Pareto curve (validation)", linewidths=1.2, **rings)
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set_title(f"{split} rows", fontsize=10)
    panel.set_xlabel(f"{_LABELS[by]} (of {count(table.base[by])})")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)


def _method(
    panel: Axes, name: str, settings: Sequence[Setting], split: str, by: str, scale: float
) -> None:
    """Draw one method's settings, in order of size: a line with error bars, or a band."""
    sizes, means, deviations = [], [], []
    for setting in settings:
        spread = getattr(setting, split)
        sizes.append(setting.size(by))
        means.append(scale * spread.mean)
        # One draw has no standard deviation.
        deviations.append(scale * (spread.sd or 0.0))
    if _is_random(settings[0]):
        low, high = band(means, deviations)
        panel.fill_between(sizes, low, high, color="0.85", linewidth=0)
        panel.plot(sizes, means, color="0.6", linestyle="--", label=name)
    else:
        bars: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1.2}
        panel.errorbar(sizes, means, yerr=deviations, label=name, **bars)


def _is_random(setting: Setting) -> bool:
    return "random" in (setting.values.get("scorer"), setting.values.get("score.scorer"))


def _scale(metric: str) -> float:
    """Drops of shares and ratios are shown in points and percent."""
    return 100.0 if is_one_of(metric, (*POINTS, *RATIO)) else 1.0


def _drop_label(metric: str) -> str:
    if is_one_of(metric, POINTS):
        return f"points of {metric} lost"
    if is_one_of(metric, RATIO):
        return f"{metric}, increase in %"
    return f"{metric}, increase"


@dataclass(frozen=True)
class SweepRow:
    """A setting: its cells, by ``SweepView.header``, and the file of its best plan."""

    cells: tuple[str, ...]
    plan: str  # path in the sweep's folder


@dataclass(frozen=True)
class SweepView:
    """The tables of a sweep, formatted.

    Args:
        title: The sweep and how many runs it has.
        notes: The uncut model, and how to read the tables.
        header: Columns of both tables; a column for the plan follows.
        best: The best setting of every budget.
        front: The Pareto curve.
        failed: Runs that ended in an error.
    """

    title: str
    notes: tuple[str, ...]
    header: tuple[str, ...]
    best: tuple[SweepRow, ...]
    front: tuple[SweepRow, ...]
    failed: tuple[str, ...]


def sweep_view(table: SweepTable) -> SweepView:
    """Format a sweep for its page and its summary."""
    base = table.base
    # Only decoders have a cache.
    sizes, labels, counts = [], [], []
    for size in SIZES:
        if base[size] is not None:
            sizes.append(size)
            labels.append(_LABELS[size])
            counts.append(f"{count(base[size])} {_LABELS[size]}")
    values = [f"{base[split]:.4f} on {base[f'{split}_rows']:,} {split} rows" for split in _SPLITS]
    best: Sequence[Setting] = ()
    front: Sequence[Setting] = ()
    # Without a finished run there is nothing to rank.
    if table.rows:
        best, front = table.best(), table.front()
    return SweepView(
        title=f"{table.name}: {len(table.rows)} runs of {len(table.settings())} settings",
        notes=(
            f"The uncut model: {table.metric} {', '.join(values)}; {', '.join(counts)}.",
            (
                "Drops are means over calibration draws, ± one standard deviation; below zero is"
                " better than the uncut model."
            ),
            "Settings are ranked by validation rows; test rows are only reported.",
        ),
        header=("budget", "setting", *labels, "validation drop", "test drop"),
        best=_sweep_rows(table, best, sizes),
        front=_sweep_rows(table, front, sizes),
        failed=tuple(map(_failure, table.failed)),
    )


def _failure(run: Mapping[str, Any]) -> str:
    settings = {key: value for key, value in run.items() if key != "error"}
    return f"{words(settings)}: {run['error']}"


def _sweep_rows(
    table: SweepTable, settings: Sequence[Setting], sizes: Sequence[str]
) -> tuple[SweepRow, ...]:
    rows = []
    for setting in settings:
        counts = [count(round(setting.size(size), 1)) for size in sizes]
        drops = (table.spread(setting.validation), table.spread(setting.test))
        cells = (setting.budget, setting.method, *counts, *drops)
        rows.append(SweepRow(cells, setting.best["plan"]))
    return tuple(rows)


def render_tradeoff(table: SweepTable) -> str:
    """Write the summary as Markdown: the best settings, the Pareto curve and failed runs."""
    view = sweep_view(table)
    lines = [f"# {escape(view.title)}", "", *map(escape, view.notes)]
    if table.rows:
        lines += ["", "## Best setting of every budget", "", *_markdown_table(view, view.best)]
        lines += ["", "## Pareto curve: heads against the validation drop", ""]
        lines += _markdown_table(view, view.front)
        lines += ["", "![Trade-off](tradeoff.svg)"]
    if view.failed:
        lines += ["", "## Failed", "", *(f"- {escape(failed)}" for failed in view.failed)]
    return "\n".join(lines) + "\n"


def _markdown_table(view: SweepView, rows: Sequence[SweepRow]) -> list[str]:
    # Budget and setting are text, the plan is a link; all other columns are numbers.
    numbers = " ---: |" * (len(view.header) - 2)
    lines = [_markdown_row([*view.header, "best plan"]), f"| --- | --- |{numbers} --- |"]
    for row in rows:
        # A plan's file is called plans/DIGEST.json.
        link = f"[{row.plan[6:14]}]({row.plan})"
        lines.append(_markdown_row([*map(escape, row.cells), link]))
    return lines


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
