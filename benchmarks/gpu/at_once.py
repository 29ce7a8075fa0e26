"""Run the studies that train, cut and judge many models, several at once: nothing of them is timed.

    python benchmarks/gpu/at_once.py --device cuda --data DATA --model MODEL --work WORK \
        --records RECORDS --minutes 8

A process is one part of a study: one training of ``regret.py`` with all its draws, and with the
other refits for the first of them, or one draw of ``one_budget.py``. It writes a record of its own,
and the parts of a study are joined into one record whenever one of them ends. Rows that are in a
record already are not made again. Tasks without rows in ``--data`` are passed over, and so is
``one_budget.py`` where ``--data`` has no ``tables`` folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from jobs import ENCODER, TABLES
from lease import write
from made_tasks import MADE
from worker import UNFINISHED

BENCHMARKS = Path(__file__).resolve().parents[1]
NUMBERS = (0, 1, 2)
#: By study, the options of its commands, one after the other.
OPTIONS = {
    "regret": (
        "--tuned {number} --draws 0 1 2 --refits lstsq",
        '--tuned {number} --draws 0 --refits "no refit" "lstsq, output" "lstsq, held-out ridge"',
    ),
    "one_budget": (
        "--step judge --tables {tables} --train --draws {number} --speedups 1.3 1.5 2.2 3 3.6 4.3",
    ),
}
#: What a rehearsal adds: few rows, one candidate, a moment of training.
TINY = {
    "regret": "--calibration 16 --shares 0.5 --draws 0 --candidates taylor",
    "one_budget": "--calibration 16 --refit-rows 16 --speedups 1.3",
}


@dataclass(frozen=True)
class Part:
    """One process.

    Args:
        study: The script.
        task: Its task.
        number: Of the training (``regret``) or of the draw (``one_budget``).
    """

    study: str
    task: str
    number: int

    def folder(self, work: Path) -> Path:
        """Where it works: parts of one training work side by side, each in a folder of its own."""
        return work / "at-once" / f"{self.study}-{self.task}-{self.number}"

    @property
    def key(self) -> str:
        """What the number is called in the rows."""
        return "tuned" if self.study == "regret" else "draw"

    def record(self, device: str) -> str:
        """The name of the study's record; what ends in ``-judged`` has yet to be timed."""
        stem = "regret-{task}" if self.study == "regret" else "one-budget-{task}-judged"
        return stem.format(task=self.task) + f"-{device}.json"


PARTS = (
    *(Part("one_budget", "sst2", number) for number in NUMBERS),
    *(Part("regret", task, n) for task in ("hwu64", "trec", "stsb", "capitals") for n in NUMBERS),
    *(Part("regret", "sst2", number) for number in NUMBERS),
    *(Part("one_budget", "hwu64", number) for number in NUMBERS),
    *(Part("one_budget", "trec", number) for number in NUMBERS),
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for name in ("data", "model", "work", "records"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="begin no row after them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: one small part a study")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 0 when all rows are there, ``UNFINISHED`` or 1 when some are not."""
    args = arguments(argv)
    end = time.monotonic() + 60 * args.minutes
    parts = [part for part in PARTS if has_rows(part, args.data)]
    if args.tiny:
        parts = [part for part in parts if (part.task, part.number) == ("sst2", 0)]
    codes = set()
    # Each process works from one thread of Python, which a GPU does not keep busy.
    with ThreadPoolExecutor(args.processes) as pool:
        running = {pool.submit(run, part, args, end): part for part in parts}
        for done in as_completed(running):
            part, code = running[done], done.result()
            report(part, args, code)
            join_study(part, args)
            codes.add(code)
    if codes - {0, UNFINISHED}:
        return 1
    return max(codes, default=0)


def has_rows(part: Part, data: Path) -> bool:
    """Whether the part can run with this data."""
    # A task that is made of a text has that text's folder.
    folder = data / part.task
    if part.task in MADE:
        folder = (data / MADE[part.task][0]).parent
    there = folder.is_dir()
    return there and (part.study == "regret" or (data / TABLES).is_dir())


def run(part: Part, args: argparse.Namespace, end: float) -> int:
    """Run a part's commands, one after the other; return the exit status of the last one."""
    work = part.folder(args.work)
    work.mkdir(parents=True, exist_ok=True)
    out = work / part.record(args.device)
    divide(part, args.records / out.name, out)
    with (work / "log").open("a") as log:
        for options in OPTIONS[part.study]:
            minutes = (end - time.monotonic()) / 60
            if minutes <= 0:
                return UNFINISHED
            code = subprocess.run(
                command(part, options, args, work, out, minutes),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=False,
            ).returncode
            if code:
                return code
    return 0


def report(part: Part, args: argparse.Namespace, code: int) -> None:
    """Print how a part ended, and the last lines of its log."""
    folder = part.folder(args.work)
    print(f"{folder.name}: exit status {code}")
    print("\n".join((folder / "log").read_text().splitlines()[-12:]), flush=True)


def join_study(part: Part, args: argparse.Namespace) -> None:
    """Join all parts of a part's study and task that there are."""
    name = part.record(args.device)
    same = [one for one in PARTS if (one.study, one.task) == (part.study, part.task)]
    join([one.folder(args.work) / name for one in same], args.records / name)


def command(
    part: Part, options: str, args: argparse.Namespace, work: Path, out: Path, minutes: float
) -> list[str]:
    """A command of a part."""
    options = f"{options} {TINY[part.study]}" if args.tiny else options
    settings = f"{ENCODER} train.epochs=0.05" if args.tiny else ENCODER
    fields = {"number": part.number, "tables": args.data / TABLES, "model": args.model}
    words = shlex.split(f"{options} --set {settings}")
    where = ["--task", part.task, "--data", args.data, "--work", work, "--out", out]
    limits = ["--device", args.device, "--minutes", f"{minutes:.2f}"]
    script = BENCHMARKS / f"{part.study}.py"
    given = [sys.executable, script, *where, *limits, *(word.format(**fields) for word in words)]
    return [str(word) for word in given]


def divide(part: Part, whole: Path, out: Path) -> None:
    """Give a part its own rows of a record that is there."""
    if out.is_file() or not whole.is_file():
        return
    record = json.loads(whole.read_text())
    record["rows"] = [row for row in record["rows"] if row[part.key] == part.number]
    write(out, record)


def join(parts: Iterable[Path], whole: Path) -> None:
    """Write the record of all rows of the parts that are there.

    Raises:
        ValueError: two parts name different weights for the same training.
    """
    records: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in parts if path.is_file()
    ]
    if not records:
        return
    joined = {**records[0], "rows": [row for record in records for row in record["rows"]]}
    joined["whole"] = {}
    for record in records:
        for tuned, about in record["whole"].items():
            known = joined["whole"].setdefault(tuned, about)
            if known["weights"] != about["weights"]:
                raise ValueError(f"{whole.name}: two parts trained other weights by seed {tuned}")
    joined["whole"] = dict(sorted(joined["whole"].items()))
    write(whole, joined)


if __name__ == "__main__":
    raise SystemExit(main())
