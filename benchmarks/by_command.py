"""What the README's command gives with its own defaults, run as its users run it.

    python benchmarks/by_command.py --model path/to/model --data path/to/data --work runs/by-command

The command is ``headprune prune --model M --data D --speedup S``: once for every speed and draw of
calibration rows, each in a process of its own. Two things are set: the timed batch and length are
those of ``tradeoff.py``, and baselines are left out, on which the result does not depend. A run that
is finished is not made again. The record has a row for each; ``headline.py`` writes the README's
block.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headprune.core.latency import SAVINGS_FACTOR
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from one_budget_page import BOTH
from studies import RECORDS

SPEEDUPS = (2.2, 3.6, 4.3)
#: Of the README's tables.
LENGTH = 128


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="sst2", help="names the record")
    parser.add_argument("--model", type=Path, required=True, help="a fine-tuned model's folder")
    parser.add_argument("--data", type=Path, required=True, help="as the command takes it")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--speedups", type=float, nargs="+", default=list(SPEEDUPS))
    parser.add_argument("--seeds", type=int, default=3, help="draws of calibration rows")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of timed examples")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="as the command's"
    )
    parser.add_argument("--out", type=Path, help="default benchmarks/records/by-command-TASK.json")
    found = parser.parse_args(argv)
    found.out = found.out or RECORDS / f"by-command-{found.task}.json"
    return found


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is not finished, writes the record and returns its path."""
    args = arguments(argv)
    rows: list[dict[str, Any]] = []
    for draw in range(args.seeds):
        for asked in args.speedups:
            out = folder_of(args, asked, draw)
            if not finished(out):
                run(command(args, asked, draw, out))
            record = RunRecord.load(out / "run" / "record.json")
            rows.append({"asked": asked, "draw": draw, "way": BOTH, **row(record, out / "run")})
            print({name: value for name, value in rows[-1].items() if name != "heads"}, flush=True)
            keep(args, record, rows)
    return Path(args.out)


def keep(args: argparse.Namespace, last: RunRecord, rows: list[dict[str, Any]]) -> None:
    """Writes the record, with what all runs have in common."""
    (refit,) = last.recipe["recover"]
    record = {
        **studies.header("by-command"),
        "task": args.task,
        "settings": settings(args.length) + args.settings,
        "calibration": last.recipe["data"]["calibration"],
        "refit_rows": refit["examples"] or last.recipe["data"]["calibration"],
        "batch": last.metrics["speedup"]["batch_size"],
        "length": last.metrics["speedup"]["length"],
        "hardware": dict(last.hardware),
        "versions": dict(last.versions),
        "rows": rows,
    }
    if args.out.is_file() and len(rows) > 1:
        before = json.loads(args.out.read_text())["hardware"]
        if before != record["hardware"]:
            raise SystemExit(f"Runs of two machines: {before}, {record['hardware']}.")
    studies.keep(record, args.out)


def folder_of(args: argparse.Namespace, asked: float, draw: int) -> Path:
    """The folder of a run; another model, other data or settings have another one."""
    words = json.dumps(command(args, asked, draw, Path()))
    digest = hashlib.sha256(words.encode()).hexdigest()[:8]
    return Path(args.work) / f"{asked:g}-{draw}-{digest}"


def settings(length: int) -> list[str]:
    """What is not the command's default: which inputs are timed, and that baselines are not."""
    timed = [
        f"select.latency.length={length}",
        f"bench.lengths=[{length}]",
        "bench.batch_sizes=[32]",
    ]
    return [*timed, "score.random_draws=0", "score.magnitude=false"]


def finished(out: Path) -> bool:
    """Whether a run has ended well in this folder."""
    path = out / "run" / "record.json"
    return path.is_file() and RunRecord.load(path).status == "done"


def command(args: argparse.Namespace, asked: float, draw: int, out: Path) -> list[str]:
    """The command's arguments."""
    words = ["prune", "--model", str(args.model), "--data", str(args.data)]
    words += ["--speedup", f"{asked:g}", "--out", str(out)]
    for setting in (f"seed={draw}", *settings(args.length), *args.settings):
        words += ["--set", setting]
    return words


def run(words: Sequence[str]) -> None:
    """The command, in a process of its own."""
    subprocess.run([sys.executable, "-m", "headprune", *words], check=True)


def row(record: RunRecord, folder: Path) -> dict[str, Any]:
    """What a finished run says of itself."""
    mask = PruningPlan.load(folder / "plan.json").mask
    on_test = {one.name: one for one in record.quality if one.split == "test"}
    speed = record.metrics["speedup"]
    return {
        "heads": [len(one.kept) for one in mask.rows if not one.neurons],
        "neurons": [len(one.kept) for one in mask.rows if one.neurons],
        "width": max(one.n_heads for one in mask.rows if one.neurons),
        "whole": on_test["base"].value,
        "test": on_test["recovered (lstsq)"].value,
        "savings_factor": record.metrics.get(SAVINGS_FACTOR),
        "predicted": speed["predicted"],
        "ratio": speed["measured"],
        "low": speed["low"],
        "high": speed["high"],
        "created": record.created,
    }


if __name__ == "__main__":
    main()
