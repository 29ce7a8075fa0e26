"""Learned gates against one-shot scores at equal training steps: the same steps, spent before or
while heads close.

    python benchmarks/learned_gates.py --task sst2 --data path/to/sst2 --work runs/scorers
    python benchmarks/learned_gates.py --figure      # docs/learned-gates.md, from the records

MiniLM (or ``--model``), fine-tuned as in ``scorers.py``, is brought to so many heads in two ways,
each with S training steps of the same batches, optimizer and schedule:

- one-shot: score the heads on training rows (``taylor``, ``fisher``, ``random``), cut all but the
  best, train S steps;
- learned: train S steps with gates on every head (``hard_concrete`` to a target, ``subset_topk``),
  cut all but the heads of the largest weights, train no more. Gates have a learning rate of their
  own.

The whole model trains S steps, too, so that what training brings is not taken for what a choice of
heads brings.

Accuracy is measured on rows that neither training nor scoring has seen; nothing is chosen on them.
A seed is another draw of calibration rows, another order of batches and other noise. Every row of
the record is written as soon as it is there; a run that is started again goes on after the last
one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import studies
from pages import publish
from scorers import TASKS, TITLES, begin, configured, drawn, prepared
from studies import RECORDS, spread

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.data.datasets import Data
from headprune.gating import GateDistribution, HardConcrete, SubsetTopk
from headprune.model.losses import default_loss
from headprune.model.running import device_of, to_device

PAGE = "learned-gates.md"
ONE_SHOT, LEARNED = ("taylor", "fisher", "random"), ("hard_concrete", "subset_topk")
#: The whole model, trained as long: nothing is cut.
WHOLE = "all heads"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = studies.parser(__doc__, "learned-gates", TASKS, [36, 24, 14])
    studies.add_device(parser)
    parser.add_argument(
        "--epochs", type=float, default=1.0, help="of the fine-tuning that both ways begin with"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=[*ONE_SHOT, *LEARNED], default=[*ONE_SHOT, *LEARNED]
    )
    parser.add_argument("--steps", type=int, default=500, help="training steps of either way, S")
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate of the weights")
    parser.add_argument("--gate-rate", type=float, default=0.05, help="learning rate of the gates")
    return studies.parsed(parser, argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or writes the page; returns the path that was
    written."""
    args = arguments(argv)
    if args.figure:
        return write_page(args.records, args.docs)
    model, data, rows = prepared(args)
    out: Path = args.out or RECORDS / f"learned-gates-{args.task}.json"
    record = opened(args, model, data, rows, out)
    done = {(row["method"], row["kept"], row["seed"]) for row in record["rows"]}
    wanted = [
        (WHOLE, record["heads"]),
        *((method, kept) for kept in args.budgets for method in args.methods),
    ]
    for (method, kept), seed in itertools.product(wanted, range(args.seeds)):
        if (method, kept, seed) in done:
            continue
        row = measured(model, data, rows, method, kept, seed, args)
        record["rows"].append(row)
        studies.keep(record, out)
        print(
            f"{method:14} {kept:3} {seed:2} {row['seconds']:7.1f} s  {row['accuracy']:.4f}",
            flush=True,
        )
    print(out)
    return out


def opened(
    args: argparse.Namespace, model: nn.Module, data: Data, rows: list[Any], out: Path
) -> dict[str, Any]:
    """The record of ``scorers.begin``, which also refuses one that was made with other training."""
    record = begin(args, model, data, rows, out, "learned_gates")
    training = {
        "steps": args.steps,
        "rate": args.rate,
        "gate_rate": args.gate_rate,
        "calibration": args.calibration,
    }
    if record.setdefault("training", training) != training:
        raise SystemExit(
            f"{out} is the record of another training, {record['training']}: give another --out."
        )
    return record


def measured(
    base: nn.Module,
    data: Data,
    rows: list[Any],
    method: str,
    kept: int,
    seed: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One way to so many heads, with one seed."""
    start, model, data = perf_counter(), copy.deepcopy(base), data.redrawn(args.calibration, seed)
    before: float | None = None
    notes: list[str] = []
    if method == WHOLE:
        train_(model, data, args, seed)
    elif method in ONE_SHOT:
        calibration = drawn(data, args.calibration, args.calibration, seed)
        scores = hp.score(model, calibration, configured(method, seed), progress=False)
        cut_(model, scores, kept)
        before, notes = evaluate(model, rows).value, list(scores.notes)
        train_(model, data, args, seed)
    else:
        scores = train_(model, data, args, seed, distribution(method, kept, args.steps))
        cut_(model, scores, kept)
        notes = list(scores.notes)
    return {
        "method": method,
        "kept": kept,
        "seed": seed,
        "accuracy": evaluate(model, rows).value,
        "untrained": before,
        "heads": [len(site.heads) for site in hp.find_sites(model)],
        "notes": notes,
        "seconds": perf_counter() - start,
        **studies.stamp(),
    }


def distribution(method: str, kept: int, steps: int) -> GateDistribution:
    """Gates that reach the budget in time: the last quarter of the steps is trained at it."""
    if method == "hard_concrete":
        return HardConcrete(keep=kept, warmup=max(1, steps // 2))
    return SubsetTopk(keep=kept, steps=max(1, 3 * steps // 4))


def cut_(model: nn.Module, scores: hp.HeadScores, kept: int) -> None:
    hp.prune_(model, hp.select(scores, hp.Budget(keep_heads=kept), "global_topk"))


def train_(
    model: nn.Module,
    data: Data,
    args: argparse.Namespace,
    seed: int,
    gates: GateDistribution | None = None,
) -> Any:
    """S steps of AdamW with a linear schedule on the weights, and on gates if there are any;
    returns their scores."""
    torch.manual_seed(seed)
    if gates is None:
        _steps(model, data, args, [])
        return None
    with hp.learned_gates(model, gates, seed=seed) as learned:
        _steps(model, data, args, [learned])
        return learned.scores()


def _steps(model: nn.Module, data: Data, args: argparse.Namespace, learned: list[Any]) -> None:
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": args.rate}]
    groups += [
        {"params": list(g.parameters()), "lr": args.gate_rate, "weight_decay": 0.0} for g in learned
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    falls = [
        lambda step: min(1.0, 10 * (step + 1) / args.steps) * (1 - step / args.steps),
        lambda step: 1.0,
    ]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, falls[: len(groups)])
    model.train()
    for _, batch in zip(range(args.steps), _batches(data), strict=False):
        loss: Tensor = default_loss(model, to_device(batch, device_of(model))).mean()
        for g in learned:
            loss = loss + g.penalty()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def _batches(data: Data) -> Iterator[Any]:
    loader = data.loader("train", 32)
    while True:
        yield from loader


# ----------------------------------------------------------------------------------------------
# page


def write_page(records: Path, docs: Path) -> Path:
    """Writes the page from every record there is."""
    found = studies.records_in(records, "learned-gates")
    return publish(docs / PAGE, lead(found), page(found))


def lead(records: list[dict[str, Any]]) -> str:
    """What was found, and for whom."""
    words = []
    for record in records:
        kept = min(record["budgets"])
        rows = [row for row in record["rows"] if row["kept"] == kept]
        accuracies: dict[str, list[float]] = {}
        for row in rows:
            accuracies.setdefault(row["method"], []).append(row["accuracy"])
        ranked = sorted(accuracies, key=lambda name: -statistics.fmean(accuracies[name]))
        shown = ", ".join(f"`{name}` {spread(accuracies[name])}" for name in ranked)
        task = TITLES[record["task"]].partition(",")[0]
        words.append(f"{task}, {kept} of {record['heads']} heads kept: {shown}.")
    return (
        "For those who ask whether gates that are trained choose better heads than scores do"
        f" ({', '.join(f'`{name}`' for name in LEARNED)} are trained). Accuracy after equally many"
        f" training steps, best first. {' '.join(words)}"
    )


def page(records: list[dict[str, Any]]) -> str:
    """Markdown; every number is computed from the records."""
    lines = [
        "# Learned gates against one-shot scores",
        "",
        (
            "Written by `python benchmarks/learned_gates.py --figure` from the records in"
            " `benchmarks/records`; do not"
        ),
        (
            "edit. Both ways train equally many steps from the same fine-tuned model: one-shot"
            " scores cut first and train"
        ),
        (
            "the cut model, learned gates train with all heads and are cut in the end; the whole"
            " model trains as long."
        ),
        (
            "Accuracy on rows that nothing was chosen on, mean ± standard deviation over seeds; in"
            " brackets what one-shot"
        ),
        "scores have before their training.",
    ]
    for record in records:
        judged, training = record["judged"], record["training"]
        whole = [row["accuracy"] for row in record["rows"] if row["method"] == WHOLE]
        error = (judged["accuracy"] * (1 - judged["accuracy"]) / judged["n"]) ** 0.5
        lines += [
            "",
            f"## {TITLES[record['task']]}",
            "",
            (
                f"{training['steps']} steps of 32 examples; judged on {judged['n']}"
                f" {judged['rows']} rows; accuracy of the whole model, with {record['heads']}"
                f" heads, before them {judged['accuracy']:.3f} ± {error:.3f} (standard error of"
                " that many rows)."
            ),
            *(
                [f"The whole model after {training['steps']} steps: {spread(whole)}."]
                if whole
                else []
            ),
            "",
            "| method | seeds | " + " | ".join(f"{kept} kept" for kept in record["budgets"]) + " |",
            "| --- | ---: |" + " ---: |" * len(record["budgets"]),
        ]
        for method in dict.fromkeys(
            row["method"] for row in record["rows"] if row["method"] != WHOLE
        ):
            of = [row for row in record["rows"] if row["method"] == method]
            cells = [
                _cell([row for row in of if row["kept"] == kept]) for kept in record["budgets"]
            ]
            seeds = len({row["seed"] for row in of})
            lines.append(f"| `{method}` | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    before = [row["untrained"] for row in rows if row["untrained"] is not None]
    return spread([row["accuracy"] for row in rows]) + (
        f" ({statistics.fmean(before):.3f})" if before else ""
    )


if __name__ == "__main__":
    main()
