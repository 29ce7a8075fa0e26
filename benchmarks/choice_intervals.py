"""Check the margin that ``auto`` states: is the candidate that it took really that close to the best?

    python benchmarks/choice_intervals.py --work runs/regret
    python benchmarks/choice_intervals.py --figure      # docs/choice-intervals.md, from the record

Each resample draws calibration rows anew, and `auto` judges its candidates with them. The truth is
measured on all train rows that were not drawn, with the same refitted models: by how much the loss
of the candidate that `auto` took exceeds that of the best candidate. The margin should be at least
that in 95 % of the resamples. A run that is started again goes on after the last resample.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import nn

import headprune as hp
from headprune.choice.auto import Auto
from headprune.core.choice import RANDOM, Choice, candidate_name
from headprune.model.losses import default_loss, shaped_losses
from headprune.run.surroundings import git_commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import regret
import studies
from pages import publish

PAGE = "choice-intervals.md"
#: Heads kept.
SHARES = (1 / 3, 14 / 72)
#: Rows of a batch when the truth is measured.
POOL_BATCH = 256


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    found = studies.parser(__doc__, "choice-intervals", regret.TASKS, [])
    found.set_defaults(calibration=128, task="digits", data=Path("data"))
    found.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    found.add_argument("--resamples", type=int, default=200)
    found.add_argument("--set", nargs="+", default=[], help="settings of the recipe")
    studies.add_minutes(found)
    return studies.parsed(found, argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Add the resamples that the record lacks, or write the page; return the path written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    over = studies.clock(args)
    regret.quiet()
    out: Path = args.out or studies.RECORDS / f"choice-intervals-{args.task}.json"
    same = {
        "benchmark": "choice-intervals",
        "task": args.task,
        "calibration": args.calibration,
    }
    record = studies.begun(out, same, torch.device("cpu"), git_commit=git_commit())
    for _ in studies.added(record, rows(args, record), over, out):
        pass  # the counts below say enough
    for share, (n, within) in sorted(counts(record["rows"]).items(), reverse=True):
        print(f"{args.task}, {share:.3f} kept: within the margin {within} of {n}")
    print(out)
    return out


def rows(args: argparse.Namespace, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the record lacks, one row per resample and share."""
    done = {(row["resample"], round(row["share"], 4)) for row in record["rows"]}
    wanted = [
        (resample, share)
        for resample in range(args.resamples)
        for share in args.shares
        if (resample, round(share, 4)) not in done
    ]
    if not wanted:
        return
    subject = regret.opened(args, 0)
    for resample, share in wanted:
        drawn = replace(subject, data=subject.data.redrawn(args.calibration, resample))
        batches = drawn.data.batches("calibration", drawn.recipe.score.batch_size)
        auto = Watched(keep=share, seed=resample, pool=pool_of(drawn))
        scores = hp.score(drawn.model, batches, auto, sites=drawn.sites, progress=False)
        assert scores.choice is not None
        yield {
            "resample": resample,
            "share": share,
            **compared(scores.choice, auto.truth),
            **studies.stamp(),
        }


def pool_of(subject: Any) -> list[dict[str, Any]]:
    """Return the train rows that are not calibration rows, as batches."""
    drawn = {id(example) for example in subject.data.examples["calibration"]}
    others = [row for row in subject.data.examples["train"] if id(row) not in drawn]
    data = replace(subject.data, examples={**subject.data.examples, "pool": others})
    return list(data.batches("pool", POOL_BATCH))


@dataclass(frozen=True)
class Watched(Auto):
    """``auto`` that also measures every refitted model on rows that nobody drew.

    Args:
        pool: Batches of those rows.
        truth: Filled by the call: mean loss on the pool per candidate's name, mean over folds.
    """

    pool: list[dict[str, Any]] = field(default_factory=list, compare=False, repr=False)
    truth: dict[str, float] = field(default_factory=dict, compare=False, repr=False)
    measured: list[float] = field(default_factory=list, compare=False, repr=False)

    def refit_(self, problem: Any, small: nn.Module, batches: list[Any]) -> object:
        done = super().refit_(problem, small, batches)
        with torch.no_grad():
            losses = [
                shaped_losses(default_loss, small.eval(), batch, number)
                for number, batch in enumerate(self.pool)
            ]
        self.measured.append(float(torch.cat(losses).double().mean()))
        return done

    def _plans(self, problem: Any, candidates: Any, estimates: Any) -> Any:
        asked, plans = super()._plans(problem, candidates, estimates)
        self.truth["of"] = [  # type: ignore[assignment]
            (candidate_name(*one), plan.mask) for one, plan in zip(asked, plans, strict=True)
        ]
        return asked, plans

    def _losses(self, problem: Any, folds: Any, masks: Any) -> Any:
        self.measured.clear()
        found = super()._losses(problem, folds, masks)
        # The models come mask by mask, and fold by fold within a mask.
        by_mask = {}
        for number, mask in enumerate(masks):
            of_mask = self.measured[number * folds.count : (number + 1) * folds.count]
            by_mask[mask] = sum(of_mask) / folds.count
        named = self.truth.pop("of")
        for name, mask in named:  # type: ignore[attr-defined]
            if not name.startswith(RANDOM):
                self.truth[name] = by_mask[mask]
        return found


def compared(choice: Choice, truth: dict[str, float]) -> dict[str, Any]:
    """Compare what `auto` stated with the truth."""
    best = min(truth, key=lambda name: truth[name])
    excess = truth[choice.chosen] - truth[best]
    inside = 0
    judged = [one for one in choice.candidates if one.scorer != RANDOM and one is not choice.best]
    for one in judged:
        difference = truth[one.name] - truth[choice.chosen]
        inside += one.low <= difference <= one.high
    return {
        "chosen": choice.chosen,
        "best": best,
        "margin": choice.margin,
        "excess": excess,
        "within": excess <= choice.margin,
        "intervals": len(judged),
        "intervals_right": inside,
        "held_out": {one.name: one.loss for one in choice.candidates},
        "truth": truth,
    }


def counts(found: Sequence[dict[str, Any]]) -> dict[float, tuple[int, int]]:
    """Return resamples, and those within the margin, by share."""
    by_share: dict[float, tuple[int, int]] = {}
    for row in found:
        n, within = by_share.get(row["share"], (0, 0))
        by_share[row["share"]] = (n + 1, within + bool(row["within"]))
    return by_share


# ------------------------------------------------------------------------------------------- page


def draw(records: Path, docs: Path) -> Path:
    """Write the page from every record there is."""
    found = studies.records_in(records, "choice-intervals")
    return publish(docs / PAGE, lead(found), page(found))


def lead(records: Sequence[dict[str, Any]]) -> str:
    """What was found, and for whom."""
    pairs = [pair for record in records for pair in counts(record["rows"]).values()]
    n, within = (sum(column) for column in zip(*pairs, strict=True))
    models = "one model and budget" if len(pairs) == 1 else f"{len(pairs)} models and budgets"
    return (
        "For those who rely on the last line of the table of `auto`, which bounds what a wrong"
        f" choice can cost at 95 % confidence: of {models}, in {within} of {n} repetitions the true"
        " cost was within that bound."
    )


def page(records: Sequence[dict[str, Any]]) -> str:
    """docs/choice-intervals.md."""
    lines = [
        "# Is the margin of `auto` honest?",
        "",
        "Written by `python benchmarks/choice_intervals.py --figure` from the records; do not edit.",
        "",
        "`auto` says by how much the loss of the candidate that it took may exceed that of the best",
        "candidate, at 95 % confidence. Each resample draws the calibration rows anew. The truth is",
        "measured on the train rows that were not drawn, with the same refitted models. The table of",
        "`auto` also has an interval for each other candidate; all of them together should hold in",
        "95 % of the resamples. They hold less often where few rows carry most of the loss: Student's",
        "interval is too short for so skewed a mean. So take `ties` as *not shown to differ*, and a",
        "difference whose interval ends near 0 with caution.",
        "",
        "| model, rows | kept | resamples | within the margin | 95 % interval | took the best"
        " | mean excess | mean margin | all intervals hold | single intervals that hold |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        for share, (n, within) in sorted(counts(record["rows"]).items(), reverse=True):
            some = [row for row in record["rows"] if row["share"] == share]
            interval = binomtest(within, n).proportion_ci(0.95, "exact")
            right = sum(row["truth"][row["chosen"]] == row["truth"][row["best"]] for row in some)
            excess = sum(row["excess"] for row in some) / n
            margin = sum(row["margin"] for row in some) / n
            intervals = sum(row["intervals"] for row in some)
            together = sum(row["intervals_right"] == row["intervals"] for row in some)
            hold = sum(row["intervals_right"] for row in some) / max(1, intervals)
            lines.append(
                f"| {regret.TITLES[record['task']]}, {record['calibration']} rows | {share:.0%}"
                f" | {n} | {within / n:.1%} | {interval.low:.1%} to {interval.high:.1%}"
                f" | {right / n:.0%} | {excess:.4f} | {margin:.4f}"
                f" | {together / n:.0%} | {hold:.1%} of {intervals} |"
            )
    return "\n".join([*lines, "", *studies.no_gpu(r["hardware"] for r in records)]) + "\n"


if __name__ == "__main__":
    studies.leave(main())
