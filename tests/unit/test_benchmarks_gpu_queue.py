"""The GPU study's pack, lease and queue, with jobs of a few lines in place of benchmarks."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import BENCHMARKS, ROOT, script

GPU = BENCHMARKS / "gpu"

#: Counts its own calls in ``{records}/NAME.json``, as a study does with rows.
COUNT = """
import json, sys, time, pathlib
path, rows, pause, code = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
done = json.loads(path.read_text()) if path.is_file() else []
while len(done) < rows:
    done.append(len(done))
    path.write_text(json.dumps(done))
    time.sleep(pause)
sys.exit(code)
"""
#: Adds a row; leaves as a study whose time was over until there are two.
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


def job(worker: ModuleType, name: str, code: str, *arguments: object, **more: Any) -> Any:
    words = shlex.join(["-c", code, f"@records@/{name}.json", *map(str, arguments)])
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
    settings = {
        "deadline": time.time() + seconds + worker.RESERVE,
        "commit": "c0ffee",
        "machine": path.name,
    }
    settings |= {
        "device": "cpu",
        "rehearsal": False,
        "model": "m",
        "jobs": [one.name for one in jobs],
    }
    found.settings.write_text(json.dumps(settings))
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
        job(worker, "well", COUNT, 3, 0, 0),
        job(worker, "late", COUNT, 3, 0, 0, least=3600),
    ]
    found = home(worker, tmp_path / "one", jobs, monkeypatch)
    worker.main(found)
    assert ended(found, worker) == [
        ("fails", "failed"),  # it would fail again
        ("hangs", "overran"),
        ("twice", "goes on"),
        ("well", "done"),  # before anybody's second turn
        ("hangs", "overran"),
        ("twice", "done"),
        ("hangs", "overran"),
        ("late", "no time"),
    ]
    assert [entry.get("code") for entry in worker.entries_of(found)] == [
        3,
        None,
        75,
        0,
        None,
        0,
        None,
        None,
    ]
    assert "why" in (found.logs / "fails.log").read_text()
    assert json.loads((found.records / "well.json").read_text()) == [0, 1, 2]
    assert not (found.records / "late.json").exists()
    assert found.done.exists()


def test_a_job_whose_children_hang_is_ended_with_them(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""
    monkeypatch.setattr(worker, "PATIENCE", 0.5)
    found = home(worker, tmp_path / "one", [job(worker, "parent", code, most=2)], monkeypatch)
    monkeypatch.setattr(worker, "TURNS", 1)
    worker.main(found)
    assert ended(found, worker) == [("parent", "overran")]
    child_pid = int((found.records / "parent.json").read_text())
    deadline = time.time() + 10
    while alive(child_pid) and time.time() < deadline:
        time.sleep(0.05)
    assert not alive(child_pid)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_job_of_a_queue_that_was_killed_alone_is_ended_first(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = home(worker, tmp_path / "one", [job(worker, "well", COUNT, 1, 0, 0)], monkeypatch)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    orphan = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(found.code)}, start_new_session=True
    )
    stranger = subprocess.Popen(command, start_new_session=True)
    try:
        found.running.write_text(str(stranger.pid))
        worker.end_orphan(found)
        assert stranger.poll() is None
        found.running.write_text(str(orphan.pid))
        worker.main(found)
        assert orphan.wait(10) == -signal.SIGKILL
        assert not found.running.exists()
    finally:
        for process in (orphan, stranger):
            process.kill()
            process.wait()


def test_another_machine_takes_up_what_the_first_left(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job(worker, "well", COUNT, 3, 0, 0), job(worker, "late", COUNT, 2, 0, 0, least=3600)]
    first = home(worker, tmp_path / "one", jobs, monkeypatch)
    worker.main(first)
    second = home(worker, tmp_path / "two", jobs, monkeypatch, seconds=7200)
    for path in first.records.iterdir():
        (second.records / path.name).write_bytes(path.read_bytes())
    (second.records / "well.json").unlink()  # if it ran again, this would be there again
    worker.main(second)
    assert ended(second, worker) == [("well", "done"), ("late", "no time"), ("late", "done")]
    assert not (second.records / "well.json").exists()
    other = [job(worker, "well", COUNT, 4, 0, 0)]  # the job has changed: it is another one
    third = home(worker, tmp_path / "three", other, monkeypatch)
    (third.records / "gpu-queue.json").write_bytes(second.record.read_bytes())
    worker.main(third)
    assert ended(third, worker)[-1] == ("well", "done")
    assert (third.records / "well.json").exists()


def test_a_job_runs_again_where_other_weights_were_trained(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quality, speed = job(worker, "quality", COUNT, 2, 0, 0), job(worker, "speed", COUNT, 2, 0, 0)
    found = home(worker, tmp_path / "one", [quality, speed], monkeypatch)
    about = {"job": "quality", "command": quality.command, "machine": "an earlier one"}
    found.record.write_text(json.dumps({"entries": [{**about, "status": "done", "seconds": 1.0}]}))
    (found.records / "quality-0123abcd.json").write_text("[]")  # brought along, too
    time.sleep(0.02)
    (found.path / ".records").touch()
    time.sleep(0.02)
    assert worker.is_done(found, quality)
    (found.records / "quality-4567cdef.json").write_text("[]")  # begun here, aside
    assert not worker.is_done(found, quality)
    worker.main(found)
    assert ended(found, worker)[1:] == [("quality", "done"), ("speed", "done")]


def test_only_one_queue_works_in_a_folder(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = home(worker, tmp_path / "one", [job(worker, "well", COUNT, 1, 0, 0)], monkeypatch)
    with worker.alone(found) as first:
        assert first
        worker.main(found)  # leaves at once
    assert not found.done.exists()
    worker.main(found)
    assert found.done.exists()


# ------------------------------------------------------------------------------------------------
# the lease


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A pack whose code is the queue with two slow jobs, and no wheels."""
    pack, code = tmp_path / "pack", tmp_path / "source" / "benchmarks" / "gpu"
    code.mkdir(parents=True)
    pack.mkdir()
    (code / "worker.py").write_bytes((GPU / "worker.py").read_bytes())
    jobs = (GPU / "jobs.py").read_text().partition("\nJOBS = (")[0]
    rows = f"\nCOUNT = {COUNT!r}.replace(chr(123), chr(123) * 2).replace(chr(125), chr(125) * 2)\n"
    rows += (
        "import shlex\nJOBS = tuple(\n    Job(name, shlex.join(['-c', COUNT]) + ' {records}/' +"
        " name + '.json 4 0.4 0',"
    )
    rows += " name + '.json', most=60, least=0)\n    for name in ('correct', 'shapes')\n)\n"
    (code / "jobs.py").write_text(jobs + rows)
    with tarfile.open(pack / "code.tar.gz", "w:gz") as file:
        file.add(tmp_path / "source" / "benchmarks", arcname="benchmarks")
    with tarfile.open(pack / "data.tar.xz", "w:xz"):
        pass
    for folder in ("records", "wheels", "minilm"):
        (pack / folder).mkdir()
    about = {"commit": "c0ffee", "tasks": ["sst2"], "made_up": False}
    (pack / "pack.json").write_text(json.dumps(about))
    return pack


def call(packed: Path, wait: float, *more: str) -> subprocess.CompletedProcess[str]:
    """One call, as on the machine."""
    where = [
        "--pack",
        packed,
        "--home",
        packed.parent / "home",
        "--out",
        packed.parent / "out",
        "--jobs",
        "correct",
        "shapes",
    ]
    command = [sys.executable, str(GPU / "lease.py"), str(wait), *map(str, where), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_calls_end_and_the_queue_runs_on(packed: Path) -> None:
    begin = time.time()
    first = call(packed, 0.1)
    assert first.returncode == 3, first.stderr
    assert "THE QUEUE RUNS ON" in first.stdout
    last = call(packed, 60)
    assert last.returncode == 0, last.stderr
    assert "QUEUE DONE" in last.stdout
    assert time.time() - begin < 60
    with tarfile.open(packed.parent / "out" / "gpu.tar.gz") as file:
        names = set(file.getnames())
        rows = json.load(file.extractfile("records/shapes.json"))  # type: ignore[arg-type]
    assert {
        "records/correct.json",
        "records/gpu-queue.json",
        "logs/correct.log",
        "queue.log",
    } <= names
    assert rows == [0, 1, 2, 3]
    again = call(packed, 60)
    assert again.returncode == 0
    entries = json.loads((packed.parent / "home" / "records" / "gpu-queue.json").read_text())[
        "entries"
    ]
    assert [(entry["job"], entry["status"]) for entry in entries] == [
        ("correct", "done"),
        ("shapes", "done"),
    ]


@pytest.mark.parametrize("after", [0.0, 0.7, 1.6])
def test_a_killed_queue_goes_on_and_measures_nothing_twice(packed: Path, after: float) -> None:
    call(packed, 0.1)
    time.sleep(after)
    folder = packed.parent / "home"
    for process in Path(
        "/proc"
    ).iterdir():  # the queue and its job, as when a machine is taken away
        if process.name.isdigit() and str(folder) in command_line(process):
            os.kill(int(process.name), signal.SIGKILL)
    rows = sum(
        len(json.loads(path.read_text() or "[]")) for path in folder.glob("records/[cs]*.json")
    )
    last = call(packed, 60)
    assert last.returncode == 0, last.stderr
    for name in ("correct", "shapes"):
        assert json.loads((folder / "records" / f"{name}.json").read_text()) == [0, 1, 2, 3]
    assert rows < 8, "it was killed too late to show anything"


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_a_killed_preparation_is_repeated(
    lease: ModuleType, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = lease.arguments(["0", "--pack", str(packed), "--home", str(packed.parent / "home")])
    found = lease.Home(args.home)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(lease, "unpack_data", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lease.prepare(args, found, 100.0)
    lease.prepare(args, found, 200.0)
    assert (
        json.loads(found.settings.read_text())["deadline"] == 100.0
    )  # time counts from the first call
    assert (found.code / "benchmarks" / "gpu" / "worker.py").is_file()
    assert (found.path / ".wheels").exists()
    shutil.rmtree(packed)  # the tree may be written anew: nothing of it is needed any more
    lease.prepare(args, found, 300.0)


def test_a_lease_without_a_fit_pack_says_what_is_wrong(
    lease: ModuleType, packed: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="a pack must be there, built by benchmarks/gpu/pack"):
        lease.main(["0", "--pack", str(tmp_path / "none"), "--home", str(tmp_path / "home")])
    about = json.loads((packed / "pack.json").read_text())
    (packed / "pack.json").write_text(json.dumps({**about, "made_up": True}))
    with pytest.raises(SystemExit, match="made-up rows"):
        lease.main(["0", "--pack", str(packed), "--home", str(tmp_path / "home")])


def test_jobs_without_their_data_are_not_asked_for(lease: ModuleType) -> None:
    jobs = {one.name: lease.has_data(one.command, ["sst2"]) for one in lease.JOBS}
    assert [name for name, there in jobs.items() if not there] == ["trec", "translation"]


# ------------------------------------------------------------------------------------------------
# the jobs


@pytest.mark.parametrize("small", [False, True], ids=["full", "rehearsal"])
def test_every_job_is_a_command_that_its_script_takes(lease: ModuleType, small: bool) -> None:
    """An option that a script has lost would cost a lease."""
    names = dict.fromkeys(("data", "model", "work", "records"), "x") | {
        "minutes": "1",
        "device": "cpu",
    }
    for one in lease.JOBS:
        words = [word.format(**names) for word in shlex.split(f"{one.command} {one.tiny * small}")]
        if words[0] == "-m":
            assert words[1] == "pytest"
            assert (ROOT / words[-1]).is_dir()
            continue
        args = script(ROOT / words[0]).arguments(words[1:])
        assert f"{{records}}/{one.record}".format(**names) == str(args.out)


def test_the_most_telling_jobs_come_first_and_fit_the_time_that_is_lent(lease: ModuleType) -> None:
    first = lease.JOBS[:3]
    assert [one.name for one in first] == ["correct", "quality", "speed"]
    lent = 60 * lease.arguments([]).minutes
    assert sum(one.most for one in first) < lent - 8 * 60  # the rest for the shapes
    assert all(one.last_row < one.least <= one.most for one in lease.JOBS)


# ------------------------------------------------------------------------------------------------
# the pack


@pytest.fixture(scope="module")
def packing() -> ModuleType:
    return script(GPU / "packing.py")


def test_a_pack_above_the_limit_is_refused(
    packing: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "one.whl").write_bytes(b"0" * 1000)
    about = {"commit": "c0ffee", "tasks": ["sst2"], "made_up": False}
    assert packing.weigh(tmp_path, 1000, about) == 1
    out, error = capsys.readouterr()
    assert "1,000 bytes" in out
    assert "Too large" in error
    assert packing.weigh(tmp_path, packing.LIMIT, about) == 0


def test_the_code_of_a_pack_runs_without_the_checkout(packing: ModuleType, tmp_path: Path) -> None:
    packing.pack_code(tmp_path / "code.tar.gz")
    with tarfile.open(tmp_path / "code.tar.gz") as file:
        names = file.getnames()
    assert {
        "headprune/__init__.py",
        "benchmarks/gpu/worker.py",
        "recipes/trec-minilm.yaml",
        "pyproject.toml",
    } <= {*names}
    assert not any(name.startswith("benchmarks/records") for name in names)


def test_rows_are_made_up_where_there_are_no_data(packing: ModuleType, tmp_path: Path) -> None:
    packing.pack_data(tmp_path / "data.tar.xz", None, packing.TASKS)
    lease = script(GPU / "lease.py")
    lease.unpack_data(tmp_path / "data.tar.xz", tmp_path / "data", True)
    for task, columns in {
        "sst2": {"sentence", "label"},
        "trec": {"text", "label"},
        "multi30k": {"en", "de"},
    }.items():
        for split in ("train", "validation", "test"):
            rows = (tmp_path / "data" / task / f"{split}.jsonl").read_text().splitlines()
            assert len(rows) == (640 if task == "trec" else 64)
            assert set(json.loads(rows[0])) == columns


def test_data_are_found_where_they_are_named(
    packing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADPRUNE_DATA", str(tmp_path))
    assert packing.found_data(["sst2"]) == tmp_path
    with pytest.raises(SystemExit, match=r"must hold sst2/train\.jsonl"):
        packing.main(["--out", str(tmp_path / "pack")])


def test_newer_records_travel(
    packing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "ROOT", tmp_path)
    committed, newer = tmp_path / "benchmarks" / "records", tmp_path / "runs" / "gpu" / "records"
    for folder in (committed, newer):
        folder.mkdir(parents=True)
        (folder / "tradeoff-sst2-cuda.json").write_text(folder.parent.name)
    (committed / "gpu-shapes.json").write_text("{}")
    (committed / "tradeoff-sst2-cpu.json").write_text("{}")
    packing.pack_records(tmp_path / "records")
    assert {path.name: path.read_text() for path in (tmp_path / "records").iterdir()} == {
        "tradeoff-sst2-cuda.json": "gpu",
        "gpu-shapes.json": "{}",
    }


def test_every_wheel_is_pinned_and_every_version_of_the_machine_said() -> None:
    wheels = (GPU / "wheels.txt").read_text()
    machine = (GPU / "machine.txt").read_text()
    assert all("==" in line for line in wheels.splitlines() if line and line[0] != "#")
    assert {"torch==2.11.0", "transformers==5.17.0"} <= {*machine.splitlines()}


@pytest.mark.long
def test_the_study_is_rehearsed_on_the_cpu() -> None:
    subprocess.run(["make", "gpu-rehearsal"], cwd=ROOT, check=True, timeout=1800)
