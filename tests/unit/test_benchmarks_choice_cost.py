"""benchmarks/choice_cost.py: every way is timed in every round, and the page has the ratios."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import benchmark
from tests.unit.test_benchmarks_regret import TINY


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return benchmark("choice_cost")


def test_a_run_and_its_page(study: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "choice-cost-digits.json"
    few = ["--task", "digits", "--data", str(tmp_path), "--work", str(tmp_path), "--out", str(out)]
    few += ["--calibration", "24", "--memory-rows", "8", "--rounds", "1", "--share", "0.5"]
    few += ["--set", "train.epochs=1", *(f"model.config.{size}" for size in TINY)]
    timed, memory = json.loads(study.main(few).read_text())["rows"]
    assert (timed["what"], memory["what"]) == ("seconds", "memory")
    for name in study.TITLES:
        assert timed[name] > 0
        assert memory[name] > 0
    # A second call finds nothing to do.
    assert json.loads(study.main(few).read_text())["rows"] == [timed, memory]
    study.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    text = (tmp_path / study.PAGE).read_text()
    assert "| `taylor` |" in text
    assert f"{timed['auto'] / timed['surgeon']:.1f} |" in text


def test_each_round_begins_with_another_way(study: ModuleType) -> None:
    ways = {"a": print, "b": print, "c": print}
    assert [name for name, _ in study.in_turn(ways, 1)] == ["b", "c", "a"]
