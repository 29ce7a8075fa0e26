"""benchmarks/choice_intervals.py: the truth is measured on rows that nobody drew, and a run resumes."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import benchmark
from tests.unit.test_benchmarks_regret import TINY


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return benchmark("choice_intervals")


def test_a_resample_is_compared_with_the_truth(study: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "choice-intervals-digits.json"
    few = ["--work", str(tmp_path), "--out", str(out), "--calibration", "24", "--shares", "0.5"]
    few += ["--set", "train.epochs=1", *(f"model.config.{size}" for size in TINY)]
    (first,) = json.loads(study.main([*few, "--resamples", "1"]).read_text())["rows"]
    names = set(first["truth"])
    assert first["chosen"] in names
    assert names == {name for name in first["held_out"] if name != "random"}
    excess = first["truth"][first["chosen"]] - min(first["truth"].values())
    assert first["excess"] == pytest.approx(excess)
    assert first["within"] == (first["excess"] <= first["margin"])

    again = json.loads(study.main([*few, "--resamples", "2"]).read_text())["rows"]
    assert again[0] == first
    assert [row["resample"] for row in again] == [0, 1]
    assert again[1]["truth"] != first["truth"]

    study.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    assert "| 50% | 2 |" in (tmp_path / study.PAGE).read_text()
