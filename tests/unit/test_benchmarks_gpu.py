"""The GPU study's measurements and pages, with a GPU that is made of stand-ins."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headprune as hp
from headprune.bench.latency import Effort
from tests.scripts import BENCHMARKS, benchmark, script

CUDA = torch.device("cuda")
QUICK = Effort(0.0, 1, 4, 4)


@pytest.fixture(scope="module")
def gpu_time() -> ModuleType:
    benchmark("studies")  # puts the folder on the path
    return benchmark("gpu_time")


@pytest.fixture(scope="module")
def shapes() -> ModuleType:
    return script(BENCHMARKS / "gpu" / "shapes.py")


# ------------------------------------------------------------------------------------------------ a
# GPU of stand-ins


class StandIn:
    """Time that passes as calls say, and the parts of ``torch.cuda`` that a measurement uses."""

    def __init__(self) -> None:
        self.now = 0.0  # milliseconds of the GPU
        self.launching = 0.0  # milliseconds that a call takes Python
        self.flushed = 0

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
        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": graph,
            "stream": stream,
            "Stream": lambda: quiet,
            "current_stream": lambda: quiet,
            "synchronize": lambda *_: None,
        }.items():
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


def test_a_launch_bound_cell_shows_its_speed_on_the_gpu_alone(
    gpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandIn()
    clock.patch(monkeypatch, gpu_time)
    runs = [clock.call(0.4, launch=1.8), clock.call(0.3, launch=1.8), clock.call(0.2, launch=1.8)]
    rows = gpu_time.measured(runs, CUDA, 32, 128, gpu_time.Measuring(QUICK))
    assert [row["call"]["ratio"] for row in rows] == pytest.approx([1.0, 1.0])
    assert [row["gpu"]["ratio"] for row in rows] == pytest.approx([4 / 3, 2.0])
    assert rows[0]["gpu"]["original_p50"] == pytest.approx(0.4e-3)
    assert {row["bound"] for row in rows} == {"launch"}
    assert rows[0]["state"] == [{"sm_mhz": 1980}] * 2


def test_a_cell_is_gpu_bound_where_both_models_keep_it_busy(
    gpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandIn()
    clock.patch(monkeypatch, gpu_time)
    busy, small = gpu_time.measured(
        [clock.call(7.0, 1.8), clock.call(5.0, 1.8), clock.call(1.0, 1.8)],
        CUDA,
        1,
        1,
        gpu_time.Measuring(QUICK),
    )
    assert (busy["bound"], small["bound"]) == ("gpu", "launch")
    assert busy["call"]["ratio"] == busy["gpu"]["ratio"] == pytest.approx(1.4)


def test_what_cannot_be_captured_keeps_its_latency(
    gpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandIn()
    clock.patch(monkeypatch, gpu_time)
    calls = [0]

    def waits() -> None:
        calls[0] += 1
        clock.now += 1.0
        if calls[0] > 7:  # after the rounds of the latency: while it is captured
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    (row,) = gpu_time.measured([clock.call(2.0), waits], CUDA, 1, 1, gpu_time.Measuring(QUICK))
    assert row["no_graph"] == "RuntimeError: operation not permitted when stream is capturing"
    assert "gpu" not in row
    assert "bound" not in row
    assert row["call"]["rounds"] == 4


def test_the_cache_is_overwritten_before_every_cold_call(
    gpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandIn()
    clock.patch(monkeypatch, gpu_time)
    dirt = SimpleNamespace(zero_=lambda: setattr(clock, "flushed", clock.flushed + 1))
    monkeypatch.setattr(gpu_time.torch, "empty", lambda *_, **__: dirt)
    for measure in (gpu_time.gpu_seconds, gpu_time.latencies):
        clock.flushed = 0
        times = measure(
            [clock.call(0.1), clock.call(0.2)], CUDA, gpu_time.Measuring(QUICK, cold=True)
        )
        assert clock.flushed == 2 * 5  # every call of four rounds and of the one to warm up
        assert np.median(times, 0) == pytest.approx([1e-4, 2e-4])
    clock.flushed = 0
    warm = gpu_time.gpu_seconds([clock.call(0.1)], CUDA, gpu_time.Measuring(QUICK))
    assert clock.flushed == 0
    assert np.median(warm) == pytest.approx(
        1e-4
    )  # of one replay, though several are timed together


def test_compiled_code_is_timed_by_events_and_says_so(
    gpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandIn()
    clock.patch(monkeypatch, gpu_time)
    runs = [clock.call(0.4, 0.1), clock.call(0.2, 0.1)]
    (row,) = gpu_time.measured(runs, CUDA, 1, 1, gpu_time.Measuring(QUICK), graphed=True)
    assert row["events"]["ratio"] == pytest.approx(2.0)
    assert "gpu" not in row
    assert "bound" not in row  # Python's time lies between the events


def test_energy_is_that_of_back_to_back_replays(
    gpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandIn()
    clock.patch(monkeypatch, gpu_time)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0011")
    )
    asked: list[str] = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=asked.append,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: (
            300 * clock.now
        ),  # 300 watts, in millijoules
    )
    monkeypatch.setitem(importlib.sys.modules, "pynvml", nvml)  # type: ignore[attr-defined]
    found = gpu_time.energies([clock.call(2.0), clock.call(1.0)], CUDA, 0.05)
    assert found == pytest.approx([0.6, 0.3])
    assert asked == ["GPU-0011"]
    monkeypatch.setitem(importlib.sys.modules, "pynvml", None)  # type: ignore[attr-defined]
    assert gpu_time.energies([clock.call(2.0)], CUDA, 0.05) == [None]


def test_a_driver_says_what_it_has(gpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(handle: object) -> int:
        raise RuntimeError("not supported")

    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetClockInfo=lambda gpu, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetPowerUsage=lambda gpu: 312500,
        nvmlDeviceGetTemperature=lambda gpu, kind: 41,
        nvmlDeviceGetCurrentClocksEventReasons=missing,
    )
    monkeypatch.setitem(importlib.sys.modules, "pynvml", nvml)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace()
    )  # an older PyTorch
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    wanted = {"sm_mhz": 1980, "memory_mhz": 3201, "watts": 312.5, "celsius": 41, "throttled": None}
    assert gpu_time.state(CUDA) == wanted
    assert gpu_time.state(torch.device("cpu")) is None


def test_a_graph_with_other_kernels_is_not_used(
    gpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandIn()
    clock.patch(monkeypatch, gpu_time)
    monkeypatch.setattr(gpu_time, "sdpa_backends", lambda run: (run(), ["efficient"])[1])
    runs = [clock.call(1.0), clock.call(0.5)]
    replays, why = gpu_time.captured(runs, ["flash"])
    assert (replays, why) == (None, "the graph takes other kernels than the call: efficient")
    replays, why = gpu_time.captured(runs, ["efficient"])
    assert why is None
    assert len(replays) == 2


@pytest.mark.parametrize("place", ["bert-base forward", "llama-1b prefill", "llama-1b decode"])
def test_a_captured_call_builds_no_mask(
    gpu_time: ModuleType, shapes: ModuleType, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Transformers 5.17 writes masks out while a stream is captured, which keeps the flash kernel
    away."""
    name, _, phase = place.partition(" ")
    device, dtype = torch.device("cpu"), torch.float32
    model = shapes.built(shapes.SUBJECTS[name], "float32", device, small=True)
    cell = shapes.Cell("float32", "eager", "sdpa", False, 2, 8)
    with torch.inference_mode():
        run = shapes.call_of(shapes.Place(name, phase, cell), device, dtype)(model)
        given: list[Any] = []
        attention = nn.functional.scaled_dot_product_attention

        def seen(*args: Any, attn_mask: Any = None, **more: Any) -> Any:
            given.append(attn_mask)
            return attention(*args, attn_mask=attn_mask, **more)

        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", seen)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with gpu_time.masks_of_eager_mode():
            run()
    assert given == [None, None]


# ------------------------------------------------------------------------------------------------
# cells on a CPU


def test_arithmetic_is_put_back(gpu_time: ModuleType) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    seen: list[Any] = []

    def interrupted() -> None:
        with gpu_time.arithmetic("tf32") as dtype:
            seen.extend((dtype, torch.backends.cuda.matmul.allow_tf32))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == [torch.float32, True]
    with gpu_time.arithmetic("bfloat16") as dtype:
        assert dtype == torch.bfloat16
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize("inference", [False, True])
def test_the_kernel_of_attention_is_seen(gpu_time: ModuleType, inference: bool) -> None:
    q = torch.randn(1, 2, 3, 4)

    def fused() -> None:
        nn.functional.scaled_dot_product_attention(q, q, q)

    with torch.inference_mode(inference), torch.no_grad():
        assert gpu_time.sdpa_backends(fused) == ["flash"]
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            assert gpu_time.sdpa_backends(fused) == ["math"]
        assert gpu_time.sdpa_backends(lambda: (q @ q.mT).softmax(-1)) == []


def test_ceilings_are_measured(gpu_time: ModuleType) -> None:
    found = gpu_time.ceilings(torch.device("cpu"), small=True)
    assert set(found) == {"copy_bytes", *(f"{name}_flops" for name in gpu_time.PRECISIONS)}
    assert all(value > 1e6 for value in found.values())


@pytest.fixture(scope="module")
def ran(
    shapes: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, Any]]:
    out = tmp_path_factory.mktemp("shapes") / "gpu-shapes.json"
    arguments = [
        "--device",
        "cpu",
        "--small",
        "--seconds",
        "0",
        "--shares",
        "0.5",
        "--out",
        str(out),
    ]
    return arguments, json.loads(shapes.main(arguments).read_text())


def test_shapes_measure_every_kind_of_model(ran: tuple[list[str], dict[str, Any]]) -> None:
    rows = ran[1]["rows"]
    assert [row for row in rows if "error" in row] == []
    assert rows[0]["what"] == "ceiling"
    kinds = {(row["subject"], row["phase"]) for row in rows[1:]}
    assert kinds == {
        ("bert-base", "forward"), ("minilm", "forward"), ("vit-b", "forward"),
        ("llama-1b", "prefill"), ("llama-1b", "decode"),
    }  # fmt: skip
    for row in rows[1:]:
        for whole, cut in row["work"].values():
            assert whole > cut
        assert row["backends"] == ["flash"]
    assert any(row["cold"] for row in rows[1:])


def test_shapes_go_on_after_the_last_row_and_try_again_what_failed(
    shapes: ModuleType, ran: tuple[list[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, record = ran
    out = Path(arguments[-1])
    out.write_text(json.dumps({**record, "rows": record["rows"][:2]}))

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory\nmore")

    with monkeypatch.context() as patched:
        patched.setattr(shapes, "compared", broken)
        failed = json.loads(shapes.main(arguments).read_text())["rows"]
    assert failed[:2] == record["rows"][:2]
    assert {row.get("error") for row in failed[2:]} == {"RuntimeError: out of memory"}
    again = json.loads(shapes.main(arguments).read_text())["rows"]
    assert again[:2] == record["rows"][:2]
    eager = [place for place in shapes.tiny_places() if place.cell.code == "eager"]
    assert [shapes.Place(r["subject"], r["phase"], shapes.Cell.of(r)) for r in again[1:]] == eager
    assert len(eager) < len(shapes.tiny_places())  # a rehearsal compiles, too
    with pytest.raises(SystemExit, match="record of another run, with other small"):
        shapes.main([argument for argument in arguments if argument != "--small"])


@pytest.mark.parametrize("new", [1, 6], ids=["decode", "prefill"])
def test_a_full_cache_gives_what_a_growing_one_gives(shapes: ModuleType, new: int) -> None:
    subject = shapes.SUBJECTS["llama-1b"]
    model: Any = shapes.built(subject, "float32", torch.device("cpu"), small=True)
    first = hp.find_sites(model)[0]
    small: Any = copy.deepcopy(model)  # its layers will differ in size
    hp.prune_heads_(small, {0: [head for group in first.units[1:] for head in group]})
    ids = torch.randint(200, (2, 6))
    for net in (model, small):
        with torch.no_grad():
            wanted = net(input_ids=ids, use_cache=True)
            run = shapes.with_cache(net, ids[:, -new:], 6)
            cache = run.__closure__[0].cell_contents["past_key_values"]
            for layer, grown in zip(cache.layers, wanted.past_key_values.layers, strict=True):
                layer.keys.copy_(grown.keys)
                layer.values.copy_(grown.values)
                layer.keys[:, :, -new:] = torch.nan  # must be written anew
            for _ in range(2):
                torch.testing.assert_close(run().logits, wanted.logits[:, -1:])


def test_the_whole_grid_holds_what_is_asked_for(shapes: ModuleType) -> None:
    places = shapes.places()
    assert len(places) == len(set(places))
    assert {place.subject for place in places} == set(shapes.SUBJECTS)
    assert {place.phase for place in places} == {"forward", "prefill", "decode"}
    cells = [place.cell for place in places]
    assert {cell.precision for cell in cells} == {"float32", "tf32", "float16", "bfloat16"}
    assert {cell.code for cell in cells} == {"eager", "reduce-overhead", "max-autotune"}
    assert max(cell.batch for cell in cells) == 256
    assert {cell.cold for cell in cells} == {False, True}
    first = places[0]
    assert (first.subject, first.cell.precision) == ("bert-base", "bfloat16")


# ------------------------------------------------------------------------------------------------
# going on elsewhere


def test_a_record_of_other_weights_is_left_alone(tmp_path: Path) -> None:
    studies = benchmark("studies")
    out = tmp_path / "tradeoff-sst2-cuda.json"
    mine = {"weights": "a", "gpu": "one"}
    assert studies.aside(out, mine) == out
    out.write_text(json.dumps({**mine, "rows": []}))
    assert studies.aside(out, mine) == out
    other = studies.aside(out, {**mine, "weights": "b"})
    assert other.parent == tmp_path
    assert other.name.startswith("tradeoff-sst2-cuda-")
    assert other == studies.aside(out, {**mine, "weights": "b"})  # the next call goes on with it


def test_answers_travel_in_the_record(tmp_path: Path) -> None:
    tradeoff = benchmark("tradeoff")
    answers = np.array([1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1], dtype=np.float32)
    row = {
        "what": "quality",
        "way": "surgeon + lstsq",
        "kept": 24,
        "seed": 1,
        **tradeoff.packed(answers),
    }
    tradeoff.unpack([{"what": "speed"}, json.loads(json.dumps(row))], tmp_path, len(answers))
    found = np.load(tradeoff.answers_file(tmp_path, "surgeon + lstsq", 24, 1))
    np.testing.assert_array_equal(found, answers)
    assert found.dtype == np.float32
    assert tradeoff.packed(np.array([0.25, 1.0])) == {}  # a cosine takes too much room


def test_the_exit_status_says_what_the_record_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    studies = benchmark("studies")
    record = tmp_path / "record.json"

    def status(*rows: dict[str, Any]) -> Any:
        record.write_text(json.dumps({"rows": rows}))
        with pytest.raises(SystemExit) as ended:
            studies.leave(record)
        return ended.value.code

    assert status({"ratio": 1.5}) == 0
    assert status({"ratio": 1.5}, {"error": "no room"}) == 1
    assert status({"no_graph": "it waits", "code": "eager"}) == 1
    ticks = iter([0.0, 1.0, 100.0])
    monkeypatch.setattr(studies, "perf_counter", lambda: next(ticks))
    over = studies.clock(SimpleNamespace(minutes=1.0))
    assert not over()
    assert over()
    assert status({"error": "no room"}) == 75 == script(BENCHMARKS / "gpu" / "worker.py").UNFINISHED


def test_what_could_not_be_captured_is_tried_again_by_other_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    studies = benchmark("studies")
    monkeypatch.setattr(studies, "git_commit", lambda: "new")
    row = {"no_graph": "it waits", "code": "eager"}
    assert studies.settled({**row, "git_commit": "new"})
    assert not studies.settled({**row, "git_commit": "old"})
    assert studies.settled({"code": "eager", "git_commit": "old"})
    assert not studies.settled({"error": "no room", "git_commit": "new"})


def test_rows_that_were_measured_together_are_kept_together() -> None:
    studies = benchmark("studies")
    answers = iter([False, True])
    rows = studies.in_time([[{"row": 1}, {"row": 2}], {"row": 3}], lambda: next(answers))
    assert [row["row"] for row in rows] == [1, 2]


def test_a_record_of_another_machine_is_begun_anew_or_beside(tmp_path: Path) -> None:
    studies = benchmark("studies")
    out, same = tmp_path / "native-cuda.json", {"where": "a GPU", "settings": {"width": 768}}
    assert studies.there(out, same, True) == (None, out)
    out.write_text(json.dumps({**same, "measured": [1]}))
    assert studies.there(out, same, True) == ({**same, "measured": [1]}, out)
    other = {**same, "where": "another GPU"}
    assert studies.there(out, other, False) == (None, out)
    record, beside = studies.there(out, other, True)
    assert record is None
    assert beside.name.startswith("native-cuda-")
