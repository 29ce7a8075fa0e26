"""Recipes for data of a contest, whose test rows keep their labels to themselves: GLUE's have -1 for every label."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, Features, Value
from typer.testing import CliRunner

from headprune.cli.main import app
from headprune.core.record import RunRecord
from headprune.run.data import load_rows
from headprune.run.guess import guess
from headprune.run.validate import load_recipe
from tests.tiny_models import WORDS, bert

SIZES = {"train": 60, "validation": 12, "test": 16}


def write(folder: Path, label: Any = None, **labels: list[Any]) -> None:
    """Sentences in parquet files; by default with the labels of SST-2 on the hub."""
    draw = random.Random(0)
    for split, n in SIZES.items():
        columns = {
            "idx": list(range(n)),
            "sentence": [" ".join(draw.choices(WORDS, k=6)) for _ in range(n)],
            "label": labels.get(split) or [-1 if split == "test" else i % 2 for i in range(n)],
        }
        kinds = {
            "idx": Value("int32"),
            "sentence": Value("string"),
            "label": label or ClassLabel(names=["bad", "good"]),
        }
        Dataset.from_dict(columns, features=Features(kinds)).to_parquet(folder / f"{split}.parquet")


@pytest.fixture(scope="module")
def contest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contest")
    write(folder)
    torch.manual_seed(0)
    bert(folder / "model", num_labels=2)
    return folder


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_test_rows_without_labels_give_way_to_those_of_validation(contest: Path, tmp_path: Path) -> None:
    made = tmp_path / "mine.yaml"
    result = call("init", "--model", contest / "model", "--data", contest, "--out", made)
    assert result.exit_code == 0, result.output
    assert "the rows of test have no labels" in result.stderr
    lines = made.read_text().splitlines()
    assert [line.partition("#")[2].strip() for line in lines if "test_split" in line or "holdout" in line] == [
        "the rows of test have no labels",
        "so rows of train are the validation rows",
    ]
    raw = load_rows(load_recipe(made))
    assert (raw.facts["test"]["from"], raw.facts["test"]["rows"]) == ("test", SIZES["validation"])
    assert raw.facts["source"]["splits"] == {"train": "train", "test": "validation"}
    assert raw.parts["validation"].source == "train"
    assert {label for rows in raw.splits.values() for label in rows["label"]} == {0, 1}
    dry = call("run", made, "--dry-run", "--set", "bench=null", "--out", tmp_path / "out")
    assert dry.exit_code == 0, dry.output


def test_a_model_is_cut_on_them_without_a_recipe(contest: Path, tmp_path: Path) -> None:
    quick = ("--set", "bench=null", "--set", "score.random_draws=0", "--set", "report=false", "--set", "recover=[]")
    where = ("--model", contest / "model", "--data", contest, "--keep", "0.5", "--out", tmp_path / "small")
    result = call("prune", *where, *quick)
    assert result.exit_code == 0, result.output
    record = RunRecord.load(tmp_path / "small" / "run" / "record.json")
    assert {row.n_examples for row in record.quality if row.split == "test"} == {SIZES["validation"]}


@pytest.mark.parametrize(
    ("kind", "labels", "expected"),
    [
        (Value("int64"), {}, "validation"),
        (Value("float64"), {"test": [-1.0] * 16, "train": [0.5] * 60, "validation": [1.5] * 12}, "validation"),
        (Value("int64"), {"test": [None] * 16}, "validation"),
        (Value("int64"), {"test": [1] + [-1] * 15}, None),  # some have labels: a mistake to be told, not a contest
        (Value("float64"), {"test": [-1.0] * 16, "train": [-0.5] * 60, "validation": [1.5] * 12}, None),
        (Value("int64"), {"validation": [-1] * 12}, None),  # no labels there either
        (Value("string"), {split: ["bad", "good"] * (n // 2) for split, n in SIZES.items()}, None),
    ],
)
def test_only_rows_without_any_label_give_way(
    contest: Path, tmp_path: Path, kind: Any, labels: dict[str, list[Any]], expected: str | None
) -> None:
    write(tmp_path, kind, **labels)
    found = yaml.safe_load(guess(str(contest / "model"), str(tmp_path)).text)["data"]
    assert found.get("test_split") == expected
    assert found.get("holdout") == (0.1 if expected else None)


def test_many_rows_hold_out_a_count(contest: Path, tmp_path: Path) -> None:
    write(tmp_path)
    n = 10_001
    rows = {"idx": list(range(n)), "sentence": ["a b"] * n, "label": [0] * n}
    Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "validation.parquet").rename(tmp_path / "dev.parquet")
    found = yaml.safe_load(guess(str(contest / "model"), str(tmp_path)).text)["data"]
    assert (found["test_split"], found["holdout"]) == ("dev", 1000)
