"""Benchmark scripts run from end to end on models and data made here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import WORDS, benchmark, tiny_encoder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tradeoff() -> ModuleType:
    return benchmark("tradeoff")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a tokenizer in ``model/``, and labelled questions."""
    folder = tmp_path_factory.mktemp("tradeoff")
    tiny_encoder(folder)
    draw = random.Random(0)
    for split, count in (("train", 60), ("validation", 12), ("test", 20)):
        rows = [{"text": " ".join(draw.choices(WORDS, k=6)), "label": i % 3} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_tradeoff_writes_its_record(tradeoff: ModuleType, given: Path, tmp_path: Path) -> None:
    where = ["--data", str(given), "--model", str(given / "model"), "--out", str(tmp_path / "record.json")]
    amounts = ["--budgets", "6", "3", "--draws", "2", "--seconds", "0.01", "--batch-sizes", "1", "--lengths", "8"]
    record = json.loads(tradeoff.main([*where, *amounts]).read_text())
    assert record["device"] == "cpu"
    assert {"torch", "transformers", "headprune"} <= set(record["versions"])
    assert record["hardware"]["device"] == "cpu"
    assert record["rows"]["test"] == record["base"]["n"] == record["dense + finetune"]["n"] == 20
    assert {"accuracy", "loss"} <= set(record["dense + finetune"])
    assert [row["kept_heads"] for row in record["budgets"]] == [6, 3]
    for row in record["budgets"]:
        assert sum(row["heads_per_layer"]) == row["kept_heads"]
        ways = ["taylor", "magnitude", "random", "taylor + mean_fold", "taylor + finetune"]
        assert list(row["quality"]) == ways
        draws = row["quality"]["random"]["draws"]
        assert len(draws) == 2
        assert row["quality"]["random"]["mean"] == pytest.approx(sum(draws) / 2)
        assert 0 <= row["largest_difference"] < 1e-4
        assert row["sizes"]["heads"] == [8, row["kept_heads"]]
        assert [(cell["batch"], cell["length"]) for cell in row["speed"]] == [(1, 8)]
        assert row["speed"][0]["rounds"] >= 8


def test_tradeoff_takes_the_data_of_its_recipe(
    tradeoff: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tradeoff.arguments([]).data is None
    paths: list[str] = []

    def stop(recipe: object) -> None:
        paths.append(recipe.data.path)  # type: ignore[attr-defined]
        raise InterruptedError

    monkeypatch.setattr(tradeoff, "load_rows", stop)
    with pytest.raises(InterruptedError):
        tradeoff.main([])
    assert paths == ["CogComp/trec"]
    with pytest.raises(SystemExit):
        tradeoff.arguments(["--task", "sst2"])
    assert "--data must be given for sst2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model_type", "status", "reason"),
    [
        ("esm", "exact", ""),
        ("git", "exact", ""),
        ("gpt_bigcode", "exact", ""),
        ("xlnet", "refused", "projections that are no matrices"),
        ("longformer", "refused", "head counts kept elsewhere"),
        ("mamba", "no softmax attention", "no softmax attention"),
    ],
)
def test_coverage_examines_one_class(model_type: str, status: str, reason: str) -> None:
    row = benchmark("coverage").examine(model_type)
    assert row["status"] == status, row
    assert reason in row["reason"]
    assert (row["difference"] is not None and row["difference"] < 1e-10) == (status == "exact")


def test_coverage_draws_the_same_classes_for_a_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    coverage = benchmark("coverage")
    row = {"class": "X", "sites": 1, "unreached": 0, "layouts": ["bert"], "difference": 1e-15, "status": "exact"}
    monkeypatch.setattr(
        coverage, "examine_apart", lambda model_type, seconds: {"model_type": model_type, "reason": "", **row}
    )
    records = []
    for name in ("one", "two"):
        out, page = tmp_path / f"{name}.json", tmp_path / f"{name}.md"
        coverage.main(["--count", "4", "--out", str(out), "--table", str(page)])
        records.append(json.loads(out.read_text()))
        assert "**4 of\n4 are cut exactly" in page.read_text()
    drawn = [[r["model_type"] for r in record["rows"]] for record in records]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 4
    assert not set(drawn[0]) & coverage.known_types()


def test_exactness_measures_a_family(tmp_path: Path) -> None:
    out = tmp_path / "exactness.json"
    assert benchmark("exactness").main(["--families", "bert", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"].values()
    assert row["reloaded_minus_pruned"] == 0
    assert row["zero_heads"] == ["ok"]


def test_the_record_of_exactness_is_that_of_todays_families() -> None:
    from headprune.layouts import registry

    rows = json.loads((ROOT / "benchmarks" / "records" / "exactness.json").read_text())["rows"]
    families = {family for name in registry.names() for family, _ in registry.get(name).families}
    assert set(rows) == families, "run `python benchmarks/exactness.py`"
    assert [family for family, row in rows.items() if not benchmark("exactness").is_exact(row)] == []
