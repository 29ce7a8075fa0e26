"""Selectors that look further than single scores, against the plain order of the scores, by the
loss of unseen rows.

    python benchmarks/selector_loss.py --task sst2 --data path/to/sst2 --work runs/pipelines
    python benchmarks/selector_loss.py --figure        # docs/selector-loss.md, from the records

``quadratic`` and ``global_topk`` choose by the same ``fisher`` scores, ``local_search`` begins with
what the latter chooses by ``taylor``, and ``surgeon``'s order stands beside them. Nothing is
refitted: the loss is that of the masked model on validation rows, which no choice has seen. Tasks,
models and draws of calibration rows are those of ``pipelines.py``; a row is written as soon as it
is there, and a run that is started again goes on after the last one.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.core.paired import Answers, paired_drops
from headprune.run.surroundings import git_commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from encoder_tasks import TITLES, Task, encoder_task
from pages import publish
from pipelines import MEASURED, scorer, select
from studies import RECORDS, spread

PAGE = "selector-loss.md"
#: Scorer and selector, and the pair that it is to beat.
PAIRS: dict[tuple[str, str], tuple[str, str] | None] = {
    ("fisher", "global_topk"): None,
    ("fisher", "quadratic"): ("fisher", "global_topk"),
    ("taylor", "global_topk"): None,
    ("taylor", "local_search"): ("taylor", "global_topk"),
    ("surgeon", "global_topk"): None,
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = studies.parser(__doc__, "selector-loss", TITLES, [24])
    parser.add_argument(
        "--epochs", type=float, help="of fine-tuning; default 2 for SST-2, 1 for TREC"
    )
    return studies.parsed(parser, argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or writes the page; returns the path that was
    written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    task = encoder_task(args.task, args.data, args.model, args.work, args.calibration, args.epochs)
    out: Path = args.out or RECORDS / f"selector-loss-{args.task}.json"
    base = evaluate(task.model, task.judged["validation"], task.loss)
    same: dict[str, Any] = {
        "benchmark": "selector_loss",
        "task": args.task,
        "weights": studies.weights_of(task.model),
        "calibration": args.calibration,
        "heads": sum(len(site.heads) for site in hp.find_sites(task.model)),
        "judged": {"rows": "validation", "n": base.n_examples, "loss": base.loss},
    }
    record = studies.begun(out, same, torch.device("cpu"), git_commit=git_commit())
    for row in missing(args, task, record["rows"]):
        record["rows"].append(row)
        studies.keep(record, out)
        print(row["scorer"], row["selector"], row["kept"], row["seed"], row["loss"], flush=True)
    print(out)
    return out


def missing(
    args: argparse.Namespace, task: Task, rows: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What the record lacks, one draw after the other; every row has the losses of its examples."""
    done = {(row["scorer"], row["selector"], row["kept"], row["seed"]) for row in rows}
    for seed in range(args.seeds):
        wanted = [
            (*pair, kept)
            for pair in PAIRS
            for kept in args.budgets
            if (*pair, kept, seed) not in done
        ]
        batches = task.calibration(seed) if wanted else []
        scores: dict[str, hp.HeadScores] = {}
        for by, selector, kept in wanted:
            if by not in scores:
                scores[by] = task.score(batches, scorer(by, seed))
            start = perf_counter()
            plan = select(task, scores[by], kept, selector, batches)
            seconds = round(perf_counter() - start, 2)
            with hp.gated(task.model, plan):
                found = evaluate(task.model, task.judged["validation"], task.loss)
            losses = [round(loss, 5) for loss in found.losses]
            row = {
                "scorer": by,
                "selector": selector,
                "kept": kept,
                "seed": seed,
                "loss": found.loss,
            }
            yield {
                **row,
                "seconds": seconds,
                "notes": list(plan.notes),
                "losses": losses,
                **studies.stamp(),
            }


def draw(records: Path, docs: Path) -> Path:
    """Writes the page from every record there is."""
    text = page(studies.records_in(records, "selector-loss"))
    return publish(docs / PAGE, lead(text), text)


def lead(text: str) -> str:
    """What was found, and for whom, from the differences of the page."""
    words = []
    for selector in dict.fromkeys(name for pair, name in PAIRS if PAIRS[pair, name]):
        rows = re.findall(rf"\| `{selector}` \|.* \S+ \[(\S+), (\S+)\] \|$", text, re.MULTILINE)
        lower = sum(float(high) < 0 for _, high in rows)
        higher = sum(float(low) > 0 for low, _ in rows)
        words.append(f"`{selector}`: lower {lower}, higher {higher} of {len(rows)} times")
    return (
        "For those who ask whether a selector that weighs heads against each other is worth its"
        " time. Loss on unseen rows beside plain `global_topk` by the same scorer, counted where the"
        f" 95 % interval excludes zero. {'; '.join(words)}. Nothing was refitted."
    )


def page(records: list[dict[str, Any]]) -> str:
    """Markdown; every number is computed from the records."""
    lines = [
        "# Selectors that look further than single scores",
        "",
        (
            "Written by `python benchmarks/selector_loss.py --figure` from records in"
            " `benchmarks/records`; do not edit."
        ),
        "",
        (
            "Mean loss on validation rows, which no choice has seen; masked, nothing refitted; mean"
            " ± standard deviation"
        ),
        (
            "over draws of calibration rows. A difference is from `global_topk` by the same scorer,"
            " mean over draws, with"
        ),
        (
            "its 95 % interval of a bootstrap over examples. `local_search` measures at most"
            f" {MEASURED} plans, on every"
        ),
        "fourth batch of the calibration rows.",
    ]
    for record in records:
        judged = record["judged"]
        lines += [
            "",
            f"## {TITLES[record['task']].partition(',')[0]}: {judged['n']} validation rows",
            "",
            (
                f"All {record['heads']} heads: {judged['loss']:.4f}. {record['calibration']}"
                " calibration rows."
            ),
            "",
            "| scorer | selector | kept | draws | loss | difference |",
            "| --- | --- | ---: | ---: | ---: | ---: |",
        ]
        for kept in sorted({row["kept"] for row in record["rows"]}, reverse=True):
            for pair, plain in PAIRS.items():
                draws = by_draw(record, pair, kept)
                if draws:
                    loss = spread([statistics.fmean(losses) for losses in draws.values()], 4)
                    told = difference(draws, by_draw(record, plain, kept)) if plain else "-"
                    lines.append(
                        f"| `{pair[0]}` | `{pair[1]}` | {kept} | {len(draws)} | {loss} | {told} |"
                    )
    return "\n".join(lines) + "\n"


def by_draw(record: dict[str, Any], pair: tuple[str, str], kept: int) -> dict[int, list[float]]:
    """Losses of examples, by draw."""
    rows = record["rows"]
    return {
        r["seed"]: r["losses"]
        for r in rows
        if (r["scorer"], r["selector"], r["kept"]) == (*pair, kept)
    }


def difference(draws: dict[int, list[float]], plain: dict[int, list[float]]) -> str:
    """Mean over the draws of both, and its interval."""
    both = sorted(draws.keys() & plain.keys())
    if not both:
        return "-"
    mine, other = (np.mean([of[seed] for seed in both], axis=0) for of in (draws, plain))
    (drop,) = paired_drops(_losses(other), [_losses(mine)])
    return f"{drop.value:+.4f} [{drop.low:+.4f}, {drop.high:+.4f}]"


def _losses(values: Any) -> Answers:
    return Answers("loss", values, np.ones_like(values))


if __name__ == "__main__":
    main()
