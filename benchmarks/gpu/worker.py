"""The queue: runs the jobs one after the other until all are done or the deadline comes.

Standard library only. ``lease.py`` starts it in a session of its own, so that it outlives the call.
What ended is noted in ``records/gpu-queue.json``. A job that was under way when the queue was
killed runs again, and its study goes on after the last row that it wrote. A job that fails or takes
too long is noted, and the next begins.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from jobs import JOBS, Job

#: A study exits so when its minutes were over before its rows were: the same command goes on.
UNFINISHED = 75
#: Seconds before the deadline that no job may use: the archive is made in them.
RESERVE = 10
#: Turns of a job that does not come to its end on one machine.
TURNS = 3
#: Seconds between asking a job to end and killing it.
PATIENCE = 5


@dataclass(frozen=True)
class Home:
    """The folder of one study on one machine."""

    path: Path

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def site(self) -> Path:
        return self.path / "site"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def model(self) -> Path:
        return self.path / "minilm"

    @property
    def records(self) -> Path:
        return self.path / "records"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def settings(self) -> Path:
        """What the first call was asked for: deadline, device, rehearsal or not."""
        return self.path / "settings.json"

    @property
    def running(self) -> Path:
        """The process group of the job that is under way."""
        return self.path / "running"

    @property
    def done(self) -> Path:
        """Is there when the queue has nothing more to do."""
        return self.path / "done"

    @property
    def record(self) -> Path:
        """What ran, and how it ended; it travels with the records."""
        return self.records / "gpu-queue.json"


def main(home: Home) -> None:
    """Run every job that is not done, as far as the deadline allows."""
    with alone(home) as first:
        if not first:
            return
        end_orphan(home)
        settings = json.loads(home.settings.read_text())
        turns = Counter[str]()
        while (job := following(home, settings, turns)) is not None:
            status = run(job, home, settings)["status"]
            turns[job.name] = TURNS if status == "failed" else turns[job.name] + 1
        note_skipped(home, settings, turns)
        home.done.touch()


@contextmanager
def alone(home: Home) -> Iterator[bool]:
    """Whether no other queue works in this folder; a lock of the system, which ends with its
    process."""
    with (home.path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def following(home: Home, settings: dict[str, Any], turns: Mapping[str, int]) -> Job | None:
    """The first of the jobs with the fewest turns that is not done and can still end before the
    deadline.

    So a study that ended early goes on after all others had their turn.
    """
    left = settings["deadline"] - time.time() - RESERVE
    able = [
        job for job in wanted(settings) if turns[job.name] < TURNS and left >= least(job, settings)
    ]
    waiting = [job for job in able if not is_done(home, job)]
    return min(waiting, key=lambda job: turns[job.name], default=None)


def wanted(settings: dict[str, Any]) -> list[Job]:
    """The jobs that were asked for and whose data were carried."""
    return [job for job in JOBS if job.name in settings["jobs"]]


def least(job: Job, settings: dict[str, Any]) -> float:
    """A rehearsal's jobs are short."""
    return 0.0 if settings["rehearsal"] else float(job.least)


def is_done(home: Home, job: Job) -> bool:
    """Whether this very command ended well, on this machine or an earlier one.

    What an earlier one did does not count where this machine trained other weights: a record was
    begun aside then.
    """
    machine = json.loads(home.settings.read_text())["machine"]
    entries = [entry for entry in entries_of(home) if entry["job"] == job.name]
    if not entries or (entries[-1]["status"], entries[-1]["command"]) != ("done", job.command):
        return False
    return entries[-1]["machine"] == machine or not begun_aside(home, job)


def begun_aside(home: Home, job: Job) -> bool:
    """Whether a record of other weights was begun on this machine beside the job's own."""
    mark = home.path / ".records"
    if not mark.exists():
        return False
    stem = job.record.format(device="cuda").removesuffix(".json")
    found = home.records.glob(f"{stem}-????????.json")
    return any(path.stat().st_mtime > mark.stat().st_mtime for path in found)


def entries_of(home: Home) -> list[dict[str, Any]]:
    """What the queue has noted so far."""
    if not home.record.is_file():
        return []
    found: list[dict[str, Any]] = json.loads(home.record.read_text())["entries"]
    return found


def note(home: Home, entry: dict[str, Any]) -> dict[str, Any]:
    """Add an entry to the queue's record; the file is whole at any moment."""
    record = {"benchmark": "gpu-queue", "entries": [*entries_of(home), entry]}
    unfinished = home.record.with_suffix(".part")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(home.record)
    print(f"{entry['job']}: {entry['status']}, {entry['seconds']:.0f} s", flush=True)
    return entry


def note_skipped(home: Home, settings: dict[str, Any], turns: Mapping[str, int]) -> None:
    """Note the jobs for which no time was left."""
    here = {entry["job"] for entry in entries_of(home) if entry["machine"] == settings["machine"]}
    for job in wanted(settings):
        if not turns[job.name] and job.name not in here and not is_done(home, job):
            note(home, {**about(job, settings), "status": "no time", "seconds": 0.0})


def about(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """What every entry has."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    machine = {"commit": settings["commit"], "machine": settings["machine"], "created": now}
    return {"job": job.name, "command": job.command, **machine}


def run(job: Job, home: Home, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one job to its end or its limit; return its entry."""
    limit = min(job.most, settings["deadline"] - time.time() - RESERVE)
    fields = {
        "device": settings["device"],
        "data": home.data,
        "model": home.model,
        "work": home.path / "work",
        "records": home.records,
        "minutes": f"{max(0.1, (limit - job.last_row) / 60):.2f}",
    }
    tiny = settings["rehearsal"]
    words = shlex.split(f"{job.command} {job.tiny}" if tiny else job.command)
    command = [sys.executable, *(word.format(**fields) for word in words)]
    variables = {**job.environment, **(job.tiny_environment if tiny else {})}
    environment = {
        **os.environ,
        **{name: value.format(**fields) for name, value in variables.items()},
    }
    begin = time.time()
    with (home.logs / f"{job.name}.log").open("a") as log:
        print(f"\n$ {shlex.join(command)}", file=log, flush=True)
        status, code = watched(command, environment, home, log, limit)
    return note(
        home,
        {**about(job, settings), "status": status, "code": code, "seconds": time.time() - begin},
    )


def watched(
    command: list[str], environment: dict[str, str], home: Home, log: IO[str], limit: float
) -> tuple[str, int | None]:
    """Run a command with a limit in seconds; return how it ended and its exit status.

    It gets a process group of its own, so that its children end with it.
    """
    process = subprocess.Popen(
        command,
        cwd=home.code,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    home.running.write_text(str(process.pid))
    try:
        code = process.wait(timeout=max(1.0, limit))
    except subprocess.TimeoutExpired:
        end(process)
        return "overran", None
    except BaseException:
        end(process)
        raise
    finally:
        home.running.unlink(missing_ok=True)
    return {0: "done", UNFINISHED: "goes on"}.get(code, "failed"), code


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: ask first, then kill."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            continue


def end_orphan(home: Home) -> None:
    """Kill the job of a queue that was killed alone: two processes must not write one record.

    Its number may belong to another process by now, so it is killed only where its variables name
    this folder.
    """
    if not home.running.is_file():
        return
    try:
        group = int(home.running.read_text())
        variables = Path(f"/proc/{group}/environ").read_bytes()
        if str(home.code).encode() in variables:
            os.killpg(group, signal.SIGKILL)
    except (OSError, ValueError):
        pass  # it has ended
    home.running.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Home(Path(sys.argv[1])))
