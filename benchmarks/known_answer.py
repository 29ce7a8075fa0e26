"""Which scorers find the heads that are known to be necessary: recall at k of every registered one,
on two models.

    python benchmarks/known_answer.py
    python benchmarks/known_answer.py --scorers taylor leave_one_out --examples 32 --out
    /tmp/known_answer.json

The task is to continue a sequence that repeats (tests/known/induction.py). One model's weights are
written by hand, and its k = 2 necessary heads are known by construction; the other is trained, and
its necessary heads are those whose removal alone costs more than 0.05 accuracy, on examples that no
scorer sees. ``recall`` is the share of the k necessary heads among a scorer's k highest (a tie is a
miss), ``kept`` the accuracy when those k are all that is left, to be read against that of the best
k heads of all. Every scorer has its default settings and the same examples. Writes one JSON record
with the versions used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the models are the tests'

import headprune as hp  # noqa: E402
from headprune import HeadId  # noqa: E402
from headprune.core.errors import HeadPruneError  # noqa: E402
from headprune.core.files import write_atomic  # noqa: E402
from headprune.run.surroundings import git_commit, hardware, versions  # noqa: E402
from headprune.scoring import registry  # noqa: E402
from tests.known.ablation import achieved, costs, heads_of, highest, necessary, recall  # noqa: E402
from tests.known.constructed import NECESSARY, constructed  # noqa: E402
from tests.known.induction import AttentionOnly, Batch, accuracy, examples, loss  # noqa: E402
from tests.known.trained import trained  # noqa: E402

RECORDS = ROOT / "benchmarks" / "records"
SCORED, HELD_OUT = (
    1,
    2,
)  # seeds of the examples that scorers see, and of those that the truth is measured on


#: ``auto`` has no formula of its own: it takes the scores of one of the others.
SCORERS = [name for name in registry.names() if name != "auto"]


def truth(model: AttentionOnly, wanted: tuple[HeadId, ...], batch: Batch) -> dict[str, Any]:
    """What is known about a model."""
    sets = {
        kept: achieved(model, kept, batch) for kept in combinations(heads_of(model), len(wanted))
    }
    best = max(sets, key=lambda kept: sets[kept])
    return {
        "heads": len(heads_of(model)),
        "necessary": list(map(str, wanted)),
        "accuracy": accuracy(model, batch),
        "accuracy of the necessary": sets[wanted],
        "best of as many": {"heads": list(map(str, best)), "accuracy": sets[best]},
        "cost of removal": {
            str(head): round(cost, 4) for head, cost in costs(model, batch).items()
        },
        "chance": len(wanted) / len(heads_of(model)),
    }


def measure(
    name: str, model: AttentionOnly, wanted: tuple[HeadId, ...], seen: Batch, held_out: Batch
) -> dict[str, Any]:
    """One scorer on one model."""
    try:
        scores = hp.score(model, [seen], name, loss=loss, progress=False)
    except HeadPruneError as error:
        return {"refused": str(error)}
    return {
        "recall": recall(scores, wanted),
        "kept": achieved(model, highest(scores, len(wanted)), held_out),
        "values": scores.values,
        "notes": scores.notes,
    }


def table(record: dict[str, Any]) -> str:
    """The record for people."""
    models = record["models"]
    lines = []
    for name, known in models.items():
        best = known["best of as many"]
        lines += [
            (
                f"{name}: accuracy {known['accuracy']:.3f}, of the necessary heads alone"
                f" {known['accuracy of the necessary']:.3f}, of the best {len(best['heads'])} heads"
                f" {best['accuracy']:.3f}"
            ),
            f"  necessary: {', '.join(known['necessary'])} of {known['heads']}",
        ]
    lines += [
        "",
        f"{'scorer':<24}" + "".join(f"{name + ' recall':>20}{'kept':>8}" for name in models),
    ]
    lines.append(
        f"{'(chance)':<24}"
        + "".join(f"{known['chance']:>20.2f}{'':>8}" for known in models.values())
    )

    def key(row: dict[str, Any]) -> list[float]:
        return [-row[name].get("recall", -1.0) for name in models]

    for scorer, row in sorted(record["scorers"].items(), key=lambda item: (key(item[1]), item[0])):
        cells = [row[name] for name in models]
        text = [
            f"{'refused':>28}" if "refused" in c else f"{c['recall']:>20.2f}{c['kept']:>8.3f}"
            for c in cells
        ]
        lines.append(f"{scorer:<24}" + "".join(text))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scorers", nargs="+", default=SCORERS, help="default: all but auto, which takes another's"
    )
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RECORDS / "known_answer.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    seen, held_out = examples(args.examples, SCORED), examples(args.examples, HELD_OUT)
    learned = trained()
    models = {
        "constructed": (constructed(), NECESSARY),
        "trained": (learned, necessary(learned, held_out)),
    }
    record = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "versions": dict(versions()),
        "hardware": hardware(torch.device("cpu")),
        "examples": args.examples,
        "seeds": {"scored": SCORED, "held out": HELD_OUT},
        "models": {
            name: truth(model, wanted, held_out) for name, (model, wanted) in models.items()
        },
        "scorers": {
            scorer: {
                n: measure(scorer, model, wanted, seen, held_out)
                for n, (model, wanted) in models.items()
            }
            for scorer in args.scorers
        },
    }
    write_atomic(args.out, (json.dumps(record, indent=1) + "\n").encode())
    print(table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
