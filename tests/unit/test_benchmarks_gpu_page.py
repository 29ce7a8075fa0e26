"""What pages say of a GPU: nothing without a record, and of a record its cells, one by one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import BENCHMARKS, ROOT, benchmark, script

GPU = "a GPU of stand-ins"
WHERE = {"processor": "a processor", "threads": 2, "gpu": GPU}
ABOUT = {
    "hardware": WHERE,
    "versions": {"torch": "2", "transformers": "5"},
    "created": "2026-01-01T00",
    "gpu": GPU,
}
CEILING = {
    "what": "ceiling",
    "copy_bytes": 4.3e12,
    "bfloat16_flops": 788e12,
    "float32_flops": 52e12,
}


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return benchmark("gpu_page")


def times(original: float, pruned: float) -> dict[str, Any]:
    """Milliseconds."""
    ratio = original / pruned
    seconds = {"original": original / 1000, "pruned": pruned / 1000}
    found = {
        f"{which}_{share}": value for which, value in seconds.items() for share in ("p50", "p90")
    }
    return {**found, "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "rounds": 100}


def cell(call: tuple[float, float], gpu: tuple[float, float] | None, **more: Any) -> dict[str, Any]:
    row = {
        "what": "gpu",
        "precision": "bfloat16",
        "code": "eager",
        "attention": "sdpa",
        "cold": False,
    }
    row |= {
        "batch": 32,
        "tokens": 128,
        "backends": ["flash"],
        "call": times(*call),
        "state": [None, None],
        **more,
    }
    if gpu is None:
        return {**row, "no_graph": "RuntimeError: it waits"}
    bound = "gpu" if gpu[1] / call[1] > 0.9 else "launch"
    return {**row, "gpu": times(*gpu), "bound": bound}


def of_a_cut(
    kept: int, call: tuple[float, float], gpu: tuple[float, float] | None, **more: Any
) -> dict[str, Any]:
    return cell(call, gpu, kept=kept, limit=1.5, attention_limit=3.0, macs=[4e9, 2.667e9], **more)


BUSY = {"batch": 128, "tokens": 512}
CUTS = {
    **ABOUT,
    "benchmark": "tradeoff",
    "task": "sst2",
    "device": "cuda",
    "timed": "surgeon",
    "heads": 72,
    "base": 0.9,
    "judged": 100,
    "rows": [
        CEILING,
        *(
            {
                "what": "quality",
                "way": way,
                "kept": kept,
                "seed": seed,
                "quality": 0.89 + seed / 1000,
            }
            for way in ("surgeon", "surgeon + lstsq")
            for kept in (36, 24)
            for seed in range(3)
        ),
        of_a_cut(36, (1.8, 1.8), (0.4, 0.33)),
        of_a_cut(24, (1.8, 1.8), (0.4, 0.29)),
        of_a_cut(36, (7.1, 5.7), (7.0, 5.6), **BUSY, joules=[4.9, 4.0]),
        of_a_cut(24, (7.1, 5.1), (7.0, 5.0), **BUSY, joules=[4.9, 3.5]),
        of_a_cut(24, (1.8, 1.8), None, code="reduce-overhead"),
    ],
}
SHAPES = {
    **ABOUT,
    "benchmark": "gpu-shapes",
    "rows": [
        CEILING,
        cell(
            (9.0, 6.1),
            (9.0, 6.0),
            subject="bert-base",
            phase="forward",
            share=0.5,
            work={"bytes": [4, 3], "macs": [9, 6]},
        ),
        cell(
            (11.0, 6.0),
            (10.7, 5.7),
            subject="llama-1b",
            phase="decode",
            share=0.5,
            work={"bytes": [19, 10]},
        ),
        {
            "what": "gpu",
            "subject": "llama-8b",
            "phase": "decode",
            "precision": "bfloat16",
            "code": "eager",
            "attention": "sdpa",
            "cold": False,
            "batch": 64,
            "tokens": 2048,
            "share": 0.5,
            "error": "OutOfMemoryError: no room",
        },
    ],
}
CORRECT = {
    "device": {"name": GPU, "type": "cuda"},
    "checks": [
        {
            "test": "test_scores::one",
            "check": "taylor",
            "mode": "fp32",
            "error": 1e-6,
            "tolerance": 1e-4,
            "passed": True,
        },
        {
            "test": "test_scores::two",
            "check": "fisher",
            "mode": "fp32",
            "error": 5e-5,
            "tolerance": 1e-4,
            "passed": True,
        },
        {
            "test": "test_cuts::three",
            "check": "control: cut",
            "mode": "fp32",
            "error": 1,
            "tolerance": 0.1,
            "passed": True,
        },
        {
            "test": "test_checkpoints::four",
            "check": "weights",
            "mode": "bf16",
            "error": 0,
            "tolerance": 0,
            "passed": True,
        },
    ],
}
SHARES = {"median": 3.5, "p10": 3.25, "p90": 3.75}
SCORING = {
    **ABOUT,
    "leave_one_out": [
        {
            "layers": 12,
            "heads": 12,
            "width": 384,
            "batch": 1,
            "tokens": 128,
            "saturated": False,
            "ratios": {"naive / fast": SHARES, "hp.gated loop / fast": SHARES},
        }
    ],
    "throughput": [],
}
QUEUE = {
    "entries": [
        {
            "job": "quality",
            "status": "goes on",
            "seconds": 340.2,
            "commit": "c0ffee" * 6,
            "created": "2026-01-01T",
        }
    ]
}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """The committed records, and those of a GPU."""
    folder = tmp_path / "records"
    shutil.copytree(BENCHMARKS / "records", folder)
    named = {
        "tradeoff-sst2-cuda": CUTS,
        "gpu-shapes": SHAPES,
        "gpu-correct": CORRECT,
        "gpu-queue": QUEUE,
    }
    named["scoring-throughput-cuda"] = SCORING
    for name, record in named.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


def test_without_a_record_nothing_is_claimed(page: ModuleType, tmp_path: Path) -> None:
    text = page.page(tmp_path)
    assert text.rstrip().endswith(f"On a GPU: {page.studies.NO_GPU}.")
    assert "times as fast" not in text
    rehearsed = {**CORRECT, "device": {"name": "cpu, standing in for a GPU", "type": "cpu"}}
    (tmp_path / "gpu-correct.json").write_text(json.dumps(rehearsed))
    assert page.page(tmp_path) == text  # what a CPU did is nothing of a GPU's


def test_the_headline_is_a_cell_where_the_gpu_is_busy(page: ModuleType, records: Path) -> None:
    text = page.page(records)
    assert page.studies.NO_GPU not in text
    line = next(line for line in text.splitlines() if line.startswith("With 24 of 72 heads"))
    assert "batch 128 of 512 tokens in bf16 (gpu-bound): GPU time 7.00 to 5.00 ms" in line
    assert "1.40 [1.39, 1.41] times as fast, 0.93 of the limit of 1.50; latency 1.39" in line
    assert (
        "compute at 146 and 137 TFLOP/s, 19% and 17% of what a large matrix product reaches" in line
    )
    # Below 0.95 of it, and so with the reason.
    assert (
        "GPU-bound and below 0.95 of the limit: 128 x 512, 36 kept: 0.83; 128 x 512, 24 kept: 0.93."
        in text
    )
    assert "The limit counts multiply-adds alone: norms, activations and residual sums" in text
    assert "4.30 TB/s copied; TFLOP/s of products: bfloat16 788, float32 52" in text


def test_every_cell_says_what_limits_it(page: ModuleType, records: Path) -> None:
    text = page.page(records)
    assert "| 32 x 128 | flash | 0.400 | 1.80 | 1.21 [1.20, 1.22] | 1.00 | 1.50 |" in text
    launch = next(
        line for line in text.splitlines() if line.startswith("| 32 x 128 | flash | 0.400")
    )
    busy = next(line for line in text.splitlines() if line.startswith("| 128 x 512 | flash | 7.00"))
    assert (launch.split("|")[-2].strip(), busy.split("|")[-2].strip()) == ("launch", "gpu")
    assert "- (RuntimeError: it waits)" in text
    assert (
        "| 32 x 128 | flash | 10.7 | 11.0 | 1.88 [1.87, 1.89] | 1.83 | 1.90 | gpu |" in text
    )  # of bytes
    assert "- llama-8b bfloat16 eager 64 x 2048: OutOfMemoryError: no room" in text
    assert (
        "With 24 heads kept. 128 tokens: faster at batch 32; 512 tokens: faster at batch 128."
        in text
    )
    assert "no difference shown at batch 32" in text  # the same cell by its latency
    assert "Energy at 128 x 512, 24 kept: 38.3 to 27.3 mJ an example." in text
    assert "| scores | 2 | 2 | 0.5 |" in text
    assert "| 12 x 12, width 384 | 1 x 128 | 3.50 [3.25, 3.75] | 3.50 [3.25, 3.75] |  |" in text
    assert "| checkpoints | 1 | 1 | exact |" in text
    assert "| cuts |" not in text  # a control is no comparison
    assert "| quality | goes on | 340 | c0ffeec0ffee | 2026-01-01 |" in text


def test_a_busy_gpu_is_not_at_hand(page: ModuleType) -> None:
    """Where every cell is launch-bound, the one nearest to the GPU's time stands for the record."""
    rows = [of_a_cut(24, (1.8, 1.8), (0.4, 0.3)), of_a_cut(24, (1.8, 1.8), (1.5, 1.2), batch=64)]
    (found,) = page.headline({**CUTS, "rows": rows})
    assert found["batch"] == 64
    assert page.headline({**CUTS, "rows": [of_a_cut(24, (1.8, 1.8), None)]}) == []


def test_all_pages_name_the_gpu(records: Path, tmp_path: Path) -> None:
    figures = script(ROOT / "docs" / "figures.py")
    readme, docs = tmp_path / "README.md", tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "README.md", readme)
    figures.main(["--records", str(records), "--docs", str(docs), "--readme", str(readme)])
    block = (
        readme.read_text()
        .partition("<!-- make docs-figures: tradeoff -->")[2]
        .partition("<!-- end of tradeoff")[0]
    )
    assert f"at batch 128 of 512 tokens in bf16, GPU time, on {GPU}:" in block
    assert "24 heads 0.891 ± 0.001 at 1.40x [1.39, 1.41]" in block
    assert "no GPU record yet" not in block
    tradeoff = (docs / "tradeoff.md").read_text()
    assert f"## SST-2, accuracy, on {GPU}" in tradeoff
    assert "Cell by cell: [on a GPU](gpu.md)." in tradeoff
    drawing = (docs / "tradeoff.svg").read_text()
    titles = re.findall(r">SST-2, accuracy, on ([^<]*)<", drawing)
    assert titles == ["a CPU", GPU]
    assert "tokens in bf16, GPU time" in drawing
