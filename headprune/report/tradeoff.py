"""The trade-off of a sweep: a SweepTable in; the Pareto curve as a picture and a Markdown summary out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.core.files import atomic_path, write_atomic
from headprune.core.metrics import POINTS, RATIO, is_one_of
from headprune.core.sweeps import SIZES, Setting, SweepTable
from headprune.report.formats import count
from headprune.report.markdown import escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPLITS = ("validation", "test")
_LABELS = {"heads": "heads", "params": "parameters", "macs": "multiply-adds", "kv": "KV-cache bytes a token"}


def write_tradeoff(table: SweepTable, folder: str | Path) -> list[Path]:
    """Writes ``tradeoff.svg``, ``tradeoff.png`` and ``summary.md`` into a folder; returns their paths.

    Without a finished run there is nothing to draw, and only the summary is written.
    """
    folder = Path(folder)
    drawn = [draw_tradeoff(table, folder / f"tradeoff.{kind}") for kind in ("svg", "png")] if table.rows else []
    return [*drawn, write_atomic(folder / "summary.md", render_tradeoff(table).encode())]


def draw_tradeoff(table: SweepTable, path: str | Path, by: str = "heads") -> Path:
    """Draws the drop against size, validation and test rows side by side; the file's ending says the format.

    One line a method, its mean over calibration draws with bars of one standard deviation; ``random`` is a band. The
    ringed points are the Pareto curve of the validation rows, in both panels.
    """
    import matplotlib
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    path, front = Path(path), table.front(by)
    with matplotlib.rc_context({"svg.hashsalt": "headprune"}):  # the same table, the same file
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for panel, split in zip(panels, _SPLITS, strict=True):
            _panel(panel, table, front, split, by)
        panels[0].set_ylabel(_drop_label(table.metric))
        panels[0].legend(fontsize=8)
        figure.suptitle(f"{table.name}: {len(table.rows)} runs", fontsize=11)
        kind = path.suffix.removeprefix(".")
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
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
            panel.plot(sizes, means, color="0.6", linestyle="--", label=method)
        else:
            panel.errorbar(sizes, means, yerr=sds, marker="o", markersize=4, capsize=2, linewidth=1.2, label=method)
    places = [(s.size(by), scale * getattr(s, split).mean) for s in front]
    ring: dict[str, Any] = {"facecolors": "none", "edgecolors": "black", "s": 90, "linewidths": 1.2, "zorder": 3}
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


def render_tradeoff(table: SweepTable) -> str:
    """The summary as Markdown: the base, the best setting of every budget, the Pareto curve, what failed."""
    base, sizes = table.base, [s for s in SIZES if table.base[s] is not None]
    counts = ", ".join(f"{count(base[s])} {_LABELS[s]}" for s in sizes)
    values = ", ".join(f"{base[s]:.4f} on {base[f'{s}_rows']:,} {s} rows" for s in _SPLITS)
    n_settings = len(table.settings())
    lines = [
        f"# {escape(table.name)}: {len(table.rows)} runs of {n_settings} settings",
        "",
        f"The uncut model: {escape(table.metric)} {values}; {counts}.",
        "Drops are means over calibration draws, ± one standard deviation; below zero is better than the uncut model.",
        "Settings are ranked by validation rows; test rows are only reported.",
    ]
    if table.rows:
        lines += ["", "## Best setting of every budget", "", *_rows(table, table.best(), sizes)]
        lines += ["", "## Pareto curve: heads against the validation drop", "", *_rows(table, table.front(), sizes)]
        lines += ["", "![Trade-off](tradeoff.svg)"]
    if table.failed:
        lines += ["", "## Failed", ""]
        for failed in table.failed:
            keys = ", ".join(f"{k} {v}" for k, v in failed.items() if k != "error")
            lines.append(f"- {escape(keys)}: {escape(failed['error'])}")
    return "\n".join(lines) + "\n"


def _rows(table: SweepTable, settings: Sequence[Setting], sizes: Sequence[str]) -> list[str]:
    header = ["budget", "setting", *(_LABELS[s] for s in sizes), "validation drop", "test drop", "best plan"]
    lines = ["| " + " | ".join(header) + " |", "| --- | --- |" + " ---: |" * (len(sizes) + 2) + " --- |"]
    for s in settings:
        plan = s.best["plan"]
        cells = [escape(s.budget), escape(s.method), *(count(round(s.size(size), 1)) for size in sizes)]
        cells += [escape(table.spread(s.validation)), escape(table.spread(s.test)), f"[{plan[6:14]}]({plan})"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
