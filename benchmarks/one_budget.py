"""Heads and neurons under one budget of measured speed: what is kept, how fast, how accurate.

    python benchmarks/one_budget.py --task sst2 --data path/to/data --work runs/regret
    python benchmarks/one_budget.py --figure        # docs/one-budget.md, from the records

Tasks, folders and trained models are those of ``regret.py``. For every draw of calibration rows the
levels of all sites are priced (scorer ``ladder``); then, for every speed that is asked for, selector
``repriced`` chooses by a measured latency table, the model is cut and refitted by ``lstsq``: once
among heads and neurons, once among heads alone. Nothing is trained after the cut, and test rows are
only reported. The cut model is timed beside the whole one in interleaved rounds, in ``--dtype``; all else
is fp32. A row of the record is one model, draw, speed and way; a run that is started again goes on
after the last one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import nn

import headprune as hp
from headprune.core.errors import InfeasibleBudget
from headprune.core.latency import LatencyTable
from headprune.data.models import resolve_device
from headprune.recipes.schema import RecoverStep
from headprune.run.recovering import recover_once
from headprune.run.subject import Subject, quiet
from headprune.run.surroundings import git_commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from determinism import reproducible
from pages import machine, publish, table
from regret import REFITS, TASKS, TITLES, add_seeds, note_whole, opened, points, tested
from studies import RECORDS

PAGE = "one-budget.md"
BOTH, HEADS = "heads and neurons", "heads alone"
SELECTOR = "repriced"
SPEEDUPS = (1.5, 2.2, 3.0, 3.6, 4.3)
REFIT = RecoverStep(method="lstsq", settings=REFITS["lstsq"])


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    found = studies.parser(__doc__, "one-budget", TASKS, [])
    found.add_argument("--speedups", type=float, nargs="+", default=list(SPEEDUPS))
    add_seeds(found)
    found.add_argument("--batch", type=int, default=32, help="examples per timed call")
    found.add_argument("--length", type=int, default=128, help="tokens of each")
    found.add_argument("--seconds", type=float, default=20.0, help="per timed model")
    found.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    found.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the models that are timed",
    )
    studies.add_minutes(found)
    return studies.parsed(found, argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or draws; returns the path that was written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    over = studies.clock(args)
    quiet()
    device = resolve_device(args.device)
    args.set.append(f"device={args.device}")
    suffix = "" if args.device == "cpu" else f"-{args.device}"
    out: Path = args.out or RECORDS / f"one-budget-{args.task}{suffix}.json"
    same = {"benchmark": "one-budget", "task": args.task, "calibration": args.calibration}
    same |= {"batch": args.batch, "length": args.length, "dtype": args.dtype, "selector": SELECTOR}
    if device.type == "cuda":
        same["gpu"] = torch.cuda.get_device_name(device)
    record = studies.begun(out, same, device, git_commit=git_commit())
    record.setdefault("whole", {})
    studies.keep(record, out)
    for row in studies.added(record, rows(args, record), over, out):
        print({key: row[key] for key in ("draw", "way", "asked", "ratio", "test")}, flush=True)
    print(out)
    return out


def rows(args: argparse.Namespace, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the record lacks."""
    done = {(row["tuned"], row["draw"], row["asked"], row["way"]) for row in record["rows"]}
    for tuned in args.tuned:
        for number in args.draws:
            cells = itertools.product(args.speedups, (BOTH, HEADS))
            missing = [cell for cell in cells if (tuned, number, *cell) not in done]
            if not missing:
                continue
            # The next machine trains the same weights, and goes on with the record.
            with reproducible(resolve_device(args.device)):
                subject = opened(args, tuned)
            note_whole(record, subject, tuned)
            yield from _rows_of_draw(args, subject, tuned, number, missing)


def _rows_of_draw(
    args: argparse.Namespace,
    subject: Subject,
    tuned: int,
    number: int,
    missing: Sequence[tuple[float, str]],
) -> Iterator[dict[str, Any]]:
    """A row per speed and way, for one draw of calibration rows, whose levels are priced once."""
    # 1. Price the levels.
    subject = replace(subject, data=subject.data.redrawn(args.calibration, number))
    sites = hp.find_sites(subject.model, feed_forward=True)
    batches = subject.data.of_like_length("calibration", subject.recipe.score.batch_size)
    start = process_time()
    scores = hp.score(subject.model, batches, "ladder", sites=sites, progress=False)
    loss = hp.scoring.refitted_loss_of(subject.model, batches, sites=sites, progress=False)
    scoring = round(process_time() - start, 1)
    latency = _latency(args, subject, batches[0], sites)

    neurons = {site.name: site.heads for site in sites if site.is_feed_forward}
    for asked, way in missing:
        # 2. Choose, cut and refit.
        fixed = neurons if way == HEADS else None
        start = process_time()
        try:
            plan = hp.select(
                scores,
                hp.Budget(speedup=asked),
                SELECTOR,
                latency=latency,
                must_keep=fixed,
                loss=loss,
            )
        except InfeasibleBudget as error:
            print(f"{args.task}, {way}, {asked:g} times as fast: {error}", flush=True)
            continue
        selecting = round(process_time() - start, 1)
        start = process_time()
        small = copy.deepcopy(subject.model)
        hp.prune_(small, plan, sites=sites)
        recover_once(subject, small, REFIT)
        refitting = round(process_time() - start, 1)
        seconds = {"score": scoring, "select": selecting, "refit": refitting}
        # 3. Judge and time.
        _, value, _ = tested(subject, small)
        (speed,) = hp.bench.compare_latency(
            _timed(subject.model, args.dtype),
            _timed(small, args.dtype),
            partial(hp.bench.shaped_batch, batches[0]),
            [latency.batch_size],
            [latency.length],
            seconds=args.seconds,
        )
        kept = {row.site: len(row.kept) for row in plan.mask.rows}
        yield {
            "tuned": tuned,
            "draw": number,
            "asked": asked,
            "way": way,
            "length": latency.length,
            "predicted": round(latency.whole / latency.predict(plan.mask), 3),
            "ratio": speed.ratio,
            "low": speed.low,
            "high": speed.high,
            "test": value,
            "heads": [kept[site.name] for site in sites if not site.is_feed_forward],
            "width": max(len(heads) for heads in neurons.values()),
            "neurons": [kept[site.name] for site in sites if site.is_feed_forward],
            "seconds": seconds,
            **studies.stamp(),
        }


def _timed(model: nn.Module, dtype: str) -> nn.Module:
    """The model in the dtype in which it is timed, a copy where that is not its own."""
    wanted = getattr(torch, dtype)
    if next(model.parameters()).dtype == wanted:
        return model
    return copy.deepcopy(model).to(wanted)


def _latency(
    args: argparse.Namespace, subject: Subject, batch: Any, sites: Sequence[hp.AttentionSite]
) -> LatencyTable:
    """The task's latency table, measured at the first time."""
    usual = (args.device, args.dtype) == ("cpu", "float32")
    where = "" if usual else f"-{args.device}-{args.dtype}"
    path = args.work / f"latency-{args.task}-{args.batch}x{args.length}{where}.json"
    if path.is_file():
        return LatencyTable.load(path)
    found = hp.bench.latency_table(
        _timed(subject.model, args.dtype),
        batch,
        batch_size=args.batch,
        # An image has a length of its own.
        length=args.length if "input_ids" in batch else None,
        sites=sites,
        seconds=6 * args.seconds,
    )
    found.save(path)
    return found


# ----------------------------------------------------------------------------------------------
# page


def draw(records: Path, docs: Path) -> Path:
    """Writes the page from every record there is."""
    found = studies.records_in(records, "one-budget")
    return publish(docs / PAGE, lead(found), page(found))


def lead(records: Sequence[dict[str, Any]]) -> str:
    """What was found, and for whom."""
    words = []
    for record in records:
        fastest = max(by_speed(record, BOTH).values(), key=_mean_ratio)
        whole = statistics.fmean(whole["test"] for whole in record["whole"].values())
        metric = next(iter(record["whole"].values()))["metric"]
        test = statistics.fmean(row["test"] for row in fastest)
        words.append(
            f"{_title(record)}: {metric} {test:.3f} at {_mean_ratio(fastest):.1f} times the"
            f" speed; the whole model has {whole:.3f}"
        )
    return (
        "For whoever needs a speed, and does not mind whether heads or feed-forward neurons pay for"
        f" it, without training. The fastest cut of each task: {'; '.join(words)}."
    )


def _title(record: dict[str, Any]) -> str:
    """The task, and the GPU where there was one."""
    return TITLES[record["task"]] + (f", on an {record['gpu']}" if "gpu" in record else "")


def by_speed(record: dict[str, Any], way: str) -> dict[float, list[dict[str, Any]]]:
    """Rows of a way by the speed that was asked for, the slowest first."""
    found: dict[float, list[dict[str, Any]]] = {}
    for row in sorted(record["rows"], key=lambda row: row["asked"]):
        if row["way"] == way:
            found.setdefault(row["asked"], []).append(row)
    return found


def _mean_ratio(rows: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(row["ratio"] for row in rows)


def page(records: Sequence[dict[str, Any]]) -> str:
    """docs/one-budget.md."""
    lines = [
        "# One budget: heads and neurons for a speed",
        "",
        "Written by `python benchmarks/one_budget.py --figure` from records in"
        " `benchmarks/records`; do not edit.",
        "",
        "`hp.Budget(speedup=)`: scorer `ladder`, a selector over a measured latency table, a cut, and"
        " `lstsq` with feed-forwards. Speeds are medians of interleaved rounds beside the whole"
        " model, mean over draws of calibration rows.",
        "",
    ]
    for record in records:
        lines += _task_lines(record)
    return "\n".join([*lines, *studies.no_gpu(r["hardware"] for r in records)]) + "\n"


def _task_lines(record: dict[str, Any]) -> list[str]:
    cells = []
    for way in (BOTH, HEADS):
        for asked, rows in by_speed(record, way).items():
            cells.append([way, f"{asked:g}", *_cells(record, rows)])
    metric = next(iter(record["whole"].values()))["metric"]
    wholes = ", ".join(f"{whole['test']:.4f}" for whole in record["whole"].values())
    length = record["rows"][0]["length"]
    head = ["what may go", "asked", "predicted", "measured", metric, "points", "draws"]
    return [
        f"## {_title(record)}",
        "",
        f"The whole model: {wholes}. {record['calibration']} calibration rows; selector"
        f" `{record.get('selector', 'knapsack')}`; timed at batch size"
        f" {record['batch']}, length {length}, in {record['dtype']}; {machine(record)} Heads and neurons kept per layer"
        " are those of the first draw. A speed that is missing is out of reach with a head and a"
        " level of neurons in every layer.",
        "",
        *table([*head, "heads kept per layer", "neurons kept per layer"], cells),
        "",
    ]


def _cells(record: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line of the table, after the way and the speed that was asked for."""
    lost = []
    for row in rows:
        whole = record["whole"][str(row["tuned"])]
        lost.append(points(whole["metric"], whole["test"])(row["test"]))
    first = rows[0]
    return [
        f"{statistics.fmean(row['predicted'] for row in rows):.2f}",
        studies.spread([row["ratio"] for row in rows], 2),
        studies.spread([row["test"] for row in rows], 4),
        f"{statistics.fmean(lost):+.2f}",
        str(len(rows)),
        " ".join(map(str, first["heads"])),
        " ".join(map(str, first["neurons"])),
    ]


if __name__ == "__main__":
    studies.leave(main())
