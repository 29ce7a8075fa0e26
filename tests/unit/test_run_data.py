"""Rows: what is read, what is refused, and that nothing stands in two parts."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

from headprune.core.errors import InvalidValue
from headprune.data.datasets import Data, encode_rows, load_rows
from headprune.data.features import Collate
from headprune.data.models import Preparation
from headprune.data.splits import normalised, partition
from headprune.recipes.schema import Recipe
from tests.small_recipes import checked_recipe, write_rows


def recipe(path: object, task: str = "text_classification", **data: Any) -> Recipe:
    inputs = {"image_classification": {}, "causal_lm": {"tokens": "ids"}}
    section = {"path": str(path), **inputs.get(task, {"text": "text"}), **data}
    return checked_recipe(task, "somewhere", section)


PARTS = ("train", "validation", "test")


def sizes(raw: Any) -> list[int]:
    return [len(raw.splits[part]) for part in PARTS]


def questions(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"text": f"question {i}", "label": i % 3} for i in range(start, start + n)]


def texts(raw: Any, part: str) -> set[str]:
    return {normalised(t) for t in raw.splits[part]["text"]}


def parts_of(keys: dict[str, list[str]], **settings: Any) -> dict[str, Any]:
    amounts = {"holdout": 0.2, "test_holdout": 0.2, "calibration": 10, "seed": 0, "strata": None}
    return partition(keys, **{**amounts, **settings})


def test_parts_never_overlap_although_rows_repeat():
    keys = [f"k{i % 40}" for i in range(200)]  # every row stands there five times
    parts = parts_of({"train": keys})
    train, validation, test = ({keys[i] for i in parts[name].rows} for name in PARTS)
    assert all((train, validation, test))
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert parts["train"].dropped > 0


def test_leaks_are_dropped_from_the_earlier_part_and_test_stays_whole():
    keys = {"train": list("abcde"), "validation": ["b", "x", "t"], "test": ["c", "t", "t"]}
    parts = parts_of(keys)
    assert parts["test"].rows == (0, 1, 2)
    assert parts["test"].duplicates == 1
    assert (parts["validation"].rows, parts["validation"].dropped) == ((0, 1), 1)
    assert (parts["train"].rows, parts["train"].dropped) == ((0, 3, 4), 2)


def test_calibration_is_a_seeded_part_of_train():
    keys = {"train": [str(i) for i in range(100)], "test": ["t"]}
    first, again, other = (parts_of(keys, seed=s)["calibration"] for s in (0, 0, 1))
    assert set(first.rows) <= set(parts_of(keys, seed=0)["train"].rows)
    assert len(set(first.rows)) == 10
    assert first == again
    assert first.digest == again.digest
    assert first.digest != other.digest
    assert len(parts_of(keys, calibration=1000)["calibration"].rows) == 80


def test_holdout_counts_and_keeps_proportions():
    labels = [0] * 80 + [1] * 20
    keys = {"train": [str(i) for i in range(100)], "test": ["t"]}
    parts = parts_of(keys, holdout=10, strata=labels)
    assert parts["validation"].source == "train"
    assert sum(labels[i] for i in parts["validation"].rows) == 2
    assert len(parts["train"].rows) == 90
    alone = parts_of(keys, holdout=10, strata=[0] * 99 + [1])  # one row is no stratum
    assert len(alone["validation"].rows) == 10


def test_parts_without_rows_are_refused():
    for keys, settings, words in (
        ({"train": ["a"], "test": ["a"]}, {}, "data.holdout: must be fewer than the 0 rows"),
        ({"train": "ab", "validation": "ab", "test": "c"}, {}, "train: must be at least one row"),
        ({"train": "ab", "validation": "c", "test": "c"}, {}, "validation: must be at least one"),
        ({"train": ["a"] * 5}, {"test_holdout": 5}, "data.test_holdout"),
        ({"train": ["a"] * 5, "test": "b"}, {"holdout": 9}, "must be fewer than the 5 rows"),
    ):
        with pytest.raises(InvalidValue, match=words):
            parts_of({part: list(rows) for part, rows in keys.items()}, **settings)


def test_folder_with_train_and_test_gets_a_holdout(tmp_path):
    write_rows(tmp_path / "train.jsonl", [*questions(50), {"text": "  QUESTION  60 ", "label": 0}])
    write_rows(tmp_path / "test.jsonl", questions(10, start=60))
    raw = load_rows(recipe(tmp_path, holdout=12, calibration=8))
    assert (*sizes(raw), len(raw.splits["calibration"])) == (38, 12, 10, 8)
    assert raw.facts["train"]["dropped"] == 1  # "  QUESTION  60 " is test row "question 60"
    assert not texts(raw, "train") & (texts(raw, "validation") | texts(raw, "test"))
    assert texts(raw, "calibration") <= texts(raw, "train")
    assert set(raw.facts["source"]["sha256"]) == {"train.jsonl", "test.jsonl"}
    assert raw.labels == (0, 1, 2)


def test_a_replaced_file_is_read_anew(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", questions(30))
    before = load_rows(recipe(path)).facts["source"]
    stat = path.stat()
    write_rows(path, [{"text": f"questiom {i}", "label": i % 3} for i in range(30)])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    raw = load_rows(recipe(path))
    assert all(text.startswith("questiom") for text in raw.splits["train"]["text"])
    assert raw.facts["source"] != before


def test_labels_are_in_order_and_in_the_first_column_that_is_there(tmp_path):
    rows = [{"text": f"t{i}", "label": ["pear", "apple"][i % 2]} for i in range(20)]
    raw = load_rows(recipe(write_rows(tmp_path / "a.jsonl", rows), label=["coarse", "label"]))
    assert raw.labels == ("apple", "pear")
    assert raw.label == raw.facts["source"]["label"] == "label"


TEXTS, GRADES, TOKENS = "text_classification", "regression", "causal_lm"


def with_row(**row: Any) -> list[dict[str, Any]]:
    return [*questions(9), {"text": "x", "label": 0, **row}]


def test_bad_rows(tmp_path):
    numbers = [{"text": f"t{i}", "label": "3.5"} for i in range(9)]
    for rows, task, settings, words in (
        (questions(20), TEXTS, {"text": "txt"}, "data.text: .*'txt'. Did you mean 'text'"),
        (questions(20), TEXTS, {"label": "lable"}, "data.label: .*Did you mean 'label'"),
        (with_row(text=None), TEXTS, {}, "train, row 9: must be text"),
        (with_row(text=""), TEXTS, {}, "train, row 9: must be text"),
        (with_row(label=None), TEXTS, {}, "train, row 9: must be labelled"),
        (with_row(label=-1), TEXTS, {}, "class numbers >= 0"),
        (with_row(label=None), GRADES, {}, "row 9: .*finite number"),
        (numbers, GRADES, {}, "finite number"),
        ([{"ids": [1, 2]}] * 5 + [{"ids": []}], TOKENS, {}, "row 5: must be a list that is not"),
    ):
        path = write_rows(tmp_path / "rows.jsonl", rows)
        with pytest.raises(InvalidValue, match=words):
            load_rows(recipe(path, task, **settings))


def test_not_a_number_as_regression_label(tmp_path):
    lines = [f"t{i},{'nan' if i == 3 else i / 2}" for i in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *lines]))
    with pytest.raises(InvalidValue, match="row 3: must be labelled with a finite number"):
        load_rows(recipe(tmp_path / "rows.csv", GRADES))


def test_missing_and_empty_data(tmp_path):
    for number, (name, text, words) in enumerate(
        (
            (None, "", "an empty folder"),
            ("train.jsonl", "", r"train.jsonl, which is empty"),
            ("train.jsonl", "\n", r"data.path: must be readable data, got .*no (rows|data)"),
            ("train.jsonl", "{not json", r"data.path: must be readable data"),
            ("other.jsonl", '{"text": "a", "label": 0}', r"other.jsonl. Set data.train_split"),
        )
    ):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        if name is not None:
            (folder / name).write_text(text)
        with pytest.raises(InvalidValue, match=words):
            load_rows(recipe(folder))


def test_paths_that_are_no_data(tmp_path):
    with pytest.raises(InvalidValue, match=r"data.path: must be an existing file or folder"):
        load_rows(recipe(tmp_path / "nothing"))
    (tmp_path / "rows.xlsx").write_text("x")
    with pytest.raises(InvalidValue, match=r"files of one format"):
        load_rows(recipe(tmp_path / "rows.xlsx"))
    with pytest.raises(InvalidValue, match=r"data\.path: .*'sklearn:digits'.* 'sklearn:iris'"):
        load_rows(recipe("sklearn:iris", "image_classification"))


def hub(monkeypatch: pytest.MonkeyPatch, **splits: list[dict[str, Any]]) -> None:
    found = DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: found)


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    unreachable = Mock(side_effect=ConnectionError("Couldn't reach the Hub"))
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(InvalidValue, match=r"Couldn't reach the Hub.*--set data.path=FOLDER"):
        load_rows(recipe("someone/something"))


def test_digits_are_split_in_proportion_and_normalised_by_train():
    chosen = recipe("sklearn:digits", "image_classification", holdout=300, test_holdout=420)
    chosen = chosen.model_copy(update={"model": chosen.model.model_copy(update={"path": None})})
    raw = load_rows(chosen)
    assert sizes(raw) == [1077, 300, 420]
    counts = np.bincount(raw.splits["test"]["label"])
    assert counts.min() >= 40
    data = encode_rows(chosen, raw, Preparation())
    pixels = torch.stack([e["pixel_values"] for e in data.examples["train"]])
    assert pixels.shape == (1077, 1, 8, 8)
    torch.testing.assert_close(pixels.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(pixels.std(), torch.tensor(1.0), atol=1e-4, rtol=0)
    plain = chosen.model_copy(update={"data": chosen.data.model_copy(update={"normalise": False})})
    examples = encode_rows(plain, raw, Preparation()).examples["train"]
    pixels = torch.stack([e["pixel_values"] for e in examples])
    assert (pixels.min().item(), pixels.max().item()) == (0.0, 1.0)


def test_batches_of_like_length_hold_every_row_once_in_random_order(tmp_path):
    rows = [{"ids": [100 + i, *range(1 + i % 9)]} for i in range(80)]
    chosen = recipe(write_rows(tmp_path / "rows.jsonl", rows), "causal_lm")
    data = encode_rows(chosen, load_rows(chosen), Preparation(pad=9))
    batches = data.of_like_length("train", 4)
    firsts = [first for batch in batches for first in batch["input_ids"][:, 0].tolist()]
    assert sorted(firsts) == sorted(row["input_ids"][0] for row in data.examples["train"])
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    assert lengths[0] == max(lengths), "what the memory cannot hold shows at once"
    assert lengths != sorted(lengths, reverse=True), "the first ones would be the longest"
    padded = sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)
    in_data_order = data.batches("train", 4)
    assert padded < sum(int((batch["attention_mask"] == 0).sum()) for batch in in_data_order) / 2
    loader = data.same_batches("train", 4)
    for again in (data.of_like_length("train", 4), loader, loader):
        for one, other in zip(batches, again, strict=True):
            assert torch.equal(one["input_ids"], other["input_ids"])


def test_tokens_are_cut_padded_and_batched(tmp_path):
    rows = [{"ids": list(range(1, 3 + i % 7))} for i in range(40)]
    for i, row in enumerate(rows):
        row["ids"][0] = 100 + i
    chosen = recipe(write_rows(tmp_path / "rows.jsonl", rows), "causal_lm", max_length=5)
    data = encode_rows(chosen, load_rows(chosen), Preparation(pad=9))
    batches = data.evaluation("test", 4)
    assert sum(len(b["input_ids"]) for b in batches) == len(data.examples["test"]) == 8
    assert max(b["input_ids"].shape[1] for b in batches) == 5
    for batch in batches:
        assert bool((batch["input_ids"][batch["attention_mask"] == 0] == 9).all())
        assert "labels" not in batch
    loaders = data.loader("train", 4), data.loader("train", 4)
    one, other, next_pass = (
        [first for batch in loader for first in batch["input_ids"][:, 0].tolist()]
        for loader in (*loaders, loaders[0])
    )
    assert sorted(one) == sorted(e["input_ids"][0] for e in data.examples["train"])
    assert one == other  # the same order for a new loader
    assert one != next_pass  # a new one for each pass


def test_one_token_is_too_short_for_a_language_model(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"ids": [i]} for i in range(30)])
    chosen = recipe(path, "causal_lm")
    with pytest.raises(InvalidValue, match="at least two tokens"):
        encode_rows(chosen, load_rows(chosen), Preparation())


def test_collate_pads_on_either_side():
    examples = [{"input_ids": [1, 2, 3], "labels": [1, 1, 1]}, {"input_ids": [4], "labels": [0]}]
    assert Collate(pad=7)(examples)["input_ids"].tolist() == [[1, 2, 3], [4, 7, 7]]
    assert Collate(pad=7)(examples)["labels"].tolist() == [[1, 1, 1], [0, -100, -100]]
    assert Collate(pad=7, side="left")(examples)["input_ids"].tolist() == [[1, 2, 3], [7, 7, 4]]
    with pytest.raises(InvalidValue, match="batch: must be made of examples, got none"):
        Collate()([])


def test_a_mistyped_split_is_no_holdout(tmp_path):
    for name, start in (("train", 0), ("val", 50), ("test", 60)):
        write_rows(tmp_path / f"{name}.jsonl", questions(10, start))
    for settings, words in (
        ({"test_split": "tset"}, r"data.test_split: must be a split of .*Did you mean 'test'"),
        ({"validation_split": "vall"}, r"data.validation_split: .*Did you mean 'val'"),
    ):
        with pytest.raises(InvalidValue, match=words):
            load_rows(recipe(tmp_path, **settings))
        with pytest.raises(InvalidValue, match=r"data\."):
            load_rows(recipe(tmp_path / "train.jsonl", **settings))


def test_splits_of_a_hub_data_set(monkeypatch):
    hub(monkeypatch, train=questions(20), dev=questions(20, 30))
    raw = load_rows(recipe("someone/something"))
    assert raw.facts["validation"]["from"] == "validation"
    assert raw.facts["source"]["splits"]["validation"] == "dev"
    with pytest.raises(InvalidValue, match=r"data.test_split: .*Known: dev, train"):
        load_rows(recipe("someone/something", test_split="questions"))


def test_a_hub_data_set_without_rows(monkeypatch):
    for splits, words in (
        ({"test": 20}, r"data\.train_split: must be a split of .* got only test"),
        ({}, r"data\.train_split: must be a split of .* got only none"),
        ({"train": 20, "test": 0}, r"test: must be at least one row .* got an empty split"),
    ):
        hub(monkeypatch, **{name: questions(n) for name, n in splits.items()})
        with pytest.raises(InvalidValue, match=words):
            load_rows(recipe("someone/something"))


def test_a_split_that_is_named_for_one_purpose_serves_no_other(tmp_path):
    write_rows(tmp_path / "train.jsonl", questions(40))
    write_rows(tmp_path / "validation.jsonl", questions(10, start=50))
    raw = load_rows(recipe(tmp_path, test_split="validation", holdout=8))
    assert raw.facts["source"]["splits"] == {"train": "train", "test": "validation"}
    assert texts(raw, "test") == {f"question {i}" for i in range(50, 60)}
    assert (raw.facts["validation"]["from"], raw.facts["validation"]["rows"]) == ("train", 8)


def test_other_names_for_validation(tmp_path):
    write_rows(tmp_path / "train.jsonl", questions(40))
    write_rows(tmp_path / "valid.jsonl", questions(7, start=50))
    raw = load_rows(recipe(tmp_path))
    assert raw.facts["validation"]["rows"] == 7
    assert raw.facts["source"]["splits"] == {"train": "train", "validation": "valid"}
    assert raw.warnings == ()
    write_rows(tmp_path / "validation.jsonl", questions(5, start=60))
    raw = load_rows(recipe(tmp_path))
    assert raw.facts["validation"]["rows"] == 5
    assert raw.warnings == (f"{tmp_path / 'valid'}.jsonl was not used",)


def test_an_image_of_no_numbers(tmp_path):
    pictures = [[[float(i), 1.0]] for i in range(9)] + [[[float("nan"), 1.0]]]
    rows = Dataset.from_dict({"image": pictures, "label": [0, 1] * 5})
    rows.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(InvalidValue, match="row 9: must be an image of finite numbers, got NaN"):
        load_rows(recipe(tmp_path, "image_classification"))


def test_some_rows_keep_their_targets():
    rows = [{"input_ids": [i]} for i in range(40)]
    targets = {"train": list(range(40)), "test": [1]}
    data = Data({"train": rows, "test": rows[:1]}, collate=list, seed=3, targets=targets)
    few = data.some("train", 5)
    assert [row["input_ids"][0] for row in few.examples["train"]] == few.targets["train"]
    assert len(set(few.targets["train"])) == 5
    assert few.examples["test"] == rows[:1]
    assert data.some("train", 40) is data.some("train", None) is data
    drawn = data.redrawn(6, seed=1).some("calibration", 4)
    rows = [row["input_ids"][0] for row in drawn.examples["calibration"]]
    assert rows == drawn.targets["calibration"]
