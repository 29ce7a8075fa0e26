"""benchmarks/regret.py: auto has the cell of what it took, a run goes on, regret is taken to the
best pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.scripts import benchmark

TINY = [
    "hidden_size=16",
    "num_hidden_layers=2",
    "num_attention_heads=4",
    "intermediate_size=16",
    "patch_size=4",
]


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return benchmark("regret")


def test_a_run_and_one_that_goes_on(study: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "regret-digits.json"
    few = ["--task", "digits", "--data", str(tmp_path), "--work", str(tmp_path), "--out", str(out)]
    few += ["--calibration", "24", "--candidates", "taylor", "obs", "--refits", "lstsq"]
    few += ["--set", "train.epochs=1", *(f"model.config.{size}" for size in TINY)]
    record = json.loads(study.main([*few, "--shares", "0.5"]).read_text())
    (row,) = record["rows"]
    assert set(row["cells"]) == {"taylor", "obs", "random"}
    assert row["auto"] in ("taylor", "obs")
    assert len(row["cells"]["random"]["draws"]) == 2
    taken = row["cells"][row["auto"]]
    assert (taken["low"], taken["high"]) == (0, 0)
    assert row["margin"] == max(0, *(-row["cells"][name]["low"] for name in ("taylor", "obs")))
    assert all(0 <= cell["test"] <= 1 for cell in row["cells"].values())
    again = json.loads(study.main([*few, "--shares", "0.5", "0.25", "0.1"]).read_text())
    assert again["rows"][0] == row
    assert [r["share"] for r in again["rows"]] == [
        0.5,
        0.25,
    ]  # a tenth of the heads is fewer than one per layer
    study.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    text = (tmp_path / study.PAGE).read_text()
    assert "## Tasks that choose: digits, ViT, 10 classes" in text
    assert "| auto, lstsq |" in text


def record_of(
    task: str, metric: str, whole: float, rows: list[dict[str, float]], took: list[str]
) -> dict[str, Any]:
    """A record of one share and refit; a row per draw."""
    cells = [
        {name: {"test": value, "held_out": 0.0} for name, value in row.items()} for row in rows
    ]
    about = {"tuned": 0, "share": 1 / 3, "refit": "lstsq"}
    made = [
        {**about, "draw": i, "cells": c, "auto": a}
        for i, (c, a) in enumerate(zip(cells, took, strict=True))
    ]
    return {
        "task": task,
        "calibration": 8,
        "whole": {"0": {"metric": metric, "test": whole, "n": 9}},
        "rows": made,
    }


def test_regret_is_taken_to_the_best_mean(study: ModuleType) -> None:
    rows = [{"taylor": 0.8, "obs": 0.7, "random": 0.5}, {"taylor": 0.8, "obs": 0.86, "random": 0.6}]
    found = study.regrets([record_of("trec", "accuracy", 0.9, rows, ["taylor", "obs"])])
    place = ("trec", 0.3333)
    assert {name: pytest.approx(at[place]) for name, at in found.items()} == {
        "auto, lstsq": 0.0,
        "taylor, lstsq": 3.0,
        "obs, lstsq": 5.0,
        "random, lstsq": 28.0,
    }


def test_a_lower_perplexity_is_better(study: ModuleType) -> None:
    rows = [{"taylor": 6.0, "obs": 5.5}]
    (found,) = study.cells(record_of("stories", "perplexity", 5.0, rows, ["obs"])).values()
    assert {name: pytest.approx(values) for name, values in found.items()} == {
        "taylor, lstsq": [-20.0],
        "obs, lstsq": [-10.0],
        "auto, lstsq": [-10.0],
    }


class _Graded(torch.nn.Module):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=x)


def test_grades_are_judged_by_the_order_of_all_test_rows(study: ModuleType) -> None:
    answers = torch.tensor([[0.1], [0.9], [0.4], [0.2], [3.0]])
    grades = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0])
    batches = [{"x": answers[:3], "labels": grades[:3]}, {"x": answers[3:], "labels": grades[3:]}]
    data = SimpleNamespace(evaluation=lambda split, size: batches if split == "test" else None)
    subject = SimpleNamespace(recipe=SimpleNamespace(task="regression"), data=data)
    # Ranks 0 3 2 1 4 against 1 2 3 0 4: 1 - 6 * (1 + 1 + 1 + 1 + 0) / (5 * 24).
    assert study.tested(subject, _Graded()) == ("spearman", pytest.approx(0.8), 5)


def test_the_halves_are_both_there(study: ModuleType) -> None:
    assert set(study.CHOOSING) < set(study.TASKS) == set(study.TITLES)
    assert len(study.TASKS) >= 9
    assert 2 * len(study.CHOOSING) - len(study.TASKS) in (0, 1)
