"""On the GPU machine, as often as wanted: start or watch the study, and bring back one archive.

    benchmarks/gpu/run 570                 # waits so many seconds, or until the queue is done

The first call unpacks the code and the data of ``runs/gpu/pack``, installs the carried wheels, and
starts the queue (``worker.py``) in a session of its own, which outlives the call. Every call waits,
and then writes ``gpu.tar.gz`` with all records and logs into ``--out``. A later call waits on; a
queue that was killed is started again, and goes on. Records that came back from an earlier machine
travel with the pack, and are gone on with.

No git, no network, nothing but Python's standard library and the machine's own packages.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from jobs import JOBS
from worker import Home, entries_of

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = "gpu.tar.gz"
#: Seconds between archives while a call waits.
ARCHIVE_EVERY = 30
#: Rows of each file in a rehearsal, and of tasks that need more: TREC's recipe sets 500 aside.
REHEARSED = 64
REHEARSED_MORE = {"trec": 640}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "wait", type=float, nargs="?", default=570, help="seconds at most, 570 by default"
    )
    parser.add_argument(
        "--minutes", type=float, default=25, help="from the first call on, in which jobs may run"
    )
    parser.add_argument("--pack", type=Path, default=ROOT / "runs" / "gpu" / "pack")
    parser.add_argument(
        "--home",
        type=Path,
        default=Path.home() / "headprune-gpu",
        help="of the study on this machine",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "out")),
        help="where the archive goes",
    )
    parser.add_argument(
        "--jobs", nargs="+", choices=[job.name for job in JOBS], default=[job.name for job in JOBS]
    )
    parser.add_argument("--rehearsal", action="store_true", help="everything small, on the CPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start or go on, wait, and write the archive; return 0 when the queue is done, 3 when it runs
    on."""
    args = arguments(argv)
    deadline = time.time() + 60 * args.minutes
    end = time.time() + args.wait
    home = Home(args.home.resolve())
    if not home.done.exists():
        prepare(args, home, deadline)
    archived = 0.0
    while not home.done.exists():
        if not at_work(home):
            start(home)
        if (
            time.time() - archived > ARCHIVE_EVERY
        ):  # the call itself may be killed: what is in --out comes back then
            archive(home, args.out)
            archived = time.time()
        if time.time() > end:
            break
        time.sleep(min(2.0, args.wait))
    archive(home, args.out)
    finished = home.done.exists()
    tell(home, args.out / ARCHIVE, finished)
    return 0 if finished else 3


# ------------------------------------------------------------------------------------------------
# the first call


def prepare(args: argparse.Namespace, home: Home, deadline: float) -> None:
    """Unpack and install what is missing; each step is marked when it is done, so a killed call is
    repeated."""
    steps: dict[str, Callable[[], None]] = {
        "settings": lambda: first_call(args, home, deadline),
        "records": lambda: bring_records(args, home),
        "code": lambda: unpack_code(args.pack / "code.tar.gz", home.code),
        "data": lambda: unpack_data(args.pack / "data.tar.xz", home.data, args.rehearsal),
        "model": lambda: unpack(args.pack / "minilm.tar.xz", home.model),
        "wheels": lambda: install(args.pack / "wheels", home),
    }
    for name, step in steps.items():
        mark = home.path / f".{name}"
        if not mark.exists():
            step()
            mark.touch()


def first_call(args: argparse.Namespace, home: Home, deadline: float) -> None:
    """Look at the pack, make the folders, and note what holds for the whole study."""
    if not (args.pack / "pack.json").is_file():
        raise SystemExit(
            f"{args.pack}: a pack must be there, built by benchmarks/gpu/pack, and it is not."
        )
    pack: dict[str, Any] = json.loads((args.pack / "pack.json").read_text())
    if pack["made_up"] and not args.rehearsal:
        raise SystemExit(
            f"{args.pack}: holds made-up rows, for a rehearsal alone. Pack again with --data"
            " FOLDER."
        )
    for folder in (home.records, home.logs, home.site):
        folder.mkdir(parents=True, exist_ok=True)
    if not home.settings.is_file():
        write(home.settings, settings(args, pack, deadline))


def settings(args: argparse.Namespace, pack: dict[str, Any], deadline: float) -> dict[str, Any]:
    """What holds for the whole study on this machine."""
    carried = [job.name for job in JOBS if not job.task or job.task in pack["tasks"]]
    return {
        "deadline": deadline,
        "commit": pack["commit"],
        "machine": uuid.uuid4().hex[:8],
        "device": "cpu" if args.rehearsal else "cuda",
        "rehearsal": args.rehearsal,
        "jobs": [name for name in args.jobs if name in carried],
    }


def bring_records(args: argparse.Namespace, home: Home) -> None:
    """Rows of earlier machines, with which studies go on; a rehearsal's small ones are no part of
    the study."""
    for path in [] if args.rehearsal else sorted((args.pack / "records").glob("*.json")):
        shutil.copy(path, home.records / path.name)


def unpack(archive: Path, target: Path) -> None:
    """Extract afresh: the tree that the pack came with may be written anew while the queue
    works."""
    shutil.rmtree(target, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(target, filter="data")


def unpack_code(archive: Path, target: Path) -> None:
    """The code, with its folders of scripts made packages: an installed ``tests`` would else come
    before them."""
    unpack(archive, target)
    for name in ("tests", "benchmarks"):
        (target / name).mkdir(exist_ok=True)
        (target / name / "__init__.py").touch()


def unpack_data(archive: Path, target: Path, rehearsal: bool) -> None:
    """The rows; of a rehearsal, the first few of each file."""
    unpack(archive, target)
    for path in sorted(target.glob("*/*.jsonl")) if rehearsal else []:
        count = REHEARSED_MORE.get(path.parent.name, REHEARSED)
        some = path.read_text(encoding="utf-8").splitlines(keepends=True)[:count]
        path.write_text("".join(some), encoding="utf-8")


def install(wheels: Path, home: Home) -> None:
    """Put the carried wheels where only the study looks."""
    options = [
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
        "--upgrade",
        "--target",
        str(home.site),
    ]
    found = [str(path) for path in sorted(wheels.glob("*.whl"))]
    if found:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *found], check=True)


def start(home: Home) -> None:
    """Start the queue in a session of its own."""
    settings = json.loads(home.settings.read_text())
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(home.code), str(home.site)]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HEADPRUNE_COMMIT": settings["commit"],
        "CUBLAS_WORKSPACE_CONFIG": (
            ":4096:8"
        ),  # deterministic products, so that every machine trains the same weights
        "TORCHINDUCTOR_CACHE_DIR": str(home.path / "inductor"),
    }
    worker = home.code / "benchmarks" / "gpu" / "worker.py"
    with (home.path / "queue.log").open("a") as log:
        subprocess.Popen(
            [sys.executable, str(worker), str(home.path)],
            cwd=home.code,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    time.sleep(1.0)  # until it has taken its lock


def at_work(home: Home) -> bool:
    """Whether a queue holds the folder's lock."""
    lock = home.path / "lock"
    if not lock.exists():
        return False
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def write(path: Path, value: Any) -> None:
    """JSON, whole or not at all."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value, indent=1) + "\n")
    unfinished.replace(path)


# ------------------------------------------------------------------------------------------------
# what comes back


def archive(home: Home, out: Path) -> None:
    """One file with all records and logs."""
    out.mkdir(parents=True, exist_ok=True)
    unfinished = out / f".{ARCHIVE}"
    with tarfile.open(unfinished, "w:gz") as file:
        for name in ("records", "logs", "queue.log"):
            if (home.path / name).exists():
                file.add(home.path / name, arcname=name, filter=whole_files)
    unfinished.replace(out / ARCHIVE)


def whole_files(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what is being written."""
    return None if member.name.endswith((".part", ".tmp")) else member


def tell(home: Home, path: Path, finished: bool) -> None:
    """Print how each job ended, and what to do next."""
    for entry in entries_of(home):
        print(
            f"{entry['job']:12} {entry['status']:8} {entry['seconds']:6.0f} s "
            f" {entry['commit'][:12]}"
        )
    print(
        f"{path}: {path.stat().st_size / 2**20:.2f} MiB; tar -xzf {path.name} -C benchmarks records"
    )
    print(
        "QUEUE DONE"
        if finished
        else "THE QUEUE RUNS ON: call again before the machine is given back"
    )


if __name__ == "__main__":
    raise SystemExit(main())
