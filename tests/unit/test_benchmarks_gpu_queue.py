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

#: Adds rows to its record until there are so many, with a pause after each, as a study does.
COUNT = """
import json, sys, time, pathlib
path, rows, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
done = json.loads(path.read_text()) if path.is_file() else []
while len(done) < rows:
    done.append(len(done))
    path.write_text(json.dumps(done))
    time.sleep(pause)
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
        job(worker, "well", COUNT, 3, 0),
        job(worker, "late", COUNT, 3, 0, least=3600),
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


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


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
    monkeypatch.setattr(worker, "TURNS", 1)
    found = home(worker, tmp_path / "one", [job(worker, "parent", code, most=2)], monkeypatch)
    worker.main(found)
    assert ended(found, worker) == [("parent", "overran")]
    child_pid = int((found.records / "parent.json").read_text())
    deadline = time.time() + 10
    while alive(child_pid) and time.time() < deadline:
        time.sleep(0.05)
    assert not alive(child_pid)


def test_the_job_of_a_queue_that_was_killed_alone_is_ended_first(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = home(worker, tmp_path / "one", [job(worker, "well", COUNT, 1, 0)], monkeypatch)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = {**os.environ, "PYTHONPATH": str(found.code)}
    orphan = subprocess.Popen(command, env=ours, start_new_session=True)
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


def test_another_machine_does_what_the_first_did_not(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job(worker, "well", COUNT, 3, 0), job(worker, "late", COUNT, 2, 0, least=3600)]
    first = home(worker, tmp_path / "one", jobs, monkeypatch)
    worker.main(first)
    second = home(worker, tmp_path / "two", jobs, monkeypatch, seconds=7200)
    shutil.copy(first.record, second.record)
    worker.main(second)
    assert ended(second, worker) == [("well", "done"), ("late", "no time"), ("late", "done")]
    assert not (second.records / "well.json").exists(), "it ran again"
    other = [job(worker, "well", COUNT, 4, 0)]  # another command is another job
    third = home(worker, tmp_path / "three", other, monkeypatch)
    shutil.copy(second.record, third.record)
    worker.main(third)
    assert ended(third, worker)[-1] == ("well", "done")
    assert (third.records / "well.json").exists()


def test_a_job_runs_again_where_other_weights_were_trained(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quality, speed = job(worker, "quality", COUNT, 2, 0), job(worker, "speed", COUNT, 2, 0)
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


def test_only_one_queue_works_in_a_folder(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = home(worker, tmp_path / "one", [job(worker, "well", COUNT, 1, 0)], monkeypatch)
    with worker.alone(found) as first:
        assert first
        worker.main(found)  # ends at once
    assert not found.done.exists()
    worker.main(found)
    assert found.done.exists()


# ----------------------------------------------------------------------------------------------
# the lease


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A pack whose code is the queue with two slow jobs, and no wheels."""
    pack, code = tmp_path / "pack", tmp_path / "source" / "benchmarks" / "gpu"
    code.mkdir(parents=True)
    pack.mkdir()
    shutil.copy(GPU / "worker.py", code)
    jobs = (GPU / "jobs.py").read_text().partition("\nJOBS = (")[0]
    count = COUNT.replace("{", "{{").replace("}", "}}")
    slow = f"""
import shlex
COUNT = {count!r}
JOBS = tuple(
    Job(name, shlex.join(["-c", COUNT]) + f" {{{{records}}}}/{{name}}.json 4 0.2", f"{{name}}.json",
        most=60, least=0)
    for name in ("correct", "shapes")
)
"""
    (code / "jobs.py").write_text(jobs + slow)
    with tarfile.open(pack / "code.tar.gz", "w:gz") as file:
        file.add(tmp_path / "source" / "benchmarks", arcname="benchmarks")
    with tarfile.open(pack / "data.tar.xz", "w:xz"):
        pass
    for folder in ("records", "wheels", "minilm"):
        (pack / folder).mkdir()
    about = {"commit": "c0ffee", "tasks": ["sst2"], "made_up": False}
    (pack / "pack.json").write_text(json.dumps(about))
    return pack


def call(packed: Path, wait: float) -> subprocess.CompletedProcess[str]:
    """One call, as on the machine."""
    where = f"--pack {packed} --home {packed.parent}/home --out {packed.parent}/out"
    words = shlex.split(f"{wait} {where} --jobs correct shapes")
    command = [sys.executable, str(GPU / "lease.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_calls_end_and_the_queue_runs_on(packed: Path) -> None:
    first = call(packed, 0.1)
    assert first.returncode == 3, first.stderr
    assert "THE QUEUE RUNS ON" in first.stdout
    last = call(packed, 60)
    assert last.returncode == 0, last.stderr
    assert "QUEUE DONE" in last.stdout
    with tarfile.open(packed.parent / "out" / "gpu.tar.gz") as file:
        names = set(file.getnames())
        rows = json.load(file.extractfile("records/shapes.json"))  # type: ignore[arg-type]
    assert names >= {"records/correct.json", "records/gpu-queue.json", "logs/correct.log"}
    assert rows == [0, 1, 2, 3]
    assert call(packed, 60).returncode == 0
    record = json.loads((packed.parent / "home" / "records" / "gpu-queue.json").read_text())
    done = [(entry["job"], entry["status"]) for entry in record["entries"]]
    assert done == [("correct", "done"), ("shapes", "done")]


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_a_killed_queue_goes_on_and_measures_nothing_twice(packed: Path) -> None:
    """The queue and its job are killed, as when a machine is taken away."""
    call(packed, 0.1)
    time.sleep(0.5)
    folder = packed.parent / "home"
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and str(folder) in command_line(process):
            os.kill(int(process.name), signal.SIGKILL)
    found = [json.loads(path.read_text() or "[]") for path in folder.glob("records/[cs]*.json")]
    assert sum(map(len, found)) < 8, "it was killed too late to show anything"
    last = call(packed, 60)
    assert last.returncode == 0, last.stderr
    for name in ("correct", "shapes"):
        assert json.loads((folder / "records" / f"{name}.json").read_text()) == [0, 1, 2, 3]


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
    # Time counts from the first call.
    assert json.loads(found.settings.read_text())["deadline"] == 100.0
    assert (found.code / "benchmarks" / "gpu" / "worker.py").is_file()
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


# ----------------------------------------------------------------------------------------------
# the jobs


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


def test_the_most_telling_jobs_come_first_and_fit_the_time_that_is_lent(lease: ModuleType) -> None:
    first = lease.JOBS[:3]
    assert [one.name for one in first] == ["correct", "quality", "speed"]
    lent = 60 * lease.arguments([]).minutes
    assert sum(one.most for one in first) < lent - 8 * 60  # the rest is for the shapes
    assert all(one.last_row < one.least <= one.most for one in lease.JOBS)
    without_data = [one.name for one in lease.JOBS if not lease.has_data(one.command, ["sst2"])]
    assert without_data == ["trec", "translation"]


# ----------------------------------------------------------------------------------------------
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
    assert "Too large" in capsys.readouterr().err
    assert packing.weigh(tmp_path, packing.LIMIT, about) == 0


def test_a_pack_holds_the_code_that_jobs_need(packing: ModuleType, tmp_path: Path) -> None:
    packing.pack_code(tmp_path / "code.tar.gz")
    with tarfile.open(tmp_path / "code.tar.gz") as file:
        names = set(file.getnames())
    assert names >= {"headprune/__init__.py", "benchmarks/gpu/worker.py", "pyproject.toml"}
    assert "recipes/trec-minilm.yaml" in names
    assert not any(name.startswith("benchmarks/records") for name in names)


def test_rows_are_made_up_where_there_are_no_data(
    packing: ModuleType, lease: ModuleType, tmp_path: Path
) -> None:
    packing.pack_data(tmp_path / "data.tar.xz", None, packing.TASKS)
    lease.unpack_data(tmp_path / "data.tar.xz", tmp_path / "data", True)
    columns = {"sst2": {"sentence", "label"}, "trec": {"text", "label"}, "multi30k": {"en", "de"}}
    for task, wanted in columns.items():
        for split in ("train", "validation", "test"):
            rows = (tmp_path / "data" / task / f"{split}.jsonl").read_text().splitlines()
            assert len(rows) == (640 if task == "trec" else 64)
            assert set(json.loads(rows[0])) == wanted


def test_data_are_found_where_they_are_named(
    packing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADPRUNE_DATA", str(tmp_path))
    assert packing.found_data(["sst2"]) == tmp_path
    with pytest.raises(SystemExit, match=r"must hold sst2/train\.jsonl"):
        packing.main(["--out", str(tmp_path / "pack")])


def test_newer_records_are_packed(
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
    found = {path.name: path.read_text() for path in (tmp_path / "records").iterdir()}
    assert found == {"tradeoff-sst2-cuda.json": "gpu", "gpu-shapes.json": "{}"}


@pytest.mark.long
def test_the_study_is_rehearsed_on_the_cpu() -> None:
    subprocess.run(["make", "gpu-rehearsal"], cwd=ROOT, check=True, timeout=1800)
