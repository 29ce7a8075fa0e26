"""docs/one-budget.svg: a panel for each task, quality on test rows against measured speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import studies

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Timed rows of a way, by the speed that was asked for.
BySpeed = Callable[[dict[str, Any], str], dict[float, list[dict[str, Any]]]]
#: Above this, a rise of a perplexity is drawn no more: it would flatten all others.
HIGHEST = 8


def picture(
    of_task: Mapping[str, Sequence[dict[str, Any]]],
    ways: Sequence[str],
    by_speed: BySpeed,
    path: Path,
) -> Path:
    """Draw the curves of every task.

    Args:
        of_task: By the title of a panel, the records of a task, the one to prefer first.
        ways: What is drawn, a curve for each.
        by_speed: Finds the rows of a way.
        path: Where the picture goes.
    """
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    columns = 3
    n_lines = -(-len(of_task) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.1 * n_lines + 0.5), layout="constrained")
    panels = figure.subplots(n_lines, columns, squeeze=False).ravel()
    for panel, (title, records) in zip(panels, of_task.items(), strict=False):
        _curves(panel, records, ways, by_speed)
        panel.set_title(title, fontsize=10)
    for panel in panels[len(of_task) :]:
        panel.set_visible(False)
    # A task may lack a way; one entry for each of those drawn anywhere.
    entries: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    shown = [way for way in (*ways, "whole model") if way in entries]
    figure.legend(
        [entries[way] for way in shown], shown, loc="outside lower center", ncols=3, fontsize=9
    )
    studies.save_figure(figure, path)
    return path


def _curves(
    panel: Axes, records: Sequence[dict[str, Any]], ways: Sequence[str], by_speed: BySpeed
) -> None:
    """One task: each way from the first record that has it."""
    whole = next(iter(records[0]["whole"].values()))
    panel.axhline(
        whole["test"], color="0.5", linestyle="--", linewidth=1, label="whole model", zorder=0
    )
    for number, way in enumerate(ways):
        found = next((rows for record in records if (rows := by_speed(record, way))), {})
        if found:
            look = {"color": f"C{number}", "marker": "osd^"[number % 4]}
            curve(panel, found.values(), label=way, markersize=4, linewidth=1.2, capsize=2, **look)
    if whole["metric"] == "perplexity":
        panel.set_ylim(top=HIGHEST)
    panel.set_xlabel("times as fast", fontsize=9)
    panel.set_ylabel(whole["metric"], fontsize=9)
    panel.grid(alpha=0.3)


def curve(panel: Axes, cuts: Iterable[Sequence[dict[str, Any]]], **look: Any) -> None:
    """Draw mean quality against mean speed, a point for the draws of each cut."""
    points = sorted(
        (statistics.fmean(row["ratio"] for row in rows), [row["test"] for row in rows])
        for rows in cuts
    )
    panel.errorbar(
        [speed for speed, _ in points],
        [statistics.fmean(tests) for _, tests in points],
        [studies.deviation(tests) for _, tests in points],
        **look,
    )
