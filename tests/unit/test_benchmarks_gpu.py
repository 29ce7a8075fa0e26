"""The GPU study: measurements with a GPU of stand-ins, with a pretended one and on the CPU; its page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headprune.bench.latency import Effort
from tests.benchmark_runs import record_of
from tests.pretended_cuda import CUDA as PRETENDED
from tests.pretended_cuda import PretendedCuda
from tests.scripts import BENCHMARKS, benchmark, script

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(scope="module")
def gpu_time() -> ModuleType:
    benchmark("studies")  # puts the folder on the path
    return benchmark("gpu_time")


@pytest.fixture(scope="module")
def shapes() -> ModuleType:
    return script(BENCHMARKS / "gpu" / "shapes.py")


# ----------------------------------------------------------------------------------------------
# a GPU of stand-ins


class StandIn:
    """Time that passes as calls say, and the parts of ``torch.cuda`` that a measurement uses."""

    def __init__(self) -> None:
        self.now = 0.0  # milliseconds of the GPU
        self.launching = 0.0  # milliseconds that a call takes Python

    def call(self, milliseconds: float, launch: float = 0.0) -> Callable[[], None]:
        def run() -> None:
            self.now += milliseconds
            self.launching += launch

        return run

    def patch(self, monkeypatch: pytest.MonkeyPatch, gpu_time: ModuleType) -> None:
        stand_in = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = stand_in.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Graph:
            def replay(self) -> None:
                self.run()

        @contextmanager
        def graph(found: Any) -> Iterator[None]:
            before = stand_in.now
            yield
            took = stand_in.now - before
            found.run = stand_in.call(took)
            stand_in.now = before  # what is captured does not run

        @contextmanager
        def stream(_: Any) -> Iterator[None]:
            yield

        quiet = SimpleNamespace(wait_stream=lambda other: None)
        parts = {"Event": Event, "CUDAGraph": Graph, "graph": graph, "stream": stream}
        parts |= {"Stream": lambda: quiet, "current_stream": lambda: quiet}
        parts |= {"synchronize": lambda *_: None}
        for name, value in parts.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(gpu_time, "synchronize", lambda device: None)
        monkeypatch.setattr(gpu_time, "in_turn", self.in_turn)
        monkeypatch.setattr(gpu_time, "state", lambda device: {"sm_mhz": 1980})
        monkeypatch.setattr(gpu_time, "WARM_UP", 0.0)
        monkeypatch.setattr(gpu_time, "perf_counter", self.clock)

    def clock(self) -> float:
        return (self.now + self.launching) / 1000

    def in_turn(self, runs: Any, device: torch.device, effort: Effort) -> np.ndarray:
        """Latency: the longer of Python's and the GPU's time."""

        def latency(run: Callable[[], None]) -> float:
            before = self.now, self.launching
            run()
            return max(self.now - before[0], self.launching - before[1]) / 1000

        return np.array([[latency(run) for run in runs] for _ in range(effort.min_rounds)])


@pytest.fixture
def clock(gpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    found.patch(monkeypatch, gpu_time)
    return found


def measuring(gpu_time: ModuleType, cold: bool = False) -> Any:
    return gpu_time.Measuring(Effort(0.0, 1, 4, 4), cold=cold)


def test_a_launch_bound_cell_shows_its_speed_on_the_gpu_alone(
    gpu_time: ModuleType, clock: StandIn
) -> None:
    runs = [clock.call(0.4, launch=1.8), clock.call(0.3, launch=1.8), clock.call(0.2, launch=1.8)]
    rows = gpu_time.measured(runs, CUDA, 32, 128, measuring(gpu_time))
    assert [row["call"]["ratio"] for row in rows] == pytest.approx([1.0, 1.0])
    assert [row["gpu"]["ratio"] for row in rows] == pytest.approx([4 / 3, 2.0])
    assert rows[0]["gpu"]["original_p50"] == pytest.approx(0.4e-3)
    assert {row["bound"] for row in rows} == {"launch"}
    assert rows[0]["state"] == [{"sm_mhz": 1980}] * 2


def test_a_cell_is_gpu_bound_where_both_models_keep_it_busy(
    gpu_time: ModuleType, clock: StandIn
) -> None:
    runs = [clock.call(7.0, 1.8), clock.call(5.0, 1.8), clock.call(1.0, 1.8)]
    busy, small = gpu_time.measured(runs, CUDA, 1, 1, measuring(gpu_time))
    assert (busy["bound"], small["bound"]) == ("gpu", "launch")
    assert busy["call"]["ratio"] == busy["gpu"]["ratio"] == pytest.approx(1.4)


def test_what_cannot_be_captured_keeps_its_latency(gpu_time: ModuleType, clock: StandIn) -> None:
    calls = [0]

    def waits() -> None:
        calls[0] += 1
        clock.now += 1.0
        if calls[0] > 7:  # after the rounds of the latency: while it is captured
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    (row,) = gpu_time.measured([clock.call(2.0), waits], CUDA, 1, 1, measuring(gpu_time))
    assert row["no_graph"] == "RuntimeError: operation not permitted when stream is capturing"
    assert not {"gpu", "bound"} & row.keys()
    assert row["call"]["rounds"] == 4


def test_the_cache_is_overwritten_before_every_cold_call(
    gpu_time: ModuleType, clock: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[None] = []
    dirt = SimpleNamespace(zero_=lambda: flushed.append(None))
    monkeypatch.setattr(gpu_time.torch, "empty", lambda *_, **__: dirt)
    for measure in (gpu_time.gpu_seconds, gpu_time.latencies):
        flushed.clear()
        runs = [clock.call(0.1), clock.call(0.2)]
        times = measure(runs, CUDA, measuring(gpu_time, cold=True))
        assert len(flushed) == 2 * 5, "every call of four rounds and of the one to warm up"
        assert np.median(times, 0) == pytest.approx([1e-4, 2e-4])
    flushed.clear()
    warm = gpu_time.gpu_seconds([clock.call(0.1)], CUDA, measuring(gpu_time))
    assert flushed == []
    # Several replays are timed together; the time is that of one.
    assert np.median(warm) == pytest.approx(1e-4)


def test_compiled_code_is_timed_by_events_and_says_so(gpu_time: ModuleType, clock: StandIn) -> None:
    """Python's time lies between the events."""
    runs = [clock.call(0.4, 0.1), clock.call(0.2, 0.1)]
    (row,) = gpu_time.measured(runs, CUDA, 1, 1, measuring(gpu_time), graphed=True)
    assert row["events"]["ratio"] == pytest.approx(2.0)
    assert not {"gpu", "bound"} & row.keys()


# ----------------------------------------------------------------------------------------------
# a pretended GPU


def call_of(shapes: ModuleType, place: str, dtype: str, device: torch.device) -> Callable[[], Any]:
    """A call of a tiny model, such as of ``"llama-1b decode"``."""
    name, _, phase = place.partition(" ")
    cell = shapes.Cell(dtype, "eager", "sdpa", False, 2, 8)
    model = shapes.built(shapes.SUBJECTS[name], dtype, device, small=True)
    kind = getattr(torch, dtype)
    found: Callable[[], Any] = shapes.call_of(shapes.Place(name, phase, cell), device, kind)(model)
    return found


@pytest.mark.parametrize(
    "place", ["bert-base forward", "vit-b forward", "llama-1b prefill", "llama-1b decode"]
)
def test_a_call_never_waits_and_mixes_no_devices(shapes: ModuleType, place: str) -> None:
    """A call that waits, or copies from main memory, cannot be captured."""
    with PretendedCuda() as gpu, torch.inference_mode():
        run = call_of(shapes, place, "bfloat16", PRETENDED)
        run()
        gpu.forget()
        run()
        assert gpu.mismatches == [], gpu.report()
        assert gpu.waits == [], gpu.report()
        assert gpu.uploads == [], gpu.report()


# ----------------------------------------------------------------------------------------------
# cells on a CPU


def test_every_kind_of_model_is_measured_and_what_failed_is_tried_again(
    gpu_time: ModuleType, shapes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu-shapes.json"
    command = f"--device cpu --seconds 0 --shares 0.5 --out {out}"
    rows = record_of(shapes, f"{command} --small")["rows"]
    assert [row for row in rows if "error" in row] == []
    assert rows[0]["what"] == "ceiling"
    for name in ("copy_bytes", *(f"{name}_flops" for name in gpu_time.PRECISIONS)):
        assert rows[0][name] > 1e6
    eager = [place for place in shapes.tiny_places() if place.cell.code == "eager"]
    assert [shapes.Place(r["subject"], r["phase"], shapes.Cell.of(r)) for r in rows[1:]] == eager
    assert {place.subject for place in eager} >= {"bert-base", "minilm", "vit-b", "llama-1b"}
    for row in rows[1:]:
        assert all(whole > cut for whole, cut in row["work"].values())
        assert row["backends"] == ["flash"]

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory\nmore")

    out.write_text(json.dumps({**json.loads(out.read_text()), "rows": rows[:-2]}))
    with monkeypatch.context() as patched:
        patched.setattr(shapes, "compared", broken)
        failed = record_of(shapes, f"{command} --small")["rows"]
    assert failed[:-2] == rows[:-2]
    assert {row["error"] for row in failed[-2:]} == {"RuntimeError: out of memory"}
    again = record_of(shapes, f"{command} --small")["rows"]
    assert again[:-2] == rows[:-2]
    assert not any("error" in row for row in again)
    with pytest.raises(SystemExit, match="record of another run, with other small"):
        record_of(shapes, command)


# ----------------------------------------------------------------------------------------------
# the page


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return benchmark("gpu_page")


def times(original: float, pruned: float) -> dict[str, Any]:
    """Milliseconds."""
    seconds = {"original": original / 1000, "pruned": pruned / 1000}
    ratio = original / pruned
    found = {f"{which}_{share}": seconds[which] for which in seconds for share in ("p50", "p90")}
    return {**found, "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "rounds": 100}


def cell(call: tuple[float, float], gpu: tuple[float, float] | None, **more: Any) -> dict[str, Any]:
    """A row of a latency and of a time of the GPU, before and after a cut that keeps 24 heads."""
    row = {"what": "gpu", "precision": "bfloat16", "code": "eager", "attention": "sdpa"}
    row |= {"cold": False, "batch": 32, "tokens": 128, "backends": ["flash"], "kept": 24}
    row |= {"call": times(*call), "state": [None, None], "limit": 1.5, "attention_limit": 3.0}
    row |= {"macs": [4e9, 2.667e9], **more}
    if gpu is None:
        return {**row, "no_graph": "RuntimeError: it waits"}
    return {**row, "gpu": times(*gpu), "bound": "gpu" if gpu[1] / call[1] > 0.9 else "launch"}


def cuts(*rows: dict[str, Any]) -> dict[str, Any]:
    """A record of a cut model."""
    hardware = {"processor": "a processor", "threads": 2, "gpu": "a GPU"}
    about = {"hardware": hardware, "gpu": "a GPU", "created": "2026", "benchmark": "tradeoff"}
    about |= {"versions": {"torch": "2", "transformers": "5"}, "task": "sst2", "device": "cuda"}
    return {**about, "timed": "surgeon", "heads": 72, "base": 0.9, "judged": 100, "rows": rows}


def test_without_a_record_the_page_claims_nothing(page: ModuleType, tmp_path: Path) -> None:
    text = page.page(tmp_path)
    assert text.rstrip().endswith(f"On a GPU: {page.studies.NO_GPU}.")
    assert "times as fast" not in text
    rehearsed = {"device": {"name": "cpu, standing in for a GPU", "type": "cpu"}, "checks": []}
    (tmp_path / "gpu-correct.json").write_text(json.dumps(rehearsed))
    assert page.page(tmp_path) == text, "what a CPU did says nothing of a GPU"


def test_the_page_says_what_limits_a_cell_and_has_a_busy_one_for_its_headline(
    page: ModuleType, tmp_path: Path
) -> None:
    ceiling = {"what": "ceiling", "copy_bytes": 4.3e12, "bfloat16_flops": 788e12}
    launch = cell((1.8, 1.8), (0.4, 0.33))
    busy = cell((7.1, 5.1), (7.0, 5.0), batch=128, tokens=512, joules=[4.9, 3.5])
    unknown = cell((1.8, 1.8), None, code="reduce-overhead")
    record = cuts(ceiling, launch, busy, unknown)
    (tmp_path / "tradeoff-sst2-cuda.json").write_text(json.dumps(record))
    text = page.page(tmp_path)
    assert page.studies.NO_GPU not in text
    line = next(line for line in text.splitlines() if line.startswith("With 24 of 72 heads"))
    assert "batch 128 of 512 tokens in bf16 (gpu-bound): GPU time 7.00 to 5.00 ms" in line
    assert "1.40 [1.39, 1.41] times as fast, 0.93 of the limit of 1.50; latency 1.39" in line
    assert "compute at 146 and 137 TFLOP/s, 19% and 17% of what a large matrix product" in line
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for start, bound in (
        ("| 32 x 128 | flash | 0.400 | 1.80 | 1.21 [1.20, 1.22] | 1.00 | 1.50 |", "launch"),
        ("| 128 x 512 | flash | 7.00", "gpu"),
    ):
        (row,) = [row for row in rows if row.startswith(start)]
        assert row.split("|")[-2].strip() == bound
    for said in (
        "- (RuntimeError: it waits)",
        "128 tokens: faster at batch 32; 512 tokens: faster at batch 128.",
        "Energy at 128 x 512, 24 kept: 38.3 to 27.3 mJ an example.",
    ):
        assert said in text
    # Without a busy cell it is the one nearest to the time of the GPU.
    near = cell((1.8, 1.8), (1.5, 1.2), batch=64)
    assert page.headline(cuts(launch, near)) == [near]
    assert page.headline(cuts(cell((1.8, 1.8), None))) == []
