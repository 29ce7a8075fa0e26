"""What the README measured: one result with docs/headline.svg, and what heads alone do not give.

Everything is read from records. Quality is of ``pipelines-sst2.json``, speed and the interval of
the loss of ``tradeoff-sst2-cpu.json``: the same weights, plans and test rows. What heads and
neurons give by the command's own defaults is of ``by-command-sst2.json``, and what training adds of
``one-budget-sst2.json``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_page
import kv_groups
import one_budget_page as one_budget
import pipelines
import studies
import tradeoff_page
from one_budget_picture import curve
from pages import interval, of, ratio, table, threads
from scipy.stats import ttest_ind

PICTURE = "headline.svg"
#: Speed asked for of the trained cut that the README's table has.
TRAINED_AT = 2.2
CHOSEN = "surgeon/lstsq+ff"
#: What is shown, and in which words.
WAYS = {
    CHOSEN: "chosen by headprune",
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
        heads = " / ".join(map(str, draws))
        panel.errorbar(
            [speeds[kept]["ratio"] for kept in draws],
            [statistics.fmean(values) for values in draws.values()],
            [studies.deviation(values) for values in draws.values()],
            label=f"{heads} heads, {words}",
            marker=mark,
            capsize=3,
        )
    curve(
        panel,
        draws_by_speed(by_command(records)),
        label="heads and neurons, headprune prune --speedup",
        marker="^",
        capsize=3,
    )
    whole = f"all {quality['heads']} heads"
    panel.axhline(quality["base"][SPLIT], color="0.4", linestyle="--", linewidth=1, label=whole)
    panel.margins(x=0.08)
    panel.set_ylim(bottom=0.8)
    panel.set_xlabel("times as fast as with all heads")
    panel.set_ylabel(f"accuracy, {quality['judged'][SPLIT]} test rows")
    panel.legend(loc="lower left")
    panel.grid(alpha=0.2)
    studies.save_figure(figure, docs / PICTURE)
    return docs / PICTURE


def readme(records: Path) -> str:
    """The block of the README."""
    quality, speeds = read(records)
    cells = pipelines.cells(quality, SPLIT)
    n_heads = quality["heads"]
    rows = [[f"all {n_heads} heads", "1", f"{quality['base'][SPLIT]:.3f}", ""]]
    gains = {}
    for kept, row in speeds.items():
        if all(kept in cells[way] for way in WAYS):
            chosen, at_random = (cells[way][kept] for way in WAYS)
            gains[kept] = gain(chosen, at_random)
            rows.append(
                [
                    f"{kept} heads",
                    interval(row["ratio"], row["low"], row["high"]),
                    f"{statistics.fmean(chosen):.3f}",
                    points(*loss(row, chosen)),
                ]
            )
    command = by_command(records)
    with_neurons = draws_by_speed(command)
    trained = trained_of(records)
    one = next(iter(speeds.values()))
    third = n_heads // 3
    draws = len(next(iter(cells[CHOSEN].values())))
    _check_alike(command, with_neurons, one, draws)
    lines = [
        f"On film reviews (SST-2), a BERT-style encoder (MiniLM) is {_fast_and_good(with_neurons)}."
        " Heads and feed-forward neurons are removed under [one budget](docs/one-budget.md)"
        f" (`--speedup`); nothing is trained. With heads alone, {third} of {n_heads} kept, it is"
        f" {speeds[third]['ratio']:.2f} times as fast; its accuracy changes by"
        f" {points(*loss(speeds[third], cells[CHOSEN][third]))} points."
        f" {against_random(gains, draws)}",
        "",
        f"![accuracy against speed](docs/{PICTURE})",
        "",
        *table(
            ["kept", "times as fast", "accuracy", "change in points"],
            [*rows, *map(_with_neurons, with_neurons), _with_neurons(trained, ", trained")],
        ),
        "",
        f"With neurons (`prune --speedup`): {command['calibration']} sentences for scores"
        f" (trained: {quality['calibration']}), {command['refit_rows']:,} for refits. Heads alone:"
        f" {quality['calibration']}. Means of {draws} draws (trained: {len(trained)}) ± standard"
        f" deviations, [95 % intervals]. Times: batch {one['batch']} × {one['length']} tokens, CPU,"
        f" {threads(one['hardware'])}.",
    ]
    return "\n".join(lines)


def _fast_and_good(with_neurons: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Speeds and accuracies of the first two cuts of heads and neurons, in words."""
    whole = statistics.fmean(row["whole"] for row in with_neurons[0])
    words = []
    for rows in with_neurons[:2]:
        speed = statistics.fmean(row["ratio"] for row in rows)
        test = statistics.fmean(row["test"] for row in rows)
        words.append(f"{speed:.1f} times as fast with {test:.3f}")
    text = ", ".join(words).replace(" with ", " with an accuracy of ", 1)
    return f"{text} (whole: {whole:.3f})"


def by_command(records: Path) -> dict[str, Any]:
    """The record of runs of the README's command."""
    found: dict[str, Any] = json.loads((records / "by-command-sst2.json").read_text())
    return found


def draws_by_speed(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """All draws at each speed that was asked for, the slowest first."""
    return list(one_budget.by_speed(record, one_budget.BOTH).values())


def _check_alike(
    command: dict[str, Any],
    with_neurons: Sequence[Sequence[dict[str, Any]]],
    one: dict[str, Any],
    draws: int,
) -> None:
    """Refuse records whose draws, sizes or threads are not those that the README states for all."""
    here, there = ([x["batch"], x["length"], threads(x["hardware"])] for x in (command, one))
    if here != there or {len(rows) for rows in with_neurons} != {draws}:
        raise ValueError("the records are of different draws, sizes or threads")


def trained_of(records: Path) -> list[dict[str, Any]]:
    """The draws of a trained cut of heads and neurons."""
    record = json.loads((records / "one-budget-sst2.json").read_text())
    whole = statistics.fmean(one["test"] for one in record["whole"].values())
    rows = one_budget.by_speed(record, one_budget.TRAINED)[TRAINED_AT]
    return [{**row, "whole": whole} for row in rows]


def _with_neurons(rows: Sequence[dict[str, Any]], more: str = "") -> list[str]:
    """A row of the README's table, of all draws at one speed."""
    heads = statistics.fmean(sum(row["heads"]) for row in rows)
    neurons = statistics.fmean(map(_share, rows))
    tests = [row["test"] for row in rows]
    change = statistics.fmean(row["test"] - row["whole"] for row in rows)
    return [
        f"{heads:.0f} heads, {neurons:.0%} of neurons{more}",
        studies.spread([row["ratio"] for row in rows], 2),
        studies.spread(tests),
        f"{100 * change:+.1f}",
    ]


def _share(row: dict[str, Any]) -> float:
    """The fraction of neurons that a plan keeps."""
    kept: list[int] = row["neurons"]
    return sum(kept) / (len(kept) * row["width"])


def loss(row: dict[str, Any], chosen: list[float]) -> tuple[float, float, float]:
    """The change of accuracy against all heads, with its interval over test rows."""
    apart = tradeoff_page.paired(row, tradeoff_page.recovered(row), row["kept"])
    if apart is None or round(row["base"] + apart["difference"], 4) != round(
        statistics.fmean(chosen), 4
    ):
        raise ValueError("the records are of different plans")
    return apart["difference"], apart["low"], apart["high"]


def gain(chosen: list[float], at_random: list[float]) -> tuple[float, float, float]:
    """The change against random heads, with Welch's interval over draws."""
    ends = ttest_ind(chosen, at_random, equal_var=False).confidence_interval(0.95)
    return statistics.fmean(chosen) - statistics.fmean(at_random), ends.low, ends.high


def against_random(gains: dict[int, tuple[float, float, float]], draws: int) -> str:
    """With how many heads the draws show that the choice is better than random heads."""
    clear = [str(kept) for kept, (_, low, _) in gains.items() if low > 0]
    if not clear:
        return f"Over {draws} draws, the chosen heads are not shown to beat random heads."
    if len(clear) == len(gains):
        return f"Over {draws} draws, the chosen heads are shown to beat random heads."
    return (
        f"Over {draws} draws, the chosen heads beat random heads clearly only with"
        f" {' and '.join(clear)} kept."
    )


def points(middle: float, low: float, high: float) -> str:
    """Differences of accuracy in points."""
    return f"{100 * middle:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


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
    trained, smaller = (
        statistics.fmean(row["test"] for row in _rows(peers, name, third))
        for name in ("headprune, trained", "smaller architecture")
    )
    apart = next(
        row["test"]
        for row in peers["compared"]
        if (row["peer"], row["kept"], row["reference"])
        == ("smaller architecture", third, "headprune")
    )
    above = points(apart["difference"], apart["low"], apart["high"])
    short = min(
        of(shown, "speed", kept=third, dtype="float32", attention="sdpa", compiled=False),
        key=lambda row: (row["batch"], row["length"]),
    )
    page = f"docs/peers.md#{third}-of-{peers['heads']}-heads-kept"
    times = "docs/tradeoff.md#float32-sdpa-attention-eager-mode"
    cut, refitted, after = (_best(llama, way) for way in ("cut", "lstsq+ff", "trained"))
    lines = [
        "- **You want it several times smaller or faster by heads alone.** Attention is only a"
        f" part. In another run, [MiniLM]({page}) is {alone:.2f} times as fast with {third} of"
        f" {peers['heads']} heads, {int8:.2f} with INT8 (ONNX Runtime), {both:.2f} with"
        " both.",
        f"- **You train at length, and cut heads alone.** [A smaller architecture]({page}) of about"
        f" the same speed, trained for the task, has accuracy {smaller:.3f}: {above} points against the cut"
        f" model without training. Trained, the cut model reaches {trained:.3f}.",
        "- **Your batches are small.** Overhead dominates: at batch size"
        f" {short['batch']} and {short['length']} tokens, [MiniLM with {third} heads]({times}) is"
        f" only {short['ratio']:.2f} times as fast.{on_a_gpu(records)}",
        "- **Your language model is small.** [A Llama of 260,000 parameters](docs/kv-groups.md) has"
        f" a perplexity of {llama['base']:.2f}. A quarter of its key/value groups removed (best"
        f" scorer each): {cut:.2f} after the cut, {refitted:.2f} after a refit, {after:.2f} after"
        " training.",
    ]
    return "\n".join(lines)


def on_a_gpu(records: Path) -> str:
    """What half of the heads bring on a GPU, for the largest and a small batch of BERT-base."""
    said = ""
    for record in gpu_page.of_shapes(records):
        rows = [
            row
            for row in gpu_page.eager(record)
            if (row["subject"], row["share"], row["neurons"])
            == (gpu_page.FIRST, gpu_page.HALF, 1.0)
        ]
        large = max(rows, key=lambda row: row["batch"] * row["tokens"])
        small = next(row for row in rows if (row["batch"], row["tokens"]) == (32, 128))
        said += (
            f" On an {record['gpu']} in bf16, [BERT-base with half its heads](docs/gpu.md) is"
            f" {ratio(large['call'])} times as fast at {large['batch']} x {large['tokens']}"
            f" tokens, {ratio(small['call'])} at 32 x 128."
        )
    return said


def _rows(record: dict[str, Any], peer: str, kept: int | None) -> list[dict[str, Any]]:
    """A peer's rows of one budget."""
    return [row for row in record["rows"] if (row["peer"], row["kept"]) == (peer, kept)]


def _best(record: dict[str, Any], way: str) -> float:
    """The lowest mean perplexity of a scorer, with three quarters of the groups."""
    return min(kv_groups.by_scorer(record, 0.75, way).values())


def _speed(record: dict[str, Any], peer: str, kept: int | None, shape: dict[str, Any]) -> float:
    """How many times as fast the peer's first draw is at a batch and length."""
    timed = next(row["speed"] for row in _rows(record, peer, kept) if "speed" in row)
    wanted = (shape["batch"], shape["length"])
    return next(cell["ratio"] for cell in timed if (cell["batch"], cell["length"]) == wanted)
