"""Run the whole GPU study at tiny size on a CPU, as it would run on the bare GPU machine.

    make gpu-rehearsal

Builds an environment with the GPU machine's versions (``machine.txt``; gigabytes, once, in
``runs/gpu/environment``), without what travels as wheels, and runs the pack there with no other
packages: every job must end well and leave its record. Graphs, events and NVML are all that a CPU
    cannot show.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent))
from jobs import JOBS
from lease import ARCHIVE, ROOT
from packing import HERE, PYTHON

sys.path.insert(0, str(ROOT / "benchmarks"))
from compatibility import Missing, interpreter

GPU = ROOT / "runs" / "gpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse; return 0 where every job left its record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", help="an interpreter of the GPU machine's version; found by its name by default"
    )
    parser.add_argument(
        "--seconds", type=float, default=900, help="after which the rehearsal has failed"
    )
    args = parser.parse_args(argv)
    python = environment(args.python)
    begin = perf_counter()
    home, out = GPU / "rehearsal", GPU / "rehearsed"
    for folder in (home, out):
        shutil.rmtree(folder, ignore_errors=True)
    code = lease(python, home, out, args.seconds)
    with tarfile.open(out / ARCHIVE) as file:
        file.extractall(out, filter="data")
    failed = failures(out)
    for line in failed:
        print(line, file=sys.stderr)
    words = f"{len(JOBS) - len(failed)} of {len(JOBS)} jobs left their records"
    print(f"{words}, in {perf_counter() - begin:.0f} s; look at {out.relative_to(ROOT)}")
    return 1 if failed or code else 0


def environment(given: str | None) -> Path:
    """The interpreter of an environment with the GPU machine's versions; it is built where they
    have changed."""
    folder = GPU / "environment"
    digest = hashlib.sha256((HERE / "machine.txt").read_bytes()).hexdigest()
    mark, python = folder / "built", folder / "bin" / "python"
    if mark.is_file() and mark.read_text() == digest:
        return python
    try:
        base = given or interpreter(PYTHON)
    except Missing as missing:
        raise SystemExit(
            f"--python: must be an interpreter of Python {PYTHON}, and {missing}."
        ) from None
    begin = perf_counter()
    print(
        "Building an environment with the GPU machine's versions (some gigabytes, once) ...",
        flush=True,
    )
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([base, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "-r", str(HERE / "machine.txt")], check=True)
    # What other packages brought along must come from the carried wheels, as it must on the GPU
    # machine.
    carried = [
        line.partition("==")[0]
        for line in (HERE / "wheels.txt").read_text().splitlines()
        if "==" in line
    ]
    gone = [
        name for name in carried if name not in ("typing-extensions",)
    ]  # PyTorch itself needs this one
    subprocess.run([*pip, "uninstall", "--yes", *gone], check=True, capture_output=True)
    mark.write_text(digest)
    print(f"Built in {perf_counter() - begin:.0f} s.", flush=True)
    return python


def lease(python: Path, home: Path, out: Path, seconds: float) -> int:
    """Run the study as on the GPU machine: one command, nothing inherited but the PATH."""
    variables = {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "LANG": "C.UTF-8"}
    # One thread: what else runs here would otherwise make every parallel step wait for its slowest
    # thread.
    variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = [
        "--rehearsal",
        "--minutes",
        str(seconds / 60),
        "--home",
        str(home),
        "--out",
        str(out),
    ]
    command = [str(python), str(HERE / "lease.py"), str(seconds), *options]
    return subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode


def failures(out: Path) -> list[str]:
    """What is wrong with each job that did not end well or left no record."""
    queue = json.loads((out / "records" / "gpu-queue.json").read_text())
    ended = {entry["job"]: entry["status"] for entry in queue["entries"]}
    found = []
    for job in JOBS:
        record = out / "records" / job.record.format(device="cpu")
        status = ended.get(job.name, "never began")
        if status != "done":
            found.append(f"{job.name}: {status}; see {out / 'logs' / job.name}.log")
        elif not record.is_file():
            found.append(f"{job.name}: no record {record.name}")
        else:
            rows = json.loads(record.read_text()).get("rows", [])
            found += [f"{job.name}: {row['error']}" for row in rows if "error" in row]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
