"""Heads and neurons under one budget of measured speed: what is kept, how fast, how accurate.

    python benchmarks/one_budget.py --task sst2 --data path/to/data --work runs/regret
    python benchmarks/one_budget.py --figure        # docs/one-budget.md, from the records

Tasks, folders and trained models are those of ``regret.py``. For every draw of calibration rows,
scorer ``ladder`` prices the levels of all sites. For every speed that is asked for, selector
``repriced`` then chooses by a measured latency table; the model is cut and refitted by ``lstsq`` on
``--refit-rows`` train rows, without their labels. This is done for heads and neurons, and for heads
alone. Test rows are only reported.

The cut model is timed beside the whole one in interleaved rounds, in ``--dtype``; all else is fp32.
``--int8`` also judges and times both in ONNX Runtime with dynamic INT8. ``--train`` also trains the
refitted cut on the base model's logits, for the base model's number of epochs and for twice as
many. Beside it is a smaller architecture (``fewer_layers.py``) of about the same speed, trained for
two and for three times as many. A row of the record is one model, draw, speed and kind of cut or
training. A run that was stopped goes on after the last row.

A GPU can choose, train and judge what a CPU shall run fast, in three steps::

    python benchmarks/one_budget.py ... --step table                # on the CPU, into --tables
    python benchmarks/one_budget.py ... --step judge --device cuda  # on the GPU, by these tables
    python benchmarks/one_budget.py ... --step time --out RECORD    # on the CPU, adds the speeds

A cut is chosen for one batch size and length. How fast it is at others::

    python benchmarks/one_budget.py ... --step shapes --out RECORD  # adds them
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import InfeasibleBudget
from headprune.core.files import write_atomic
from headprune.core.latency import LatencyTable
from headprune.data.models import resolve_device
from headprune.recipes.schema import RecoverStep
from headprune.run.journal import Journal
from headprune.run.recovering import recover_once
from headprune.run.subject import Subject, prepare_subject, quiet
from headprune.run.surroundings import git_commit, hardware, versions

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from determinism import reproducible
from fewer_layers import fewer_layers, first_layers_, layer_seconds
from in_int8 import InInt8
from one_budget_page import (
    BOTH,
    HEADS,
    INT8,
    REFIT,
    TIMES,
    TIMES_OF_SMALLER,
    by_speed,
    draw,
    shape_of,
)
from regret import (
    REFITS,
    ROWS,
    TASKS,
    add_seeds,
    note_whole,
    opened,
    recipe_of,
    tested,
)
from studies import RECORDS

SELECTOR = "repriced"
#: What is made of the same cut.
FROM = {BOTH: (BOTH, INT8, *TIMES), HEADS: (HEADS,)}
WAYS_OF_CUTS = tuple(itertools.chain.from_iterable(FROM.values()))
WAYS = (*WAYS_OF_CUTS, *TIMES_OF_SMALLER)
#: Tasks whose models read tokens and give a class.
CLASSIFIERS = ("sst2", "trec", "hwu64")
#: What step `shapes` times: examples per call, and tokens of each where the task is of text.
BATCHES, LENGTHS = (1, 8, 32), (32, 128, 512)
#: Turns in which step `time` times every model; the median counts.
TURNS = 3
SPEEDUPS = (1.5, 2.2, 3.0, 3.6, 4.3)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    found = studies.parser(__doc__, "one-budget", TASKS, [])
    found.set_defaults(calibration=None)
    found.add_argument("--speedups", type=float, nargs="+", default=list(SPEEDUPS))
    add_seeds(found)
    found.add_argument("--refit-rows", type=int, default=2048, help="train rows to refit on")
    found.add_argument("--batch", type=int, default=32, help="examples per timed call")
    found.add_argument("--length", type=int, default=128, help="tokens of each")
    found.add_argument("--seconds", type=float, default=20.0, help="per timed model")
    studies.add_device(found)
    found.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the models that are timed",
    )
    found.add_argument(
        "--int8", action="store_true", help="also in ONNX Runtime, INT8; classifiers on a CPU"
    )
    found.add_argument(
        "--train", action="store_true", help="also train, and a smaller architecture beside it"
    )
    found.add_argument(
        "--ways", nargs="+", choices=WAYS, help="of cutting and training; by default all of them"
    )
    found.add_argument(
        "--step", choices=["table", "judge", "time", "shapes"], help="by default all of them"
    )
    found.add_argument("--tables", type=Path, help="folder of latency tables, by default --work")
    studies.add_minutes(found)
    args = studies.parsed(found, argv)
    in_fp32_on_cpu = (args.device, args.dtype) == ("cpu", "float32")
    if args.train and args.task not in (*CLASSIFIERS, "digits"):
        found.error(f"--train is for digits, {', '.join(CLASSIFIERS)}")
    if args.int8 and not (in_fp32_on_cpu and args.task in CLASSIFIERS):
        found.error(f"--int8 is for {', '.join(CLASSIFIERS)}, on a CPU in float32")
    if args.ways is not None and not _cells_of_draw(args):
        found.error("--ways: those of INT8 need --int8, trained ones need --train")
    args.tables = args.tables or args.work
    # A task with few train rows would have the same ones in every draw.
    args.calibration = args.calibration or ROWS.get(args.task, 512)
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or draws; returns the path that was written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    over = studies.clock(args)
    quiet()
    device = resolve_device(args.device)
    args.set.append(f"device={args.device}")
    if args.step == "table":
        return measure_table(args)
    out: Path = args.out or RECORDS / f"one-budget-{args.task}{studies.suffix(args.device)}.json"
    if args.step == "time":
        return add_times(args, out, over)
    if args.step == "shapes":
        return add_shapes(args, out, over)
    same = {"benchmark": "one-budget", "task": args.task, "calibration": args.calibration}
    same |= {"batch": args.batch, "length": args.length, "dtype": args.dtype, "selector": SELECTOR}
    same |= {"refit_rows": args.refit_rows, "refit": REFIT}
    same |= studies.gpu(device)
    record = studies.begun(out, same, device, git_commit=git_commit())
    record.setdefault("whole", {})
    studies.keep(record, out)
    for row in studies.added(record, rows(args, record), over, out):
        shown = ("draw", "way", "asked", "ratio", "test")
        print({key: row[key] for key in shown if key in row}, flush=True)
    print(out)
    return out


def rows(args: argparse.Namespace, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the record lacks."""
    done = {(row["tuned"], row["draw"], row["asked"], row["way"]) for row in record["rows"]}
    for tuned in args.tuned:
        for number in args.draws:
            missing = {cell for cell in _cells_of_draw(args) if (tuned, number, *cell) not in done}
            if not missing:
                continue
            subject = opened(args, tuned)
            note_whole(record, subject, tuned)
            for row in _rows_of_draw(args, subject, number, missing):
                yield {"tuned": tuned, "draw": number, **row, **studies.stamp()}


def _cells_of_draw(args: argparse.Namespace) -> list[tuple[float, str]]:
    """Speeds and ways; at speed 1 nothing is cut."""
    cells = list(itertools.product(args.speedups, (BOTH, HEADS)))
    if args.int8:
        cells += [(asked, INT8) for asked in (1.0, *args.speedups)]
    if args.train:
        cells += itertools.product(args.speedups, (*TIMES, *TIMES_OF_SMALLER))
    return [(asked, way) for asked, way in cells if args.ways is None or way in args.ways]


def _rows_of_draw(
    args: argparse.Namespace, subject: Subject, number: int, missing: set[tuple[float, str]]
) -> Iterator[dict[str, Any]]:
    """A row per missing cell of one draw of calibration rows."""
    recipe = subject.recipe
    # The tasks' recipes are of heads alone. A refit reads the sites of the recipe.
    select = recipe.select.model_copy(update={"feed_forward": True})
    subject = replace(
        subject,
        recipe=recipe.model_copy(update={"select": select}),
        data=subject.data.redrawn(args.calibration, number),
    )
    sites = subject.sites
    batches = subject.data.of_like_length("calibration", subject.recipe.score.batch_size)
    latency = _latency(args, subject.model, batches[0], sites)
    neurons = [site for site in sites if site.is_feed_forward]
    shared = {"length": latency.length, "width": max(len(site.heads) for site in neurons)}

    def row(asked: float, way: str, found: dict[str, Any]) -> dict[str, Any]:
        return {"asked": asked, "way": way, **shared, **found}

    # What needs no prices of levels comes first.
    if (1.0, INT8) in missing:
        kept = {site.name: site.n_query_heads for site in sites}
        found = _measured(args, subject, INT8, subject.model, batches[0], latency)
        yield row(1.0, INT8, {**found, **_kept(sites, kept)})
    cells = itertools.product(args.speedups, TIMES_OF_SMALLER)
    smaller = [cell for cell in cells if cell in missing]
    if smaller:
        layer = _layer(args, subject.model, batches[0], latency)
        for asked, way in smaller:
            measured = _smaller(args, subject, number, asked, way, layer, batches[0], latency)
            if measured is not None:
                yield row(asked, way, measured)
    if any((asked, way) in missing for asked in args.speedups for way in WAYS_OF_CUTS):
        for asked, way, found in _cut_rows(args, subject, number, missing, sites, batches, latency):
            yield row(asked, way, found)


def _cut_rows(
    args: argparse.Namespace,
    subject: Subject,
    number: int,
    missing: set[tuple[float, str]],
    sites: Sequence[hp.AttentionSite],
    batches: Sequence[Any],
    latency: LatencyTable,
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Speed, way and measurements of the missing cuts, whose levels are priced once."""
    # 1. Price the levels.
    start = process_time()
    scores = hp.score(subject.model, batches, "ladder", sites=sites, progress=False)
    loss = hp.scoring.refitted_loss_of(subject.model, batches, sites=sites, progress=False)
    scoring = round(process_time() - start, 1)
    neurons = {site.name: site.heads for site in sites if site.is_feed_forward}
    for asked, way in itertools.product(args.speedups, FROM):
        wanted = [one for one in FROM[way] if (asked, one) in missing]
        if not wanted:
            continue
        # 2. Choose, cut and refit.
        start = process_time()
        try:
            plan = hp.select(
                scores,
                hp.Budget(speedup=asked),
                SELECTOR,
                latency=latency,
                must_keep=neurons if way == HEADS else None,
                loss=loss,
            )
        except InfeasibleBudget as error:
            print(f"{args.task}, {way}, {asked:g} times as fast: {error}", flush=True)
            continue
        selecting = round(process_time() - start, 1)
        start = process_time()
        small = copy.deepcopy(subject.model)
        hp.prune_(small, plan, sites=sites)
        refit = RecoverStep(
            method="lstsq", settings=REFITS[REFIT], rows="train", examples=args.refit_rows
        )
        _, _, report = recover_once(subject, small, refit)
        refitting = round(process_time() - start, 1)
        seconds = {"score": scoring, "select": selecting, "refit": refitting}
        predicted = round(latency.whole / latency.predict(plan.mask), 3)
        # 3. Judge and time.
        kept = {row.site: len(row.kept) for row in plan.mask.rows}
        for one in wanted:
            found = {"seconds": seconds, "predicted": predicted, **_kept(sites, kept)}
            found["projections"] = report.metrics["projections"]  # refitted
            model = small
            if one in TIMES:
                model = copy.deepcopy(small)
                found["seconds"] = {**seconds, "train": _train(subject, model, number, TIMES[one])}
            found |= _measured(args, subject, one, model, batches[0], latency)
            yield asked, one, found


def _smaller(
    args: argparse.Namespace,
    subject: Subject,
    number: int,
    asked: float,
    way: str,
    layer: float,
    batch: Any,
    latency: LatencyTable,
) -> dict[str, Any] | None:
    """What was measured of a smaller architecture; None where none is so fast."""
    try:
        small = fewer_layers(subject, latency, layer, asked)
    except InfeasibleBudget as error:
        print(f"{args.task}, {asked:g} times as fast: {error}", flush=True)
        return None
    seconds = {"train": _train(subject, small, number, TIMES_OF_SMALLER[way])}
    sites = hp.find_sites(small, feed_forward=True)
    kept = {site.name: len(site.heads) for site in sites}
    found = _measured(args, subject, way, small, batch, latency)
    return {"seconds": seconds, **found, **_kept(sites, kept)}


def _train(subject: Subject, small: nn.Module, seed: int, times: int) -> float:
    """Train with the base model's settings and logits, for so many times its epochs; CPU seconds."""
    assert subject.recipe.train is not None, "all tasks are trained"
    settings = subject.recipe.train.model_dump()
    loader = subject.data.loader("train", settings.pop("batch_size"))
    settings["epochs"] *= times
    start = process_time()
    tune = hp.recovery.Finetune(**settings, distill=1.0, seed=seed)
    with reproducible(resolve_device(subject.recipe.device)):
        hp.recover_(small, loader, tune, subject.model, progress=False)
    small.eval()
    return round(process_time() - start, 1)


def _measured(
    args: argparse.Namespace,
    subject: Subject,
    way: str,
    small: nn.Module,
    batch: Any,
    latency: LatencyTable,
) -> dict[str, Any]:
    """Judge a cut model on test rows, and time it beside the whole one."""
    small = _run_by(way, small, batch)
    value, right = _tested(subject, small)
    judged = {"test": value, **right}
    if args.step == "judge":
        return judged
    return {**_speed(args, subject.model, small, batch, latency.length), **judged}


def _run_by(way: str, model: nn.Module, batch: Any) -> nn.Module:
    """The model as a way runs it."""
    if way != INT8:
        return model
    example = {name: value for name, value in batch.items() if name != "labels"}
    return InInt8(model, example)


def _speed(
    args: argparse.Namespace, whole: nn.Module, small: nn.Module, batch: Any, length: int
) -> dict[str, float]:
    """How many times as fast as the whole model, in interleaved rounds, with an interval."""
    (speed,) = hp.bench.compare_latency(
        _timed(whole, args.dtype),
        _timed(small, args.dtype),
        partial(hp.bench.shaped_batch, batch),
        [args.batch],
        [length],
        seconds=args.seconds,
    )
    return {"ratio": speed.ratio, "low": speed.low, "high": speed.high}


def _tested(subject: Subject, model: nn.Module) -> tuple[float, dict[str, str]]:
    """The metric of test rows, and which were right where that is what it counts."""
    if subject.recipe.task not in ("text_classification", "image_classification"):
        return tested(subject, model)[1], {}
    quality = subject.judge(model, "test")
    return quality.value, studies.packed(np.array(quality.amounts))


def _kept(sites: Sequence[hp.AttentionSite], kept: Mapping[str, int]) -> dict[str, list[int]]:
    """Heads and neurons that each layer keeps."""
    return {
        "heads": [kept[site.name] for site in sites if not site.is_feed_forward],
        "neurons": [kept[site.name] for site in sites if site.is_feed_forward],
    }


def _timed(model: nn.Module, dtype: str) -> nn.Module:
    """The model in the dtype in which it is timed, a copy where that is not its own."""
    wanted = getattr(torch, dtype)
    if next(model.parameters()).dtype == wanted:
        return model
    return copy.deepcopy(model).to(wanted)


def _latency(
    args: argparse.Namespace, model: nn.Module, batch: Any, sites: Sequence[hp.AttentionSite]
) -> LatencyTable:
    """The task's latency table, measured at the first time."""
    path = _timed_file(args, "latency")
    if path.is_file():
        return LatencyTable.load(path)
    found = hp.bench.latency_table(
        _timed(model, args.dtype),
        batch,
        batch_size=args.batch,
        # An image has a length of its own.
        length=args.length if "input_ids" in batch else None,
        sites=sites,
        seconds=6 * args.seconds,
    )
    found.save(path)
    return found


def _layer(args: argparse.Namespace, model: nn.Module, batch: Any, latency: LatencyTable) -> float:
    """Seconds of one layer of the task's model, measured at the first time."""
    path = _timed_file(args, "layer")
    if path.is_file():
        seconds: float = json.loads(path.read_text())["seconds"]
        return seconds
    seconds = layer_seconds(
        model, latency, lambda small: _speed(args, model, small, batch, latency.length)["ratio"]
    )
    write_atomic(path, json.dumps({"seconds": seconds}).encode())
    return seconds


def _timed_file(args: argparse.Namespace, what: str) -> Path:
    """Where something is kept that was timed for the task.

    Raises:
        SystemExit: step ``judge``, and it is not there.
    """
    # Step `judge` may run elsewhere; what is timed is timed on a CPU then.
    usual = args.step == "judge" or (args.device, args.dtype) == ("cpu", "float32")
    where = "" if usual else f"-{args.device}-{args.dtype}"
    path: Path = args.tables / f"{what}-{args.task}-{args.batch}x{args.length}{where}.json"
    if args.step == "judge" and not path.is_file():
        raise SystemExit(f"--tables: must hold {path.name}; make it by --step table.")
    return path


# ----------------------------------------------------------------------------------------------
# steps on two machines


def _untrained(args: argparse.Namespace, tuned: int) -> tuple[Subject, Any]:
    """The task's model as it is before its training, which has the same speed, and a batch."""
    recipe = recipe_of(args, tuned)
    journal = Journal(recipe.name, recipe.model_dump(), None, lambda line: None, progress=False)
    subject = prepare_subject(recipe, journal, train=False)
    return subject, subject.data.batches("calibration", args.batch)[0]


def measure_table(args: argparse.Namespace) -> Path:
    """Measure the latency table and the seconds of a layer; return the table's path."""
    subject, batch = _untrained(args, args.tuned[0])
    sites = hp.find_sites(subject.model, feed_forward=True)
    latency = _latency(args, subject.model, batch, sites)
    seconds = _layer(args, subject.model, batch, latency)
    print(f"{args.task}: {1e3 * latency.whole:.1f} ms, of which a layer {1e3 * seconds:.1f} ms")
    return _timed_file(args, "latency")


def add_times(args: argparse.Namespace, out: Path, over: Callable[[], bool]) -> Path:
    """Time the rows that were judged elsewhere, each shape as one; return the record's path.

    A slow spell of the machine shall meet a part of each model only, so all are timed in turns. A
    row keeps the turns that it has had, until the median of them is its speed.
    """
    # 1. Rows of one shape have one speed.
    record = json.loads(out.read_text())
    of_shape: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        if "ratio" not in row:
            of_shape.setdefault(shape_of(row), []).append(row)
    if not of_shape:
        return out

    # 2. A model of each shape.
    args.batch, args.dtype = record["batch"], record["dtype"]
    subject, batch = _untrained(args, args.tuned[0])
    models = {}
    for shape, (row, *_) in of_shape.items():
        small = _of_shape(subject.model, row["heads"], row["neurons"])
        models[shape] = _run_by(row["way"], small, batch)

    # 3. The turns. An earlier run may have begun them.
    record["timed"] = {"hardware": hardware(resolve_device(args.device)), "versions": versions()}
    for number in range(TURNS):
        for shape, (first, *_) in of_shape.items():
            turns = first.setdefault("turns", [])
            if len(turns) > number:
                continue
            if over():
                return out
            turns.append(_speed(args, subject.model, models[shape], batch, first["length"]))
            studies.keep(record, out)

    # 4. The median turn.
    for rows_of_shape in of_shape.values():
        speeds = sorted(rows_of_shape[0].pop("turns"), key=lambda speed: speed["ratio"])
        for row in rows_of_shape:
            row.update(speeds[TURNS // 2], timed=studies.stamp())
            print(row["draw"], row["way"], row["asked"], f"{row['ratio']:.3f}", flush=True)
    studies.keep(record, out)
    return out


def add_shapes(args: argparse.Namespace, out: Path, over: Callable[[], bool]) -> Path:
    """Time the first draw's cuts of heads and neurons at other batch sizes and lengths, in fp32;
    return the record's path."""
    record = json.loads(out.read_text())
    subject, batch = _untrained(args, args.tuned[0])
    cuts = {asked: rows[0] for asked, rows in by_speed(record, BOTH).items()}
    lengths = LENGTHS if "input_ids" in batch else [next(iter(cuts.values()))["length"]]
    there = record.setdefault("shapes", {"rows": []})
    there |= {"hardware": hardware(resolve_device(args.device)), "versions": versions()}
    done = {(row["asked"], row["batch"], row["length"]) for row in there["rows"]}
    args.dtype = "float32"
    for asked, row in cuts.items():
        small = _of_shape(subject.model, row["heads"], row["neurons"])
        for length, examples in itertools.product(lengths, BATCHES):
            if (asked, examples, length) in done:
                continue
            if over():
                return out
            args.batch = examples
            cell = {"asked": asked, "batch": examples, "length": length}
            there["rows"].append({**cell, **_speed(args, subject.model, small, batch, length)})
            studies.keep(record, out)
            print(there["rows"][-1], flush=True)
    return out


def _of_shape(whole: nn.Module, heads: Sequence[int], neurons: Sequence[int]) -> nn.Module:
    """A model with so many heads and neurons in each of its layers; the first of each."""
    small = copy.deepcopy(whole)
    first_layers_(small, len(heads))
    sites = hp.find_sites(small, feed_forward=True)
    # Attention and feed-forwards come in the order of the layers.
    counted = {False: iter(heads), True: iter(neurons)}
    keep = {site.name: list(range(next(counted[site.is_feed_forward]))) for site in sites}
    counts = {site.name: site.n_query_heads for site in sites}
    hp.prune_(small, hp.HeadMask.from_keep(keep, counts), sites=sites)
    return small


if __name__ == "__main__":
    studies.leave(main())
