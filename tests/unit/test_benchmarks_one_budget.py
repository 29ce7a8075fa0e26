"""The study of heads and neurons under one budget of speed, on the tiny digits."""

from __future__ import annotations

from pathlib import Path

import pytest

import headprune as hp
from tests.benchmark_runs import TINY_DIGITS, page_of, record_of
from tests.scripts import benchmark
from tests.steady_clock import steady_levels


def _command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The study of the tiny digits, with a latency table that does not depend on the machine."""
    monkeypatch.setattr(hp.bench, "latency_table", steady_levels)
    out = tmp_path / "one-budget-digits.json"
    few = f"--task digits --data {tmp_path} --work {tmp_path} --out {out} --calibration 24"
    return f"{few} --set {TINY_DIGITS} --seconds 0.01 --batch 2"


def test_a_speed_is_cut_judged_and_timed_and_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = benchmark("one_budget")
    few = _command(tmp_path, monkeypatch)
    rows = record_of(study, f"{few} --speedups 1.5")["rows"]
    assert [row["way"] for row in rows] == [study.BOTH, study.HEADS]
    for row in rows:
        assert row["predicted"] >= 1.5
        assert 0 <= row["test"] <= 1
    both, alone = rows
    assert len(set(alone["neurons"])) == 1, "all are kept"
    assert sum(both["heads"]) >= sum(alone["heads"])
    # The table is read from its file now. No plan is so fast: the speed is passed over.
    monkeypatch.delattr(hp.bench, "latency_table")
    again = record_of(study, f"{few} --speedups 1.5 1000")["rows"]
    assert again == rows
    text = page_of(study, tmp_path, study.PAGE)
    assert "## digits, ViT, 10 classes" in text
    assert f"| {study.BOTH} | 1.5 | {both['predicted']:.2f} |" in text


def test_what_is_trained_stands_beside_a_smaller_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = benchmark("one_budget")
    command = _command(tmp_path, monkeypatch) + " --speedups 1.5 1000 --train"
    rows = {row["way"]: row for row in record_of(study, command)["rows"]}
    smaller, trained = list(study.TIMES_OF_SMALLER), list(study.TIMES)
    assert list(rows) == [*smaller, study.BOTH, *trained, study.HEADS]
    cut, trained, smaller = (rows[way] for way in (study.BOTH, study.TRAINED, study.SMALLER))
    assert (trained["heads"], trained["neurons"]) == (cut["heads"], cut["neurons"])
    assert "train" not in cut["seconds"]
    assert len(smaller["heads"]) <= len(cut["heads"])
    assert len({*smaller["neurons"]}) == 1, "all layers are alike"
    assert sum(smaller["neurons"]) < 2 * smaller["width"], "fewer or narrower layers"
    text = page_of(study, tmp_path, study.PAGE)
    assert f"| {study.SMALLER} | 1.5 | - |" in text
    assert "- Asked 1.5: " in text
    assert "- Asked 1.5, longer: " in text


def test_what_one_machine_judges_another_one_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = benchmark("one_budget")
    command = _command(tmp_path, monkeypatch) + " --speedups 1.5 --train"
    tables = tmp_path / "tables"
    with pytest.raises(SystemExit, match="--step table"):
        study.main([*command.split(), "--step", "judge", "--tables", str(tables)])
    tables.mkdir()
    study.main([*command.split(), "--step", "table", "--tables", str(tables)])
    judged = record_of(study, f"{command} --step judge --tables {tables}")
    assert all("test" in row and "ratio" not in row for row in judged["rows"])
    timed = record_of(study, f"{command} --step time")
    assert timed["timed"]["hardware"]["device"] == "cpu"
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in timed["rows"])
    # One shape is timed once.
    both, trained = (
        next(row for row in timed["rows"] if row["way"] == way)
        for way in (study.BOTH, study.TRAINED)
    )
    assert both["ratio"] == trained["ratio"]
    untimed = [
        {k: row[k] for k in old} for row, old in zip(timed["rows"], judged["rows"], strict=True)
    ]
    assert untimed == judged["rows"]
    assert "Chosen, trained and judged on: " in page_of(study, tmp_path, study.PAGE)
