"""docs/one-budget.md: what cuts of heads and neurons for a speed cost, from the records of
``one_budget.py``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import empty_layers
import numpy as np
import studies
from in_int8 import ATTENTION_AS_ONE
from one_budget_picture import HIGHEST, picture
from pages import interval, machine, publish, ran_on, read, table
from regret import TITLES, points

from headprune.core.paired import Answers, drop_of_means

PAGE, PICTURE = "one-budget.md", "one-budget.svg"
BOTH, HEADS = "heads and neurons", "heads alone"
INT8 = "heads and neurons, then INT8"
TRAINED = "heads and neurons, then trained"
SMALLER = "smaller architecture, trained"
LONGER = ", longer"
#: How many times the base model's epochs each is trained. The cut model comes from one that was
#: trained once, so the two of a pair have the same epochs behind them.
TIMES = {TRAINED: 1, TRAINED + LONGER: 2}
TIMES_OF_SMALLER = {SMALLER: 2, SMALLER + LONGER: 3}
#: A model that is at most so many times as fast as another one is of like speed.
LIKE = 1.15
#: A model with at least this part of another one's speed counts as equally fast.
AS_FAST = 0.98
#: Draws of calibration rows that are enough for a mean: more do not count more.
ENOUGH = 3
#: Of the predicted speed, what a measured one should reach.
REACHED = 0.95
#: The default of `Lstsq`.
REFIT = "lstsq, held-out ridge"
#: By a record's refit, what it is in words. Records before this one had another: by a mistake, it
#: stopped at attention where neurons were removed.
RIDGES = {
    REFIT: "a ridge by held-out error",
    "attention alone": "ridge 0.3, of attention's projections alone",
}


def draw(records: Path, docs: Path) -> Path:
    """Writes the page from every record with a speed; one that was only judged has none yet."""
    there = studies.records_in(records, "one-budget")
    found = [record for record in there if any("ratio" in row for row in record["rows"])]
    in_panels = {
        _short(task): sorted(of_one, key=_most_draws, reverse=True)
        for task, of_one in by_task(found).items()
    }
    picture(in_panels, (BOTH, HEADS, TRAINED, SMALLER), by_speed, docs / PICTURE)
    others = [record for record in read(records, "peers-*.json") if record["device_used"] == "cpu"]
    beside = [empty_layers.sentence(records), _beside_native(records)]
    ahead = _ahead(found, others)
    return publish(docs / PAGE, lead(found, ahead), page(found, beside, others, ahead))


def _beside_native(records: Path) -> str:
    """How fast cut models are beside models that were built small; empty without a record."""
    path = records / "native-neurons-cpu.json"
    if not path.is_file():
        return ""
    rows = json.loads(path.read_text())["rows"]
    slowest = min(rows, key=lambda row: row["speed"]["ratio"])
    ratios = [row["speed"]["ratio"] for row in rows]
    return (
        f"Cut models have {min(ratios):.2f} to {max(ratios):.2f} of the speed of models that were"
        " [built small](tradeoff.md#beside-a-model-that-was-built-small), the least at"
        f" {slowest['batch']} x {slowest['tokens']} tokens ({slowest['subject'].split(',')[0]})."
    )


def shape_of(row: Mapping[str, Any]) -> str:
    """What a row's speed depends on."""
    return json.dumps([row["way"] == INT8, row["heads"], row["neurons"]])


def lead(records: Sequence[dict[str, Any]], ahead: Sequence[tuple[str, str]]) -> str:
    """What was found, and for whom; ``ahead`` is of `_ahead`."""
    reached = _reached(records)
    trained = ""
    if ahead:
        tasks = ", ".join(dict.fromkeys(task for task, _ in ahead))
        trained = f" A trained smaller architecture is better at some speed: {tasks}."
    return (
        "For those who need a speed, whether heads or feed-forward neurons pay for it. The first"
        " table has, by task, the fastest cut that loses at most a point, the fastest of all,"
        " and what training adds. A cut is chosen for one batch size and length: single short"
        " texts gain less. Measured speeds are"
        f" {min(reached):.2f} to {max(reached):.2f} of the predicted ones.{_least(records)}"
        f"{trained}{_of_llama(records)}"
    )


def _least(records: Sequence[dict[str, Any]]) -> str:
    """Which tasks are less than twice as fast within a point of the whole model, in words."""
    slow = []
    for task, of_one in by_task(records).items():
        record = max(of_one, key=_most_draws)
        near = _within_a_point(record)
        if _metric(record) != "perplexity" and (not near or max(near)[0] < 2):
            slow.append(_short(task))
    return f" Not twice as fast at a loss of at most a point: {', '.join(slow)}." if slow else ""


def _reached(records: Sequence[dict[str, Any]]) -> list[float]:
    """Measured speeds of cuts of heads and neurons, as parts of the predicted ones."""
    found = []
    for record in of_today(records):
        found += map(_reached_by, by_speed(record, BOTH).values())
        found += timed_again(record).values()
    return found


def _reached_by(rows: Sequence[dict[str, Any]]) -> float:
    """The measured speed of a cut's draws over the predicted one."""
    return _mean_ratio(rows) / statistics.fmean(row["predicted"] for row in rows)


def _of_llama(records: Sequence[dict[str, Any]]) -> str:
    """By how much the language model's perplexity rises; empty without its record."""
    rises = []
    for record in of_today(records):
        if record["task"] == "stories":
            for rows in by_speed(record, BOTH).values():
                rise = _mean_test(rows) / _mean_whole(record, rows) - 1
                rises.append(f"{rise:.0%} at {_mean_ratio(rows):.2f}x")
    if not rises:
        return ""
    return (
        " The small Llama (stories) cannot be made much faster untrained: its perplexity rises by"
        f" {', '.join(rises)}; heads alone are as good up to 1.5x."
    )


def of_today(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of the refit that is the default; those of the mistaken one are of other cuts."""
    return [record for record in records if record["refit"] == REFIT]


def _in_short(records: Sequence[dict[str, Any]], ahead: Sequence[tuple[str, str]]) -> list[str]:
    """A line per task, from the records with the most draws."""
    smaller = []
    if ahead:
        named = "; ".join(f"{task} {words}" for task, words in ahead)
        smaller = [
            f"A smaller architecture of another shape is as fast and better here: {named}.",
            "",
        ]
    head = ["task", "whole", "within a point", "fastest", "draws", "trained, beside a smaller one"]
    lines = [[_short(task), *_summary(of_one)] for task, of_one in by_task(records).items()]
    return [
        "## In short",
        "",
        "*Within a point*: the fastest cut whose mean test quality is at most a point (0.01) below"
        " the whole model's, nothing trained; *fastest*: of all that was tried. Both give"
        " speed and quality, on the machine with the most draws of calibration rows. *Trained*:"
        " by how many points the trained cut is better than a trained smaller architecture that is"
        f" at most {LIKE - 1:.0%} faster (the least and the most over all speeds and machines), and"
        " the speed of the slowest of these cuts. Some are of one draw, as the tables below say."
        " Records of an earlier refit do not count here. The README's cuts, with fewer"
        " calibration rows, are others.",
        "",
        *table(head, lines),
        "",
        *smaller,
        f"![quality against speed, by task]({PICTURE})",
        "",
        "Each curve is of one machine, of those that have it the one with the most draws. Bars are"
        f" standard deviations over draws. Perplexities above {HIGHEST} are not drawn.",
        "",
    ]


def by_task(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Records of the present refit, by their task."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in of_today(records):
        found.setdefault(record["task"], []).append(record)
    return found


def _summary(records: Sequence[dict[str, Any]]) -> list[str]:
    """The cells of a task, from its records."""
    record = max(records, key=_most_draws)
    wholes, metric = record["whole"], _metric(record)
    whole = statistics.fmean(one["test"] for one in wholes.values())
    named = "" if metric == "accuracy" else f" ({metric})"
    draws, _ = _most_draws(record)
    return [f"{whole:.3f}{named}", *_fastest(record), str(draws), _trained(records)]


def _metric(record: dict[str, Any]) -> str:
    """What quality is measured by."""
    metric: str = next(iter(record["whole"].values()))["metric"]
    return metric


def _most_draws(record: dict[str, Any]) -> tuple[int, int]:
    """How many draws a record has at most, up to `ENOUGH`, and at how many speeds it has them."""
    counts = [min(len(rows), ENOUGH) for rows in by_speed(record, BOTH).values()]
    most = max(counts, default=0)
    return most, counts.count(most)


def _fastest(record: dict[str, Any]) -> tuple[str, str]:
    """The fastest cut within a point of the whole model, and the fastest of all, of most draws."""

    def cell(cut: tuple[float, float, float]) -> str:
        return f"{cut[0]:.2f}x, {cut[1]:.3f}"

    fastest = cell(max(_cuts(record)))
    if _metric(record) == "perplexity":  # has no points
        return "-", fastest
    near = _within_a_point(record)
    return cell(max(near)) if near else "none", fastest


def _within_a_point(record: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Of `_cuts`, those that lose at most a point."""
    return [cut for cut in _cuts(record) if cut[2] - cut[1] <= 0.01]


def _cuts(record: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Speed, quality and the whole model's quality of each cut that has the most draws."""
    draws, _ = _most_draws(record)
    return [
        (_mean_ratio(rows), _mean_test(rows), _mean_whole(record, rows))
        for rows in by_speed(record, BOTH).values()
        if len(rows) >= draws
    ]


def _trained(records: Sequence[dict[str, Any]]) -> str:
    """The least and the most points that training is above a smaller architecture, in words."""
    fair = []
    for record in records:
        fair += [one for one in _differences(record, TRAINED, SMALLER) if one.is_fair]
    if not fair:
        return "not tried"
    points_of = [one.points for one in fair]
    low, high = (round(end, 1) + 0.0 for end in (min(points_of), max(points_of)))  # no -0.0
    return f"{low:+.1f} to {high:+.1f}, from {min(one.speed for one in fair):.2f}x"


def _short(task: str) -> str:
    """A task's title without its data and classes."""
    return TITLES[task].split(",")[0]


def _title(record: dict[str, Any]) -> str:
    """The task, and the device."""
    title = TITLES[record["task"]]
    if "gpu" not in record:
        return f"{title}, on {_processor(record)}"
    return f"{title},{_device(record)}"


def _processor(record: dict[str, Any]) -> str:
    name: str = record["hardware"]["processor"]
    return name.replace("(R)", "").removesuffix(" Processor")


def _device(record: dict[str, Any]) -> str:
    """The GPU of a record; models that were made there may be timed elsewhere."""
    return f"{' made' if 'timed' in record else ''} on an {record['gpu']}"


def by_speed(record: dict[str, Any], way: str) -> dict[float, list[dict[str, Any]]]:
    """Timed rows of a way by the speed that was asked for, the slowest first."""
    found: dict[float, list[dict[str, Any]]] = {}
    for row in sorted(record["rows"], key=lambda row: row["asked"]):
        if row["way"] == way and "ratio" in row:
            found.setdefault(row["asked"], []).append(row)
    return found


def _mean_ratio(rows: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(row["ratio"] for row in rows)


def _mean_test(rows: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(row["test"] for row in rows)


def _mean_whole(record: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    """The quality of the whole models from which these cuts were made."""
    return statistics.fmean(record["whole"][str(row["tuned"])]["test"] for row in rows)


def page(
    records: Sequence[dict[str, Any]],
    beside: Sequence[str],
    of_peers: Sequence[dict[str, Any]],
    ahead: Sequence[tuple[str, str]],
) -> str:
    """docs/one-budget.md.

    Args:
        records: Of this study.
        beside: Sentences of other studies; empty ones have no record.
        of_peers: Records of docs/peers.md, which has smaller architectures of other shapes.
        ahead: Of `_ahead`.
    """
    lines = [
        "# One budget: heads and neurons for a speed",
        "",
        "Written by `python benchmarks/one_budget.py --figure` from records in"
        " `benchmarks/records`; do not edit.",
        "",
        "`hp.Budget(speedup=)`: scorer `ladder`, a selector over a measured latency table, a cut, and"
        " `lstsq` with feed-forwards. Speeds are medians of interleaved rounds beside the whole"
        " model, mean over draws of calibration rows. [Other tools](peers.md) are compared at equal"
        " multiply-adds; the smaller architecture there has as many of them, the one here is about as"
        " fast. Heads alone are chosen by `ladder` here, those of the README by `surgeon`.",
        "",
    ]
    lines += _in_short(records, ahead)
    if any(beside):
        lines += [" ".join(filter(None, beside)), ""]
    for record in records:
        lines += _task_lines(record)
        lines += _others_smaller(record, of_peers)
    return "\n".join([*lines, *studies.no_gpu(r["hardware"] for r in records)]) + "\n"


def _task_lines(record: dict[str, Any]) -> list[str]:
    cells = []
    for way in (BOTH, HEADS, INT8, *TIMES, *TIMES_OF_SMALLER):
        for asked, rows in by_speed(record, way).items():
            cells.append([way, f"{asked:g}", *_cells(record, rows)])
    metric = _metric(record)
    wholes = ", ".join(f"{whole['test']:.4f}" for whole in record["whole"].values())
    length = record["rows"][0]["length"]
    more = ""
    if any(row["way"] == INT8 for row in record["rows"]):
        more += (
            " INT8 is that of ONNX Runtime (dynamic, per channel; attention as one operator, by"
            f" `export_onnx(opset={ATTENTION_AS_ONE})`), timed beside the whole model in PyTorch; at 1 nothing is"
            " cut."
        )
    if any(row["way"] in TIMES for row in record["rows"]):
        more += (
            " *Trained*: after its refit, the cut model is trained on the base model's logits for as"
            " many epochs as the base model was. The smaller architecture (fewer, narrower layers of"
            " the weights before fine-tuning, about as fast) is trained on the same logits for twice"
            " as many. A speed without such rows was not tried."
        )
    if any(row["way"].endswith(LONGER) for row in record["rows"]):
        more += " *Longer*: for one such time more."
    where = machine(record)
    if "timed" in record:
        where = f"on {ran_on(record['timed']['hardware'])}. Chosen, trained and judged on: {where}"
    change = "higher by, %" if metric == "perplexity" else "points"
    head = ["what is cut", "asked", "predicted", "measured", metric, change, "draws"]
    return [
        f"## {_title(record)}",
        "",
        *_mistaken(record),
        f"The whole model: {wholes}. {record['calibration']} calibration rows, refits on up to"
        f" {record.get('refit_rows', record['calibration']):,} with {RIDGES[record['refit']]}; selector"
        f" `{record.get('selector', 'knapsack')}`; timed at batch size"
        f" {record['batch']}, length {length}, in {record['dtype']}; {where} Heads and neurons kept"
        " per layer are those of the first draw. A speed that is missing was not tried, or is"
        f" out of reach.{more}",
        "",
        *_apart(record),
        *_below(record),
        *table([*head, "heads kept per layer", "neurons kept per layer"], cells),
        "",
        *_other_shapes(record),
        *_against_smaller(record),
    ]


def _mistaken(record: dict[str, Any]) -> list[str]:
    """A warning, where a record is of the mistaken refit."""
    if record["refit"] == REFIT:
        return []
    return ["**An earlier refit, which by a mistake changed attention alone. It loses more.**", ""]


def _below(record: dict[str, Any]) -> list[str]:
    """Which cuts are slower than the latency table predicts."""
    found = []
    for way in (BOTH, HEADS):
        for asked, rows in by_speed(record, way).items():
            reached = _reached_by(rows)
            if reached < REACHED:
                found.append(f"{way} at {asked:g} ({reached:.2f})")
    lines = []
    if found:
        lines += [f"Below {REACHED:g} of the predicted speed: {', '.join(found)}.", ""]
    again = timed_again(record)
    if again and min(again.values()) < REACHED:
        parts = [f"{reached:.2f} at {asked:g}" for asked, reached in again.items()]
        lines += [
            "The first draw's cuts, timed again at the table's own size. Measured speed over predicted"
            f" speed: {', '.join(parts)}.",
            "",
        ]
    return lines


def timed_again(record: dict[str, Any]) -> dict[float, float]:
    """Of the first draw's cuts of heads and neurons, the speed that was measured once more at the
    size of the latency table, as a part of the predicted one; by the speed that was asked for."""
    size = (record["batch"], record["rows"][0]["length"])
    found = {}
    for row in record.get("shapes", {"rows": ()})["rows"]:
        if (row["batch"], row["length"]) == size:
            first = min(by_speed(record, BOTH)[row["asked"]], key=lambda cut: cut["draw"])
            found[row["asked"]] = row["ratio"] / first["predicted"]
    return found


def _apart(record: dict[str, Any]) -> list[str]:
    """By how much the speeds of equal models differ that were timed at different times."""
    of_shape: dict[str, list[float]] = {}
    for row in record["rows"]:
        if "ratio" in row:
            of_shape.setdefault(shape_of(row), []).append(row["ratio"])
    most = max(max(ratios) / min(ratios) - 1 for ratios in of_shape.values())
    if most < 0.005:  # 0 % when rounded
        return []
    return [
        "Not all rows were timed at one time: speeds of models of one shape differ by up to"
        f" {most:.0%}.",
        "",
    ]


def _other_shapes(record: dict[str, Any]) -> list[str]:
    """How fast the same cuts are at other batch sizes and lengths."""
    if "shapes" not in record:
        return []
    there = record["shapes"]
    of_shape: dict[tuple[int, int], dict[float, str]] = {}
    for row in there["rows"]:
        cells = of_shape.setdefault((row["length"], row["batch"]), {})
        cells[row["asked"]] = interval(row["ratio"], row["low"], row["high"])
    asked = sorted({row["asked"] for row in there["rows"]})
    head = ["length", "batch", *(f"asked {speed:g}" for speed in asked)]
    lines = [
        [str(length), str(batch), *(cells.get(speed, "-") for speed in asked)]
        for (length, batch), cells in sorted(of_shape.items())
    ]
    return [
        "The first draw's cuts of heads and neurons at other batch sizes and lengths, in float32, on"
        f" {ran_on(there['hardware'])}. They were timed anew, and intervals are over rounds; from"
        " process to process, and after other sizes in one, a speed may differ by 10 to 20 %:",
        "",
        *table(head, lines),
        "",
    ]


def _against_smaller(record: dict[str, Any]) -> list[str]:
    """Cut and trained, beside a smaller architecture that was trained as long."""
    lines = []
    for trained, smaller in zip(TIMES, TIMES_OF_SMALLER, strict=True):
        longer = LONGER if LONGER in trained else ""
        for one in _differences(record, trained, smaller):
            over = "rows" if one.n_draws == 1 else f"rows and {one.n_draws} draws"
            lines.append(
                f"- Asked {one.asked:g}{longer}: {_points(one)} points"
                f" (interval over {over}); the cut model {one.speed:.2f}x, the smaller architecture"
                f" {one.speed_of_smaller:.2f}x as fast."
            )
    if not lines:
        return []
    head = (
        "Both trained, the difference of accuracies with its 95 % interval; above 0 the cut model is"
        " better than the smaller architecture:"
    )
    return [head, "", *lines, ""]


def _others_smaller(record: dict[str, Any], of_peers: Sequence[dict[str, Any]]) -> list[str]:
    """Smaller architectures of docs/peers.md, timed on such a processor: of other shapes, as they
    have the multiply-adds of other cuts."""
    if not by_speed(record, SMALLER):
        return []
    found: dict[str, list[str]] = {}
    for one in _smaller_of_peers(record, of_peers):
        found.setdefault(one.way, []).append(f"{one.speed:.2f}x, {one.test:.3f}")
    if not found:
        return []
    listed = [f"{way}: {'; '.join(sorted(cells))}" for way, cells in sorted(found.items())]
    return [
        "Smaller architectures of other shapes, with as many multiply-adds as the cuts of"
        " [other tools](peers.md) (speed, accuracy):",
        "",
        *(f"- {line}." for line in listed),
        "",
    ]


@dataclass(frozen=True)
class _Smaller:
    """A smaller architecture of docs/peers.md.

    Args:
        way: How it was trained, in words.
        speed: How many times as fast as the whole model.
        test: Its quality.
    """

    way: str
    speed: float
    test: float


def _smaller_of_peers(
    record: dict[str, Any], of_peers: Sequence[dict[str, Any]]
) -> Iterator[_Smaller]:
    """Smaller architectures of docs/peers.md for a record's task, timed on its processor."""
    timed_on = record.get("timed", record)["hardware"]["processor"]
    for other in of_peers:
        if (other["task"], other["hardware"]["processor"]) != (record["task"], timed_on):
            continue
        for row in other["rows"]:
            if row["peer"].startswith("smaller architecture") and "speed" in row:
                cell = next(one for one in row["speed"] if one["batch"] == record["batch"])
                way = "distilled" if row["peer"].endswith("distilled") else "trained on labels"
                yield _Smaller(way, cell["ratio"], row["test"])


def _ahead(
    records: Sequence[dict[str, Any]], of_peers: Sequence[dict[str, Any]]
) -> list[tuple[str, str]]:
    """By task, where a smaller architecture of another shape is as fast and better than a trained
    cut: speeds and qualities, in words."""
    found = []
    for record in of_today(records):
        for rows in by_speed(record, TRAINED).values():
            ours, test = _mean_ratio(rows), _mean_test(rows)
            better = [
                one
                for one in _smaller_of_peers(record, of_peers)
                if one.speed >= AS_FAST * ours and one.test > test
            ]
            if better:
                best = max(better, key=lambda one: one.test)
                words = (
                    f"{best.speed:.2f}x, {best.test:.3f} (the trained cut: {ours:.2f}x, {test:.3f})"
                )
                found.append((_short(record["task"]), words))
    return found


@dataclass(frozen=True)
class Difference:
    """Accuracy of a trained cut minus that of a smaller architecture, in points."""

    asked: float
    points: float
    low: float
    high: float
    n_draws: int
    speed: float
    speed_of_smaller: float

    @property
    def is_fair(self) -> bool:
        """Whether the smaller architecture is not much faster."""
        return self.speed_of_smaller <= LIKE * self.speed


def _points(one: Difference) -> str:
    """The difference with its interval, and no -0.00."""
    return interval(*(round(end, 2) + 0.0 for end in (one.points, one.low, one.high)))


def _differences(record: dict[str, Any], trained: str, of_smaller: str) -> list[Difference]:
    """One for each speed at which both were trained, over the draws that both have."""
    n = next(iter(record["whole"].values()))["n"]
    smaller = by_speed(record, of_smaller)
    found = []
    for asked, rows in by_speed(record, trained).items():
        theirs = {_draw(row): row for row in smaller.get(asked, []) if "right" in row}
        ours = {_draw(row): row for row in rows if "right" in row and _draw(row) in theirs}
        theirs = {draw: theirs[draw] for draw in ours}
        if not ours:
            continue
        answers = [[_answers(row, n) for row in some.values()] for some in (theirs, ours)]
        drop = drop_of_means(*answers)
        speeds = [_mean_ratio(list(some.values())) for some in (ours, theirs)]
        ends = (-100 * drop.value, -100 * drop.high, -100 * drop.low)
        found.append(Difference(asked, *ends, len(ours), *speeds))
    return found


def _draw(row: dict[str, Any]) -> tuple[int, int]:
    return row["tuned"], row["draw"]


def _answers(row: dict[str, Any], n: int) -> Answers:
    """Which test rows were right."""
    return Answers("accuracy", studies.unpacked(row["right"], n), np.ones(n))


def _cells(record: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line of the table, after the way and the speed that was asked for."""
    changes = []
    for row in rows:
        whole = record["whole"][str(row["tuned"])]
        better = points(whole["metric"], whole["test"])(row["test"])
        changes.append(-better if whole["metric"] == "perplexity" else better)
    first = rows[0]
    return [
        _predicted(rows),
        _measured(rows),
        studies.spread([row["test"] for row in rows], 4),
        f"{statistics.fmean(changes):+.2f}",
        str(len(rows)),
        " ".join(map(str, first["heads"])),
        " ".join(map(str, first["neurons"])),
    ]


def _measured(rows: Sequence[dict[str, Any]]) -> str:
    """The speed, with its spread over draws; of one draw, with its interval over rounds."""
    if len(rows) == 1:
        return interval(rows[0]["ratio"], rows[0]["low"], rows[0]["high"])
    return studies.spread([row["ratio"] for row in rows], 2)


def _predicted(rows: Sequence[dict[str, Any]]) -> str:
    """The speed that the latency table predicts; it knows nothing of INT8 or fewer layers."""
    if rows[0]["way"] in (INT8, *TIMES_OF_SMALLER):
        return "-"
    return f"{statistics.fmean(row['predicted'] for row in rows):.2f}"
