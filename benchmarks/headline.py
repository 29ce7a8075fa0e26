"""What the README measured: one result with docs/headline.svg, and what heads alone do not give.

Everything is read from records. Quality is of ``pipelines-sst2.json``, speed of
``tradeoff-sst2-cpu.json``: the same weights and the same test rows.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import kv_groups
import pipelines
import studies
import tradeoff_page
from pages import interval, of, table, threads

PICTURE = "headline.svg"
#: What is shown, and in which words.
WAYS = {
    "surgeon/lstsq+ff": "chosen by headprune",
    "random-min0/lstsq+ff": "random, same refit",
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
    whole = quality["base"][SPLIT]
    kept, at_random = (statistics.fmean(cells[way][third]) for way in WAYS)
    draws = len(next(iter(cells["surgeon/lstsq+ff"].values())))
    lines = [
        f"On film reviews (SST-2), a BERT-style encoder (MiniLM) has an accuracy of {whole:.3f}."
        f" With {third} of its {quality['heads']} heads it has {kept:.3f},"
        f" and is {speeds[third]['ratio']:.2f} times as fast. With {third} random heads, refitted"
        f" in the same way, it has {at_random:.3f}.",
        "",
        f"![accuracy against speed](docs/{PICTURE})",
        "",
        *table(
            ["heads kept", *(f"accuracy: {way}" for way in WAYS.values()), "times as fast"], rows
        ),
        "",
        f"Nothing is trained after the cut: {quality['calibration']} sentences choose the heads"
        " (`surgeon`) and refit the kept weights (`hp.recovery.Lstsq(feed_forward=True)`). A random"
        " choice may empty a layer; headprune keeps a head in each."
        f" ±: standard deviation over {draws} draws of sentences. Speed: batch {one['batch']} of"
        f" {one['length']} tokens on a CPU ({one['hardware']['processor']},"
        f" {threads(one['hardware'])}); in brackets its 95 % interval.",
    ]
    return "\n".join(lines)


def limits(records: Path) -> str:
    """The block about what heads alone do not give: INT8, training, short inputs, small models."""
    peers = json.loads((records / "peers-sst2.json").read_text())
    llama = json.loads((records / "kv-groups-stories.json").read_text())
    _, speeds = read(records)
    third = peers["heads"] // 3
    shown = speeds[third]
    alone, int8, both = (
        _speed(peers, name, kept, shown)
        for name, kept in (
            ("headprune", third),
            ("ONNX Runtime dynamic INT8", None),
            ("headprune + ONNX Runtime dynamic INT8", third),
        )
    )
    untrained, trained, smaller = (
        statistics.fmean(row["test"] for row in _rows(peers, name, third))
        for name in ("headprune", "headprune, trained", "smaller architecture")
    )
    short = min(
        of(shown, "speed", kept=third, dtype="float32", attention="sdpa", compiled=False),
        key=lambda row: (row["batch"], row["length"]),
    )
    page = f"docs/peers.md#{third}-of-{peers['heads']}-heads-kept"
    times = "docs/tradeoff.md#float32-sdpa-attention-eager-mode"
    cut, after = (min(kv_groups.by_scorer(llama, 0.75, way).values()) for way in ("cut", "trained"))
    lines = [
        "- **You need a model that is several times smaller or faster.** Attention is only a part of"
        f" it. [MiniLM]({page}) with {third} of {peers['heads']} heads is {alone:.2f} times as fast,"
        f" with INT8 (dynamic, ONNX Runtime) {int8:.2f} times, with both {both:.2f} times.",
        f"- **You can train at length.** [A smaller architecture]({page}) of about the same speed,"
        f" trained for the task, has an accuracy of {smaller:.3f}; the cut model {untrained:.3f}, or"
        f" {trained:.3f} after training.",
        "- **You serve one short input at a time.** The overhead of each operation dominates: at"
        f" batch {short['batch']} of {short['length']} tokens, [{third} heads]({times}) are only"
        f" {short['ratio']:.2f} times as fast.",
        "- **Your language model is small.** Without a quarter of its key/value groups, [a Llama of"
        f" 260,000 parameters](docs/kv-groups.md) has a perplexity of {cut:.2f} instead of"
        f" {llama['base']:.2f}; {after:.2f} if trained after the cut.",
    ]
    return "\n".join(lines)


def _rows(record: dict[str, Any], peer: str, kept: int | None) -> list[dict[str, Any]]:
    """A peer's rows of one budget."""
    return [row for row in record["rows"] if (row["peer"], row["kept"]) == (peer, kept)]


def _speed(record: dict[str, Any], peer: str, kept: int | None, shape: dict[str, Any]) -> float:
    """How many times as fast the peer's first draw is at a batch and length."""
    timed = next(row["speed"] for row in _rows(record, peer, kept) if "speed" in row)
    wanted = (shape["batch"], shape["length"])
    return next(cell["ratio"] for cell in timed if (cell["batch"], cell["length"]) == wanted)
