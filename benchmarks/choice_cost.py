"""Measure what ``auto`` costs beside the scorers that it tries, interleaved in one process.

    python benchmarks/choice_cost.py --task hwu64 --data path/to/data --work runs/regret
    python benchmarks/choice_cost.py --task hwu64 ... --sketches 8
    python benchmarks/choice_cost.py --figure           # docs/choice-cost.md, from the records

Every round times each way once, in CPU seconds of the process, so that other processes count
little. The ways are single scorers, all candidates of `auto` together (they share their passes),
one refit by `lstsq`, and `auto` as a whole. Memory is the peak of what tensors take beyond weights
and batches, with fewer rows, by torch's profiler. With ``--sketches``, prices of `surgeon` by few
backward passes are compared with those by one pass per class, which are exact.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import headprune as hp
from headprune.choice.auto import DEFAULT, Auto
from headprune.recovery.lstsq import Lstsq
from headprune.run.surroundings import git_commit
from headprune.scoring.surgeon import Surgeon

sys.path.insert(0, str(Path(__file__).resolve().parent))
import regret
import scoring_cost
import studies
from pages import publish, table

PAGE = "choice-cost.md"
#: Numbers of backward passes of `surgeon` that are compared with one per class; 4 is its default.
SKETCHES = (1, 2, 4, 8)
TITLES = {
    "taylor": "`taylor`",
    "surgeon": "`surgeon`",
    "surgeon, logits": '`surgeon`, `curvature="logits"`',
    "candidates": "the five candidates of `auto`, which share their passes",
    "refit": "one refit by `lstsq` with the feed-forwards",
    "auto": "`auto`: the candidates, and each distinct plan cut, refitted and judged twice",
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    found = studies.parser(__doc__, "choice-cost", regret.TASKS, [])
    found.set_defaults(calibration=256)
    found.add_argument("--share", type=float, default=1 / 3, help="share of heads kept")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--memory-rows", type=int, default=32)
    found.add_argument(
        "--sketches", type=int, default=0, help="draws of rows and seeds to compare prices on"
    )
    found.add_argument("--set", nargs="+", default=[], help="settings of the recipe")
    studies.add_minutes(found)
    return studies.parsed(found, argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Add the rounds that the record lacks, or write the page; return the path written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    over = studies.clock(args)
    regret.quiet()
    out: Path = args.out or studies.RECORDS / f"choice-cost-{args.task}.json"
    same = {"benchmark": "choice-cost", "task": args.task, "calibration": args.calibration}
    record = studies.begun(out, same, torch.device("cpu"), git_commit=git_commit())
    for row in studies.added(record, rows(args, record), over, out):
        print(row, flush=True)
    print(out)
    return out


def rows(args: argparse.Namespace, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the record lacks: rounds of CPU seconds, then one row of memory."""
    done = {(row["what"], row["round"]) for row in record["rows"]}
    wanted = [("seconds", number) for number in range(args.rounds)] + [("memory", 0)]
    wanted += [("sketch", number) for number in range(args.sketches)]
    wanted = [one for one in wanted if one not in done]
    if not wanted:
        return
    subject = regret.opened(args, 0)
    for what, number in wanted:
        count = args.memory_rows if what == "memory" else args.calibration
        drawn = replace(subject, data=subject.data.redrawn(count, number))
        row: dict[str, Any] = {"what": what, "round": number, "share": args.share, "n_rows": count}
        if what == "sketch":
            yield {**row, "draws": sketched(drawn, args.share, number), **studies.stamp()}
            continue
        for name, run in in_turn(ways(drawn, args.share), number):
            if what == "seconds":
                start = process_time()
                run()
                row[name] = process_time() - start
            else:
                row[name] = scoring_cost.peak(run, torch.device("cpu"))
        yield {**row, **studies.stamp()}


def sketched(subject: Any, share: float, seed: int) -> dict[str, dict[str, float]]:
    """Compare prices of `surgeon` by few backward passes with the exact ones.

    Args:
        subject: A classifier with its rows.
        share: Of the heads that a plan keeps.
        seed: Of the sketches.

    Returns:
        By the number of passes: the median of a price's relative error (``off``) and of its
        standard error over examples (``error``), the rank correlation, and how many heads the plan
        has that the exact one has not (``other``).
    """
    batches = subject.data.of_like_length("calibration", subject.recipe.score.batch_size)

    def priced(draws: int) -> Any:
        scorer = Surgeon(draws=draws, seed=seed)
        return hp.score(subject.model, batches, scorer, sites=subject.sites, progress=False)

    budget = hp.Budget(keep_heads=share)
    exact = priced(int(subject.model.config.num_labels))
    prices = np.concatenate(exact.values)
    kept = hp.select(exact, budget).mask
    found = {}
    for draws in SKETCHES:
        scores = priced(draws)
        values = np.concatenate(scores.values)
        found[str(draws)] = {
            "off": float(np.median(np.abs(values - prices) / prices)),
            "error": float(np.median(np.concatenate(scores.standard_errors) / values)),
            "rank": float(spearmanr(values, prices).statistic),
            "other": (hp.select(scores, budget).mask - kept).n_kept,
        }
    return found


def ways(subject: Any, share: float) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name."""
    batches = subject.data.of_like_length("calibration", subject.recipe.score.batch_size)
    model, sites = subject.model, subject.sites

    def score(scorers: Any) -> Callable[[], Any]:
        return lambda: hp.score(model, batches, scorers, sites=sites, progress=False)

    plan = hp.select(score("taylor")(), hp.Budget(keep_heads=share))

    def refit() -> None:
        small = copy.deepcopy(model)
        hp.prune_(small, plan, sites=sites)
        hp.recover_(small, batches, Lstsq(feed_forward=True), model)

    return {
        "taylor": score("taylor"),
        "surgeon": score("surgeon"),
        "surgeon, logits": score(Surgeon(curvature="logits")),
        "candidates": score(Auto(candidates=DEFAULT).scorers),
        "refit": refit,
        "auto": score(Auto(keep=share)),
    }


def in_turn(
    ways: dict[str, Callable[[], Any]], number: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the ways; each round begins with another one."""
    names = list(ways)
    start = number % len(names)
    for name in names[start:] + names[:start]:
        yield name, ways[name]


# ------------------------------------------------------------------------------------------- page


def draw(records: Path, docs: Path) -> Path:
    """Write the page from every record there is."""
    found = studies.records_in(records, "choice-cost")
    return publish(docs / PAGE, lead(found), page(found))


def lead(records: Sequence[dict[str, Any]]) -> str:
    """What was found, and for whom."""
    return (
        "For those who ask whether `auto` is worth waiting for. It scores with several scorers, and"
        f" cuts, refits and measures a model for each. {in_short(records)} To save that time, name"
        " a [scorer](scorers.md)."
    )


def how_to(records: Path) -> str:
    """The block of docs/how-to.md."""
    return f"  {in_short(studies.records_in(records, 'choice-cost'))}"


def in_short(records: Sequence[dict[str, Any]]) -> str:
    """A sentence per task."""
    words = []
    for record in records:
        timed = [row for row in record["rows"] if row["what"] == "seconds"]
        auto, surgeon = (
            statistics.median(row[name] / row["taylor"] for row in timed)
            for name in ("auto", "surgeon")
        )
        words.append(
            f"On {regret.TITLES[record['task']]}, `auto` took {auto:.0f} times the CPU time of"
            f" `taylor`, `surgeon` {surgeon:.1f} times."
        )
    return " ".join(words)


def page(records: Sequence[dict[str, Any]]) -> str:
    """docs/choice-cost.md."""
    lines = [
        "# What `auto` costs",
        "",
        "Written by `python benchmarks/choice_cost.py --figure` from the records; do not edit.",
        "",
        "CPU seconds of one process on one thread, median over rounds in turn; the ratio is the",
        "median of the rounds' ratios. Memory is the peak of what tensors take beyond weights and",
        "batches, with fewer rows. `auto` refits on half of the rows, so its peak may be below that of",
        "one refit on all.",
    ]
    for record in records:
        lines += ["", *_table(record)]
    return "\n".join([*lines, "", *studies.no_gpu(r["hardware"] for r in records)]) + "\n"


def _table(record: dict[str, Any]) -> list[str]:
    timed = [row for row in record["rows"] if row["what"] == "seconds"]
    measured = [row for row in record["rows"] if row["what"] == "memory"]
    lines = [
        f"## {regret.TITLES[record['task']]}",
        "",
        f"{record['calibration']} rows, {len(timed)} rounds, {timed[0]['share']:.0%} of the heads"
        f" kept; {record['hardware']['processor']}.",
        "",
        "| what | CPU seconds | times `taylor` | times `surgeon` | peak memory |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, title in TITLES.items():
        seconds = statistics.median(row[name] for row in timed)
        to_taylor = statistics.median(row[name] / row["taylor"] for row in timed)
        to_surgeon = statistics.median(row[name] / row["surgeon"] for row in timed)
        peak = f"{measured[0][name] / 2**20:,.0f} MiB" if measured else "-"
        lines.append(f"| {title} | {seconds:.1f} | {to_taylor:.1f} | {to_surgeon:.1f} | {peak} |")
    if measured:
        lines += ["", f"Peak memory with {measured[0]['n_rows']} rows."]
    return [*lines, *_sketch_lines(record)]


def _sketch_lines(record: dict[str, Any]) -> list[str]:
    """Return how far `surgeon` with few backward passes is from one pass per class."""
    rows = [row for row in record["rows"] if row["what"] == "sketch"]
    if not rows:
        return []
    lines = [
        "",
        "`surgeon` needs a backward pass per class for its exact prices, and takes 4 random groups",
        f"of classes by default. Against the exact prices, mean over {len(rows)} draws of rows and",
        "groups: the median error of a price, its standard error over examples, the correlation of",
        f"ranks, and heads in which the two plans ({rows[0]['share']:.0%} kept) differ:",
        "",
    ]
    body = []
    for draws in rows[0]["draws"]:
        off, error, rank, other = (
            statistics.fmean(row["draws"][draws][name] for row in rows)
            for name in ("off", "error", "rank", "other")
        )
        body.append([draws, f"{off:.1%}", f"{error:.0%}", f"{rank:.3f}", f"{other:.1f}"])
    head = ["backward passes", "off by", "standard error", "rank correlation", "other heads kept"]
    return [*lines, *table(head, body, left=0)]


if __name__ == "__main__":
    studies.leave(main())
