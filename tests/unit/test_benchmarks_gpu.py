"""The GPU study: its rows, calls on a pretended GPU, a tiny run, its page and its queue."""

import json
import shlex
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from headprune.bench.latency import Effort
from tests.benchmark_runs import record_of
from tests.pretended_cuda import CUDA as PRETENDED
from tests.pretended_cuda import PretendedCuda
from tests.scripts import BENCHMARKS, ROOT, benchmark, script

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(scope="module")
def gpu_time():
    benchmark("studies")  # puts the folder on the path
    return benchmark("gpu_time")


@pytest.fixture(scope="module")
def shapes():
    return script(BENCHMARKS / "gpu" / "shapes.py")


def measured(gpu_time, monkeypatch, calls, gpu, why=None, graphed=False):
    """Rows of models whose latencies and times of the GPU are given, in milliseconds."""

    def seconds(values):
        return np.tile(np.array(values) / 1000, (4, 1))

    monkeypatch.setattr(gpu_time, "warm_up", lambda *_: None)
    monkeypatch.setattr(gpu_time, "state", lambda device: {"sm_mhz": 1980})
    monkeypatch.setattr(gpu_time, "latencies", lambda *_: seconds(calls))
    monkeypatch.setattr(gpu_time, "gpu_seconds", lambda *_: seconds(gpu))
    monkeypatch.setattr(gpu_time, "captured", lambda *_: (None if why else [print], why))
    how = gpu_time.Measuring(Effort(0.0, 1, 4, 4))
    return gpu_time.measured([print] * len(calls), CUDA, 32, 128, how, graphed=graphed)


def test_a_row_says_its_speed_on_the_gpu_alone_and_what_limits_the_call(gpu_time, monkeypatch):
    rows = measured(gpu_time, monkeypatch, [1.8, 1.8, 1.8], [0.4, 0.3, 0.2])
    assert [row["call"]["ratio"] for row in rows] == pytest.approx([1.0, 1.0])
    assert [row["gpu"]["ratio"] for row in rows] == pytest.approx([4 / 3, 2.0])
    assert rows[0]["gpu"]["original_p50"] == pytest.approx(0.4e-3)
    assert {row["bound"] for row in rows} == {"launch"}
    assert rows[0]["state"] == [{"sm_mhz": 1980}] * 2
    # The GPU limits a call where both models keep it busy.
    busy, small = measured(gpu_time, monkeypatch, [7.0, 5.0, 1.8], [7.0, 5.0, 1.0])
    assert (busy["bound"], small["bound"]) == ("gpu", "launch")
    assert busy["call"]["ratio"] == busy["gpu"]["ratio"] == pytest.approx(1.4)
    (row,) = measured(gpu_time, monkeypatch, [2.0, 1.0], [2.0, 1.0], why="it waits")
    assert row["no_graph"] == "it waits"
    assert not {"gpu", "bound"} & row.keys()
    assert row["call"]["rounds"] == 4
    # Python's time lies between the events of compiled code.
    (row,) = measured(gpu_time, monkeypatch, [0.4, 0.2], [0.4, 0.2], graphed=True)
    assert row["events"]["ratio"] == pytest.approx(2.0)
    assert not {"gpu", "bound"} & row.keys()


def call_of(shapes, place, dtype, device):
    """A call of a tiny model, such as of ``"llama-1b decode"``."""
    name, _, phase = place.partition(" ")
    cell = shapes.Cell(dtype, "eager", "sdpa", False, 2, 8)
    model = shapes.built(shapes.SUBJECTS[name], dtype, device, small=True)
    kind = getattr(torch, dtype)
    return shapes.call_of(shapes.Place(name, phase, cell), device, kind)(model)


@pytest.mark.parametrize(
    "place", ["bert-base forward", "vit-b forward", "llama-1b prefill", "llama-1b decode"]
)
def test_a_call_never_waits_and_mixes_no_devices(shapes, place):
    """A call that waits, or copies from main memory, cannot be captured."""
    with PretendedCuda() as gpu, torch.inference_mode():
        run = call_of(shapes, place, "bfloat16", PRETENDED)
        run()
        gpu.forget()
        run()
        assert gpu.mismatches == [], gpu.report()
        assert gpu.waits == [], gpu.report()
        assert gpu.uploads == [], gpu.report()


def test_every_kind_of_model_is_measured_and_what_failed_is_tried_again(
    gpu_time, shapes, tmp_path, monkeypatch
):
    out = tmp_path / "gpu-shapes.json"
    command = f"--device cpu --seconds 0 --shares 0.5 --out {out}"
    rows = record_of(shapes, f"{command} --small")["rows"]
    assert [row for row in rows if "error" in row] == []
    assert rows[0]["what"] == "ceiling"
    for name in ("copy_bytes", *(f"{name}_flops" for name in gpu_time.PRECISIONS)):
        assert rows[0][name] > 1e6
    eager = [place for place in shapes.tiny_places() if place.cell.code == "eager"]
    measured = [shapes.Place(r["subject"], r["phase"], shapes.Cell.of(r)) for r in rows[1:]]
    assert measured == [place for place in eager for _ in range(2)]
    assert [row["neurons"] for row in rows[1:]] == [1.0, 0.5] * len(eager)
    assert {place.subject for place in eager} >= {"bert-base", "minilm", "vit-b", "llama-1b"}
    for row in rows[1:]:
        assert all(whole > cut for whole, cut in row["work"].values())
        assert row["backends"] == ["flash"]

    broken = Mock(side_effect=RuntimeError("out of memory\nmore"))
    out.write_text(json.dumps({**json.loads(out.read_text()), "rows": rows[:-4]}))
    with monkeypatch.context() as patched:
        patched.setattr(shapes, "compared", broken)
        failed = record_of(shapes, f"{command} --small")["rows"]
    assert failed[:-2] == rows[:-4]
    assert {row["error"] for row in failed[-2:]} == {"RuntimeError: out of memory"}
    again = record_of(shapes, f"{command} --small")["rows"]
    assert again[:-4] == rows[:-4]
    assert not any("error" in row for row in again)
    with pytest.raises(SystemExit, match="record of another run, with other small"):
        record_of(shapes, command)


@pytest.fixture(scope="module")
def page():
    return benchmark("gpu_page")


def cell(call, gpu, batch=32):
    """A row in bf16 of a latency and of a time of the GPU, of the whole and of the cut model."""
    row = {"what": "gpu", "precision": "bfloat16", "code": "eager", "attention": "sdpa"}
    row |= {"cold": False, "batch": batch, "tokens": 128, "bound": "launch"}
    times = {"call": call, "gpu": gpu} if gpu else {"call": call}
    return row | {
        which: {"original_p50": whole, "pruned_p50": cut} for which, (whole, cut) in times.items()
    }


def test_without_a_record_the_page_claims_nothing(page, tmp_path):
    text = page.page(tmp_path)
    assert text.rstrip().endswith(f"On a GPU: {page.studies.NO_GPU}.")
    assert "times as fast" not in text
    rehearsed = {"device": {"name": "cpu, standing in for a GPU", "type": "cpu"}, "checks": []}
    (tmp_path / "gpu-correct.json").write_text(json.dumps(rehearsed))
    assert page.page(tmp_path) == text, "what a CPU did says nothing of a GPU"


def test_without_a_busy_cell_the_headline_is_the_one_nearest_to_the_time_of_the_gpu(page):
    launch, near = cell((1.8, 1.8), (0.4, 0.33)), cell((1.8, 1.8), (1.5, 1.2), batch=64)
    assert page.headline({"rows": [launch, near]}) == [near]
    assert page.headline({"rows": [cell((1.8, 1.8), None)]}) == []


#: Adds a row; ends as a study whose time was over until there are two.
TWICE = """
import json, sys, pathlib
path = pathlib.Path(sys.argv[1])
done = json.loads(path.read_text()) if path.is_file() else []
path.write_text(json.dumps([*done, len(done)]))
sys.exit(75 if len(done) + 1 < 2 else 0)
"""


@pytest.fixture(scope="module")
def worker():
    return script(BENCHMARKS / "gpu" / "worker.py")


def job(worker, name, code, **more):
    """A few lines in place of a benchmark, which get the path of their record."""
    words = shlex.join(["-c", code, f"@records@/{name}.json"])
    command = words.replace("{", "{{").replace("}", "}}").replace("@records@", "{records}")
    return worker.Job(name, command, f"{name}.json", **{"most": 30, "least": 0, **more})


def test_every_end_of_a_job_is_noted_and_the_next_begins(worker, tmp_path, monkeypatch):
    well = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('[]')"
    jobs = (
        job(worker, "fails", "import sys; print('why'); sys.exit(3)"),
        job(worker, "hangs", "import time; time.sleep(60)", most=1),
        job(worker, "twice", TWICE),
        job(worker, "well", well),
        job(worker, "late", well, least=3600),
    )
    monkeypatch.setattr(worker, "JOBS", jobs)
    monkeypatch.setattr(worker, "TURNS", 2)
    found = worker.Home(tmp_path)
    for folder in (found.code, found.logs, found.records):
        folder.mkdir()
    settings = {"deadline": time.time() + 120, "commit": "c0ffee", "machine": "one"}
    settings |= {"device": "cpu", "rehearsal": False, "jobs": [one.name for one in jobs]}
    found.settings.write_text(json.dumps(settings))
    worker.main(found)
    assert [(e["job"], e["status"], e.get("code")) for e in worker.entries_of(found)] == [
        ("fails", "failed", 3),  # it would fail again
        ("hangs", "overran", None),
        ("twice", "goes on", 75),
        ("well", "done", 0),  # before anybody's second turn
        ("hangs", "overran", None),
        ("twice", "done", 0),
        ("late", "no time", None),
    ]
    assert "why" in (found.logs / "fails.log").read_text()
    assert json.loads((found.records / "twice.json").read_text()) == [0, 1]
    assert not (found.records / "late.json").exists()
    assert found.done.exists()


@pytest.mark.parametrize("small", [False, True], ids=["full", "rehearsal"])
def test_every_job_is_a_command_that_its_script_takes(worker, small):
    """An option that a script has lost would cost a lease."""
    names = dict.fromkeys(("data", "model", "work", "records"), "x")
    names |= {"minutes": "1", "device": "cpu"}
    for one in worker.JOBS:
        words = [word.format(**names) for word in shlex.split(f"{one.command} {one.tiny * small}")]
        if words[0] == "-m":
            assert words[1] == "pytest"
            assert (ROOT / words[-1]).is_dir()
            continue
        module = script(ROOT / words[0])
        args = module.arguments(words[1:])
        if one.name == "judged":
            check_parts(module, args, one.record.format(**names))
            continue
        assert f"{{records}}/{one.record}".format(**names) == str(args.out)


def check_parts(at_once, args, record):
    """Every part of the studies is a command that its script takes, too."""
    assert record in {part.record("cpu") for part in at_once.PARTS}
    for part in at_once.PARTS:
        for options in at_once.OPTIONS[part.study]:
            words = at_once.command(part, options, args, Path("work"), Path("out.json"), minutes=1)
            taken = script(Path(words[1])).arguments(words[2:])
            assert getattr(taken, {"tuned": "tuned", "draw": "draws"}[part.key]) == [part.number]


def test_parts_of_a_study_are_divided_and_joined(tmp_path):
    at_once = script(ROOT / "benchmarks" / "gpu" / "at_once.py")
    rows = [{"tuned": 0, "draw": 0}, {"tuned": 0, "draw": 1}, {"tuned": 1, "draw": 0}]
    whole = {"0": {"weights": "a"}, "1": {"weights": "b"}}
    path = tmp_path / "regret-trec-cpu.json"
    path.write_text(json.dumps({"task": "trec", "whole": whole, "rows": rows}))
    outs = []
    for number in (0, 1, 2):
        outs.append(tmp_path / f"{number}.json")
        at_once.divide(at_once.Part("regret", "trec", number), path, outs[-1])
    assert [len(json.loads(out.read_text())["rows"]) for out in outs] == [2, 1, 0]
    at_once.join(outs, path)
    assert json.loads(path.read_text()) == {"task": "trec", "whole": whole, "rows": rows}
    # The same seed gave other weights in one of the parts.
    outs[2].write_text(json.dumps({"whole": {"0": {"weights": "c"}}, "rows": []}))
    with pytest.raises(ValueError, match="seed 0"):
        at_once.join(outs, path)


@pytest.mark.long
def test_the_study_is_rehearsed_on_the_cpu():
    subprocess.run(["make", "gpu-rehearsal"], cwd=ROOT, check=True, timeout=1800)
