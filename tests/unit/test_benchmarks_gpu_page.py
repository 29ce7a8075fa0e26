"""What pages say of a GPU: nothing without a record, and of a record its cells, one by one."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import benchmark

GPU = "a GPU of stand-ins"
ABOUT = {
    "hardware": {"processor": "a processor", "threads": 2, "gpu": GPU},
    "versions": {"torch": "2", "transformers": "5"},
    "created": "2026-01-01T00",
    "gpu": GPU,
}
CEILING = {"what": "ceiling", "copy_bytes": 4.3e12}
CEILING |= {"bfloat16_flops": 788e12, "float32_flops": 52e12}
WAY = {"what": "gpu", "precision": "bfloat16", "code": "eager", "attention": "sdpa", "cold": False}


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
    """A row of a latency and of a time of the GPU, before and after the cut."""
    row = {**WAY, "batch": 32, "tokens": 128, "backends": ["flash"], "call": times(*call)}
    row |= {"state": [None, None], **more}
    if gpu is None:
        return {**row, "no_graph": "RuntimeError: it waits"}
    bound = "gpu" if gpu[1] / call[1] > 0.9 else "launch"
    return {**row, "gpu": times(*gpu), "bound": bound}


def of_a_cut(
    kept: int, call: tuple[float, float], gpu: tuple[float, float] | None, **more: Any
) -> dict[str, Any]:
    return cell(call, gpu, kept=kept, limit=1.5, attention_limit=3.0, macs=[4e9, 2.667e9], **more)


def shape(subject: str, phase: str, work: dict[str, Any]) -> dict[str, Any]:
    return {"subject": subject, "phase": phase, "share": 0.5, "work": work}


BUSY = {"batch": 128, "tokens": 512}
QUALITY = [
    {"what": "quality", "way": way, "kept": kept, "seed": seed, "quality": 0.89 + seed / 1000}
    for way in ("surgeon", "surgeon + lstsq")
    for kept in (36, 24)
    for seed in range(3)
]
STUDY = {"benchmark": "tradeoff", "task": "sst2", "device": "cuda", "timed": "surgeon"}
CUTS = {
    **ABOUT,
    **STUDY,
    "heads": 72,
    "base": 0.9,
    "judged": 100,
    "rows": [
        CEILING,
        *QUALITY,
        of_a_cut(36, (1.8, 1.8), (0.4, 0.33)),
        of_a_cut(24, (1.8, 1.8), (0.4, 0.29)),
        of_a_cut(36, (7.1, 5.7), (7.0, 5.6), **BUSY, joules=[4.9, 4.0]),
        of_a_cut(24, (7.1, 5.1), (7.0, 5.0), **BUSY, joules=[4.9, 3.5]),
        of_a_cut(24, (1.8, 1.8), None, code="reduce-overhead"),
    ],
}
ENCODER = shape("bert-base", "forward", {"bytes": [4, 3], "macs": [9, 6]})
DECODER = shape("llama-1b", "decode", {"bytes": [19, 10]})
FAILED = {"subject": "llama-8b", "phase": "decode", "share": 0.5, "batch": 64, "tokens": 2048}
SHAPES = {
    **ABOUT,
    "benchmark": "gpu-shapes",
    "rows": [
        CEILING,
        cell((9.0, 6.1), (9.0, 6.0), **ENCODER),
        cell((11.0, 6.0), (10.7, 5.7), **DECODER),
        {**WAY, **FAILED, "error": "OutOfMemoryError: no room"},
    ],
}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A folder of records of a GPU."""
    (tmp_path / "tradeoff-sst2-cuda.json").write_text(json.dumps(CUTS))
    (tmp_path / "gpu-shapes.json").write_text(json.dumps(SHAPES))
    return tmp_path


def test_without_a_record_nothing_is_claimed(page: ModuleType, tmp_path: Path) -> None:
    text = page.page(tmp_path)
    assert text.rstrip().endswith(f"On a GPU: {page.studies.NO_GPU}.")
    assert "times as fast" not in text
    rehearsed = {"device": {"name": "cpu, standing in for a GPU", "type": "cpu"}, "checks": []}
    (tmp_path / "gpu-correct.json").write_text(json.dumps(rehearsed))
    assert page.page(tmp_path) == text, "what a CPU did says nothing of a GPU"


def test_the_headline_is_a_cell_where_the_gpu_is_busy(page: ModuleType, records: Path) -> None:
    text = page.page(records)
    assert page.studies.NO_GPU not in text
    line = next(line for line in text.splitlines() if line.startswith("With 24 of 72 heads"))
    assert "batch 128 of 512 tokens in bf16 (gpu-bound): GPU time 7.00 to 5.00 ms" in line
    assert "1.40 [1.39, 1.41] times as fast, 0.93 of the limit of 1.50; latency 1.39" in line
    assert "compute at 146 and 137 TFLOP/s, 19% and 17% of what a large matrix product" in line
    below = "GPU-bound and below 0.95 of the limit: 128 x 512, 36 kept: 0.83; 128 x 512, 24 kept"
    assert below in text
    assert "4.30 TB/s copied; TFLOP/s of products: bfloat16 788, float32 52" in text


def test_without_a_busy_cell_the_one_nearest_to_the_gpus_time_is_the_headline(
    page: ModuleType,
) -> None:
    rows = [of_a_cut(24, (1.8, 1.8), (0.4, 0.3)), of_a_cut(24, (1.8, 1.8), (1.5, 1.2), batch=64)]
    (found,) = page.headline({**CUTS, "rows": rows})
    assert found["batch"] == 64
    assert page.headline({**CUTS, "rows": [of_a_cut(24, (1.8, 1.8), None)]}) == []


def test_every_cell_says_what_limits_it(page: ModuleType, records: Path) -> None:
    text = page.page(records)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    launch = next(row for row in rows if row.startswith("| 32 x 128 | flash | 0.400 | 1.80 | 1.21"))
    busy = next(row for row in rows if row.startswith("| 128 x 512 | flash | 7.00"))
    assert [row.split("|")[-2].strip() for row in (launch, busy)] == ["launch", "gpu"]
    for said in (
        "- (RuntimeError: it waits)",
        # Of bytes:
        "| 32 x 128 | flash | 10.7 | 11.0 | 1.88 [1.87, 1.89] | 1.83 | 1.90 | gpu |",
        "- llama-8b bfloat16 eager 64 x 2048: OutOfMemoryError: no room",
        "heads kept. 128 tokens: faster at batch 32; 512 tokens: faster at batch 128.",
        "no difference shown at batch 32",  # the same cell by its latency
        "Energy at 128 x 512, 24 kept: 38.3 to 27.3 mJ an example.",
    ):
        assert said in text
