"""The one result of the README: docs/headline.svg and the block beside it, from the records alone.

Quality is of ``pipelines-sst2.json``, speed of ``tradeoff-sst2-cpu.json``: the same weights and the
same test rows.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pipelines
import studies
import tradeoff_page
from pages import interval, table, threads

PICTURE = "headline.svg"
#: What is shown, and in which words.
WAYS = {
    "surgeon/lstsq+ff": "chosen by headprune",
    "random-min0/lstsq+ff": "random, refitted alike",
}
SPLIT = "test"


def read(records: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The record of quality, and the speed by number of kept heads, most heads first."""
    quality = json.loads((records / "pipelines-sst2.json").read_text())
    speed = json.loads((records / "tradeoff-sst2-cpu.json").read_text())
    if round(speed["base"], 5) != quality["base"][SPLIT]:
        raise ValueError("the records are of different models")
    return quality, {row["kept"]: {**row, **speed} for row in tradeoff_page.shown(speed)}


def draw(records: Path, docs: Path) -> Path:
    """Draws accuracy against speed, a point for every number of kept heads."""
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    quality, speeds = read(records)
    cells = pipelines.cells(quality, SPLIT)
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    panel = figure.subplots()
    for (way, words), mark in zip(WAYS.items(), "os", strict=True):
        draws = {kept: cells[way][kept] for kept in speeds if kept in cells[way]}
        panel.errorbar(
            [speeds[kept]["ratio"] for kept in draws],
            [statistics.fmean(values) for values in draws.values()],
            [studies.deviation(values) for values in draws.values()],
            label=words,
            marker=mark,
            capsize=3,
        )
    for kept, row in speeds.items():
        if kept in cells["surgeon/lstsq+ff"]:
            about = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
            panel.annotate(f"{kept} heads", (row["ratio"], 0.02), **about)
    whole = f"all {quality['heads']} heads"
    panel.axhline(quality["base"][SPLIT], color="0.4", linestyle="--", linewidth=1, label=whole)
    panel.margins(x=0.08)
    panel.set_ylim(bottom=0.8)
    panel.set_xlabel("times as fast as with all heads")
    panel.set_ylabel(f"accuracy, {quality['judged'][SPLIT]} test rows")
    panel.legend(loc="center left")
    panel.grid(alpha=0.2)
    studies.save_figure(figure, docs / PICTURE)
    return docs / PICTURE


def readme(records: Path) -> str:
    """The block of the README."""
    quality, speeds = read(records)
    cells = pipelines.cells(quality, SPLIT)
    rows = [[f"{quality['heads']} (all)", f"{quality['base'][SPLIT]:.3f}", "", "1"]]
    for kept, row in speeds.items():
        if all(kept in cells[way] for way in WAYS):
            accuracies = [studies.spread(cells[way][kept]) for way in WAYS]
            speed = interval(row["ratio"], row["low"], row["high"])
            rows.append([str(kept), *accuracies, speed])
    one = next(iter(speeds.values()))
    third = quality["heads"] // 3
    lost = [
        f"{100 * (quality['base'][SPLIT] - statistics.fmean(cells[way][third])):.1f}"
        for way in WAYS
    ]
    draws = len(next(iter(cells["surgeon/lstsq+ff"].values())))
    lines = [
        f"With {third} of {quality['heads']} heads, a BERT-style encoder (MiniLM) loses {lost[0]}"
        " points of accuracy on film reviews\n(SST-2) and is"
        f" {speeds[third]['ratio']:.2f} times as fast. With as many random heads, refitted in the"
        f" same way, it loses {lost[1]} points.",
        "",
        f"![accuracy against speed](docs/{PICTURE})",
        "",
        *table(["heads kept", *WAYS.values(), "times as fast"], rows),
        "",
        "The two columns in the middle are accuracies. Nothing is trained after the cut:"
        f" {quality['calibration']} sentences choose the heads (`surgeon`) and refit the kept"
        " weights",
        f"(`lstsq`). ±: standard deviation over {draws} draws of those sentences. Speed: batch"
        f" {one['batch']} of {one['length']}",
        f"tokens on a CPU ({one['hardware']['processor']}, {threads(one['hardware'])}), with its 95 %"
        " interval.",
    ]
    return "\n".join(lines)
