"""The trade-off of a sweep: a SweepTable in; the Pareto curve as a picture, and what pages say of
it, out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.core.display import escape
from headprune.core.files import atomic_path
from headprune.core.metrics import POINTS, RATIO, is_one_of
from headprune.core.sweeps import SIZES, Setting, SweepTable, words
from headprune.report.formats import count
from headprune.report.plot import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPLITS = ("validation", "test")
_LABELS = {
    "heads": "heads",
    "params": "parameters",
    "macs": "multiply-adds",
    "kv": "KV-cache bytes a token",
}


def draw_tradeoff(table: SweepTable, path: str | Path, by: str = "heads") -> Path:
    """Draws the drop against size, validation and test rows side by side; the file's ending says
    the format.

    One line a method, its mean over calibration draws with bars of one standard deviation;
    ``random`` is a band. The ringed points are the Pareto curve of the validation rows, in both
    panels.
    """
    import matplotlib
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    path, front = Path(path), table.front(by)
    # the same table, the same file; and names out of it are no commands to LaTeX
    with matplotlib.rc_context({"svg.hashsalt": "headprune", "text.usetex": False}):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for panel, split in zip(panels, _SPLITS, strict=True):
            _panel(panel, table, front, split, by)
        panels[0].set_ylabel(plain(_drop_label(table.metric)))
        panels[0].legend(fontsize=8)
        figure.suptitle(f"{plain(table.name)}: {len(table.rows)} runs", fontsize=11)
        kind = path.suffix.removeprefix(".")
        with atomic_path(path) as temporary:
            figure.savefig(
                temporary, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None
            )
    return path


def _panel(panel: Axes, table: SweepTable, front: Sequence[Setting], split: str, by: str) -> None:
    from matplotlib.ticker import MaxNLocator

    methods: dict[str, list[Setting]] = {}
    for setting in table.settings():
        methods.setdefault(setting.method, []).append(setting)
    scale = _scale(table.metric)
    for method, settings in methods.items():
        settings = sorted(settings, key=lambda s: s.size(by))
        sizes = [s.size(by) for s in settings]
        spreads = [getattr(s, split) for s in settings]
        means, sds = [scale * s.mean for s in spreads], [scale * (s.sd or 0.0) for s in spreads]
        if _is_random(settings[0]):
            low, high = zip(*((m - s, m + s) for m, s in zip(means, sds, strict=True)), strict=True)
            panel.fill_between(sizes, low, high, color="0.85", linewidth=0)
            panel.plot(sizes, means, color="0.6", linestyle="--", label=plain(method))
        else:
            name = plain(method)
            panel.errorbar(
                sizes,
                means,
                yerr=sds,
                marker="o",
                markersize=4,
                capsize=2,
                linewidth=1.2,
                label=name,
            )
    places = [(s.size(by), scale * getattr(s, split).mean) for s in front]
    ring: dict[str, Any] = {
        "facecolors": "none",
        "edgecolors": "black",
        "s": 90,
        "linewidths": 1.2,
        "zorder": 3,
    }
    panel.scatter(*zip(*places, strict=True), label="Pareto curve (validation)", **ring)
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set_title(f"{split} rows", fontsize=10)
    panel.set_xlabel(f"{_LABELS[by]} (of {count(table.base[by])})")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)


def _is_random(setting: Setting) -> bool:
    return "random" in (setting.values.get("scorer"), setting.values.get("score.scorer"))


def _scale(metric: str) -> float:
    return 100.0 if is_one_of(metric, (*POINTS, *RATIO)) else 1.0


def _drop_label(metric: str) -> str:
    if is_one_of(metric, POINTS):
        return f"points of {metric} lost"
    return f"{metric}, increase" + (" in %" if is_one_of(metric, RATIO) else "")


@dataclass(frozen=True)
class SweepRow:
    """A setting: its cells, by ``SweepView.header``, and the file of its best plan."""

    cells: tuple[str, ...]
    plan: str


@dataclass(frozen=True)
class SweepView:
    """What a page says of a sweep, in words.

    Args:
        title: The sweep and how many runs it has.
        notes: The uncut model, and how to read the tables.
        header: Of both tables; a plan comes after it.
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
    """A sweep's tables in words."""
    base, sizes = table.base, [s for s in SIZES if table.base[s] is not None]
    counts = ", ".join(f"{count(base[s])} {_LABELS[s]}" for s in sizes)
    values = ", ".join(f"{base[s]:.4f} on {base[f'{s}_rows']:,} {s} rows" for s in _SPLITS)

    def rows(settings: Sequence[Setting]) -> tuple[SweepRow, ...]:
        return tuple(_row(table, setting, sizes) for setting in settings)

    return SweepView(
        title=f"{table.name}: {len(table.rows)} runs of {len(table.settings())} settings",
        notes=(
            f"The uncut model: {table.metric} {values}; {counts}.",
            (
                "Drops are means over calibration draws, ± one standard deviation; below zero is"
                " better than the uncut model."
            ),
            "Settings are ranked by validation rows; test rows are only reported.",
        ),
        header=("budget", "setting", *(_LABELS[s] for s in sizes), "validation drop", "test drop"),
        best=rows(table.best() if table.rows else ()),
        front=rows(table.front() if table.rows else ()),
        failed=tuple(
            f"{words({k: v for k, v in f.items() if k != 'error'})}: {f['error']}"
            for f in table.failed
        ),
    )


def _row(table: SweepTable, setting: Setting, sizes: Sequence[str]) -> SweepRow:
    counts = (count(round(setting.size(size), 1)) for size in sizes)
    drops = (table.spread(setting.validation), table.spread(setting.test))
    return SweepRow((setting.budget, setting.method, *counts, *drops), setting.best["plan"])


def render_tradeoff(table: SweepTable) -> str:
    """The summary as Markdown: the base, the best setting of every budget, the Pareto curve, what
    failed."""
    view = sweep_view(table)
    lines = [f"# {escape(view.title)}", "", *map(escape, view.notes)]
    if table.rows:
        lines += ["", "## Best setting of every budget", "", *_rows(view, view.best)]
        lines += [
            "",
            "## Pareto curve: heads against the validation drop",
            "",
            *_rows(view, view.front),
        ]
        lines += ["", "![Trade-off](tradeoff.svg)"]
    if view.failed:
        lines += ["", "## Failed", "", *(f"- {escape(failed)}" for failed in view.failed)]
    return "\n".join(lines) + "\n"


def _rows(view: SweepView, rows: Sequence[SweepRow]) -> list[str]:
    numbers = " ---: |" * (len(view.header) - 2)
    lines = ["| " + " | ".join([*view.header, "best plan"]) + " |", f"| --- | --- |{numbers} --- |"]
    lines += [
        "| " + " | ".join([*map(escape, row.cells), f"[{row.plan[6:14]}]({row.plan})"]) + " |"
        for row in rows
    ]
    return lines
