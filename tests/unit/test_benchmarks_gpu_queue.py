"""The GPU study's queue, with jobs of a few lines in place of benchmarks; its jobs are commands."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import BENCHMARKS, ROOT, script

GPU = BENCHMARKS / "gpu"

#: Writes its record.
WELL = """
import pathlib, sys
pathlib.Path(sys.argv[1]).write_text("[0, 1, 2]")
"""
#: Adds a row; ends as a study whose time was over until there are two.
TWICE = """
import json, sys, pathlib
path = pathlib.Path(sys.argv[1])
done = json.loads(path.read_text()) if path.is_file() else []
path.write_text(json.dumps([*done, len(done)]))
sys.exit(75 if len(done) + 1 < 2 else 0)
"""


@pytest.fixture(scope="module")
def worker() -> ModuleType:
    return script(GPU / "worker.py")


@pytest.fixture(scope="module")
def lease() -> ModuleType:
    return script(GPU / "lease.py")


def job(worker: ModuleType, name: str, code: str, **more: Any) -> Any:
    words = shlex.join(["-c", code, f"@records@/{name}.json"])
    command = words.replace("{", "{{").replace("}", "}}").replace("@records@", "{records}")
    return worker.Job(name, command, f"{name}.json", **{"most": 30, "least": 0, **more})


def home(
    worker: ModuleType,
    path: Path,
    jobs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float = 60,
) -> Any:
    """A prepared folder whose queue knows these jobs."""
    monkeypatch.setattr(worker, "JOBS", tuple(jobs))
    found = worker.Home(path)
    for folder in (found.code, found.logs, found.records):
        folder.mkdir(parents=True)
    settings = {"deadline": time.time() + seconds + worker.RESERVE, "commit": "c0ffee"}
    settings |= {"machine": path.name, "device": "cpu", "rehearsal": False, "model": "m"}
    found.settings.write_text(json.dumps({**settings, "jobs": [one.name for one in jobs]}))
    return found


def ended(found: Any, worker: ModuleType) -> list[tuple[str, str]]:
    return [(entry["job"], entry["status"]) for entry in worker.entries_of(found)]


def test_every_end_of_a_job_is_noted_and_the_next_begins(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [
        job(worker, "fails", "import sys; print('why'); sys.exit(3)"),
        job(worker, "hangs", "import time; time.sleep(60)", most=1),
        job(worker, "twice", TWICE),
        job(worker, "well", WELL),
        job(worker, "late", WELL, least=3600),
    ]
    monkeypatch.setattr(worker, "TURNS", 2)
    found = home(worker, tmp_path / "one", jobs, monkeypatch)
    worker.main(found)
    assert ended(found, worker) == [
        ("fails", "failed"),  # it would fail again
        ("hangs", "overran"),
        ("twice", "goes on"),
        ("well", "done"),  # before anybody's second turn
        ("hangs", "overran"),
        ("twice", "done"),
        ("late", "no time"),
    ]
    codes = [entry.get("code") for entry in worker.entries_of(found)]
    assert codes == [3, None, 75, 0, None, 0, None]
    assert "why" in (found.logs / "fails.log").read_text()
    assert json.loads((found.records / "well.json").read_text()) == [0, 1, 2]
    assert not (found.records / "late.json").exists()
    assert found.done.exists()


def test_a_job_runs_again_where_other_weights_were_trained(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quality, speed = job(worker, "quality", WELL), job(worker, "speed", WELL)
    found = home(worker, tmp_path / "one", [quality, speed], monkeypatch)
    entry = {"job": "quality", "command": quality.command, "machine": "an earlier one"}
    found.record.write_text(json.dumps({"entries": [{**entry, "status": "done", "seconds": 1.0}]}))
    (found.records / "quality-0123abcd.json").write_text("[]")  # it was brought along
    time.sleep(0.02)
    (found.path / ".records").touch()
    time.sleep(0.02)
    assert worker.is_done(found, quality)
    (found.records / "quality-4567cdef.json").write_text("[]")  # it was begun here, aside
    assert not worker.is_done(found, quality)
    worker.main(found)
    assert ended(found, worker)[1:] == [("quality", "done"), ("speed", "done")]


@pytest.mark.parametrize("small", [False, True], ids=["full", "rehearsal"])
def test_every_job_is_a_command_that_its_script_takes(lease: ModuleType, small: bool) -> None:
    """An option that a script has lost would cost a lease."""
    names = dict.fromkeys(("data", "model", "work", "records"), "x")
    names |= {"minutes": "1", "device": "cpu"}
    for one in lease.JOBS:
        words = [word.format(**names) for word in shlex.split(f"{one.command} {one.tiny * small}")]
        if words[0] == "-m":
            assert words[1] == "pytest"
            assert (ROOT / words[-1]).is_dir()
            continue
        args = script(ROOT / words[0]).arguments(words[1:])
        assert f"{{records}}/{one.record}".format(**names) == str(args.out)


@pytest.mark.long
def test_the_study_is_rehearsed_on_the_cpu() -> None:
    subprocess.run(["make", "gpu-rehearsal"], cwd=ROOT, check=True, timeout=1800)
