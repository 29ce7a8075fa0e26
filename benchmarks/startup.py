"""What starting costs: ``import headprune``, ``headprune --help``, ``headprune run`` beyond what
the run itself takes.

    python benchmarks/startup.py

Every measurement is a fresh Python process, all in turn in interleaved rounds, after one round that
warms the disk's cache. ``python`` is an empty process and ``libraries`` one that imports torch and
the base class of Transformers' models, which a run needs and nobody can take away. ``run`` is a
recipe of a few seconds (``digits-vit`` with little of everything); the stages that its record times
are taken off, and the rest, ``run, overhead``, is start-up: interpreter, imports (those of
``libraries`` among them), reading and checking the recipe, finding out versions and commit, and
writing the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from studies import RECORDS, header, keep

#: Seconds beyond an empty process.
AIM = {"import headprune": 0.15}
CLI = [sys.executable, "-c", "from headprune.cli.main import main; main()"]
SMALL = [
    "train.epochs=1",
    "score.random_draws=1",
    "recover=[]",
    "bench.seconds=0.01",
    "select.keep_heads=24",
    "report=false",
]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--run-rounds", type=int, default=3, help="of the recipe, which takes some seconds"
    )
    parser.add_argument("--recipe", default="digits-vit")
    parser.add_argument(
        "--set", nargs="*", default=SMALL, help="settings that make the recipe short"
    )
    parser.add_argument("--out", type=Path, default=RECORDS / "startup.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measures and returns the record's path."""
    args = arguments(argv)
    ways = {
        "python": [sys.executable, "-c", ""],
        "import headprune": [sys.executable, "-c", "import headprune"],
        "headprune --help": [*CLI, "--help"],
        "libraries": [
            sys.executable,
            "-c",
            "import torch; from transformers import PreTrainedModel",
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, command in ways.items():
            seconds = timed(command)
            times[name] += [seconds] if number else []
    runs = [a_run(args) for _ in range(args.run_rounds)]
    times |= {
        "run": [whole for whole, _ in runs],
        "run, overhead": [whole - stages for whole, stages in runs],
    }
    empty = float(np.median(times["python"]))
    beyond = {
        name: float(np.median(found)) - empty
        for name, found in times.items()
        if found and name != "python"
    }
    record: dict[str, Any] = {
        **header("startup"),
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "aim": AIM,
        "seconds": times,
        "beyond an empty process": beyond,
    }
    for name, seconds in beyond.items():
        print(f"{name:18} {seconds:7.3f} s beyond the {empty:.3f} s of an empty process")
    keep(record, args.out)
    print(args.out)
    return Path(args.out)


def timed(command: Sequence[str]) -> float:
    start = perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return perf_counter() - start


def a_run(args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of the process, and of the stages that its record times."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [word for setting in args.set for word in ("--set", setting)]
        whole = timed([*CLI, "run", args.recipe, *settings, "--out", f"{folder}/run"])
        record = json.loads(Path(folder, "run", "record.json").read_text())
    return whole, sum(record["timings"].values())


if __name__ == "__main__":
    main()
