"""The GPU study's cells on a pretended GPU: no mixed devices, and nothing that a CUDA graph could
not capture."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headprune.bench.latency import in_turn
from tests.pretended_cuda import CUDA, PretendedCuda
from tests.scripts import BENCHMARKS, benchmark, script


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    benchmark("studies")  # puts the folder on the path
    module = script(BENCHMARKS / "gpu" / "shapes.py")
    without_graphs(monkeypatch)
    return module


def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls stand for their graphs, and a wall clock for events: both are CUDA's own."""
    import gpu_time  # type: ignore[import-not-found]

    monkeypatch.setattr(gpu_time, "captured", lambda runs, backends=(): (list(runs), None))
    monkeypatch.setattr(
        gpu_time, "gpu_seconds", lambda runs, device, how: in_turn(runs, device, how.effort)
    )
    monkeypatch.setattr(gpu_time, "WARM_UP", 0.0)
    monkeypatch.setattr(gpu_time, "state", lambda device: None)


def test_no_cell_of_a_shape_mixes_devices(shapes: ModuleType, tmp_path: Path) -> None:
    args = shapes.arguments(["--small", "--seconds", "0", "--shares", "0.5", "--joules", "0"])
    with PretendedCuda() as gpu:
        for place in (place for place in shapes.tiny_places() if place.cell.code == "eager"):
            (row,) = shapes.rows(args, CUDA, place, [0.5], {})
            assert "error" not in row, row
            assert row["gpu"]["rounds"] > 0
            assert row["bound"] in ("gpu", "launch")
    assert gpu.mismatches == [], gpu.report()


@pytest.mark.parametrize(
    "place", ["bert-base forward", "vit-b forward", "llama-1b prefill", "llama-1b decode"]
)
def test_a_call_never_waits(shapes: ModuleType, place: str) -> None:
    """A call that waits, or copies from main memory, cannot be captured."""
    name, _, phase = place.partition(" ")
    cell = shapes.Cell("bfloat16", "eager", "sdpa", False, 2, 8)
    with PretendedCuda() as gpu:
        model = shapes.built(shapes.SUBJECTS[name], "bfloat16", CUDA, small=True)
        with torch.inference_mode():
            run = shapes.call_of(shapes.Place(name, phase, cell), CUDA, torch.bfloat16)(model)
            run()
            gpu.forget()
            run()
        assert gpu.waits == [], gpu.report()
        assert gpu.uploads == [], gpu.report()


def test_no_cell_of_a_cut_mixes_devices(
    shapes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tradeoff_gpu = benchmark("tradeoff_gpu")
    args = SimpleNamespace(small=True, seconds=0.0)
    with PretendedCuda() as gpu:
        model = shapes.built(shapes.SUBJECTS["minilm"], "float32", CUDA, small=True)
        cuts = {4: shapes.cut(model, 0.5)}
        ids = torch.ones(2, 8, dtype=torch.long)
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = tradeoff_gpu.gpu_rows(model, cuts, example, args, [])
        rows: list[dict[str, Any]] = list(benchmark("studies").in_time(found, lambda: False))
    assert gpu.mismatches == [], gpu.report()
    assert [row["what"] for row in rows] == ["ceiling", "gpu", "gpu"]
    assert not any("error" in row for row in rows)
    assert json.loads(json.dumps(rows)) == rows  # tuples and tensors would not come back


def test_native_comparisons_do_not_mix_devices() -> None:
    native = benchmark("native")
    args = native.arguments(
        [
            "--small",
            "--seconds",
            "0",
            "--threads",
            "1",
            "--width",
            "48",
            "--heads",
            "4",
            "--keep",
            "4",
        ]
    )
    args.keep = 2
    with PretendedCuda() as gpu:
        rows = [
            row
            for name in ("bert", "vit", "llama")
            for row in native.compared(name, args, CUDA, "float32")
        ]
    assert gpu.mismatches == [], gpu.report()
    assert [row["subject"] for row in rows] == ["bert", "vit", "llama"]
