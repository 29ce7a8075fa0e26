"""Rows that stand in two parts of the data are counted, for every task and source: as given, and as
read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

from headprune.data.datasets import encode_rows, load_rows
from headprune.data.models import prepare
from headprune.data.overlap import read_notes, read_twice
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import check_recipe
from headprune.run import runner
from tests.tiny_models import bert, encoder_decoder, llama, vit, wav2vec2

Row = dict[str, Any]


def words(i: int, *more: str) -> list[str]:
    """Eight words that are those of row ``i`` alone, and others after them."""
    return [*(f"w{n}" for n in (i % 10, 10 + i // 10, 20 + i % 7, 3, 3, 3, 3, 3)), *more]


def text(i: int, *more: str) -> str:
    return " ".join(words(i, *more))


def answered(i: int, *more: str) -> Row:
    context = text(i, *more)
    return {
        "question": "w1",
        "context": context,
        "label": {"text": [context.split()[0]], "answer_start": [0]},
    }


@dataclass(frozen=True)
class Kind:
    """A task on some kind of row.

    Args:
        task: The task.
        row: Row ``i``.
        twin: A row that is given as another one, and that the model reads as row ``i``; None where
            there is none.
        section: What the recipe says of the data.
        model: Writes the model; None builds one.
        source: Where the rows come from.
    """

    task: str
    row: Callable[[int], Row]
    twin: Callable[[int], Row] | None = None
    section: dict[str, Any] = field(default_factory=dict)
    model: Callable[[Path], Path] | None = bert
    source: str = "jsonl"


def picture(i: int, mode: str = "RGB") -> Any:
    from PIL import Image

    grey = np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8)
    return Image.fromarray(grey).convert(mode)


def clip(i: int, tail: float = 0.0) -> Row:
    samples = np.random.default_rng(i).uniform(-1, 1, 80)
    samples[60:] = tail
    return {"audio": {"array": samples.tolist(), "sampling_rate": 100}, "label": i % 2}


def tokens(i: int, *more: int) -> Row:
    return {"ids": [5 + i % 20, 5 + i // 20, 6, 6, *more]}


CUT = {"max_length": 6}
ONE = {**CUT, "text": "text"}


def labelled(i: int, *more: str) -> Row:
    return {"text": text(i, *more), "label": i % 2}


KINDS = {
    "texts": Kind("text_classification", labelled, lambda i: labelled(i, "w9"), ONE),
    "texts, csv": Kind(
        "text_classification", labelled, lambda i: labelled(i, "w9"), ONE, source="csv"
    ),
    "texts, parquet": Kind(
        "text_classification", labelled, lambda i: labelled(i, "w9"), ONE, source="parquet"
    ),
    "texts, hub": Kind(
        "text_classification", labelled, lambda i: labelled(i, "w9"), ONE, source="hub"
    ),
    "words that the tokenizer lacks": Kind(
        "text_classification",
        lambda i: {"text": f"{text(i)} one", "label": i % 2},
        lambda i: {"text": f"{text(i)} other", "label": i % 2},
        {"text": "text"},
    ),
    "pairs": Kind(
        "text_classification",
        lambda i: {"a": text(i), "b": "w1", "label": i % 2},
        lambda i: {"a": text(i, "w9"), "b": "w1", "label": i % 2},
        {"text": ["a", "b"], "max_length": 8},
    ),
    "grades": Kind(
        "regression",
        lambda i: {"text": text(i), "label": i / 9},
        lambda i: {"text": text(i, "w9"), "label": i / 3},  # another label is no other input
        ONE,
        lambda path: bert(path, num_labels=1),
    ),
    "tags": Kind(
        "token_classification",
        lambda i: {"text": words(i), "label": [n % 2 for n in range(8)]},
        lambda i: {"text": words(i, "w9"), "label": [n % 2 for n in range(9)]},
        ONE,
        lambda path: bert(path, "BertForTokenClassification"),
    ),
    "questions": Kind(
        "question_answering",
        answered,
        lambda i: answered(i, "w9"),
        {"text": ["question", "context"], "max_length": 9},
        lambda path: bert(path, "BertForQuestionAnswering"),
    ),
    "language": Kind(
        "causal_lm", lambda i: {"text": text(i)}, lambda i: {"text": text(i, "w9")}, ONE, llama
    ),
    "tokens": Kind(
        "causal_lm", tokens, lambda i: tokens(i, 7), {"tokens": "ids", "max_length": 4}, llama
    ),
    "translation": Kind(
        "translation",
        lambda i: {"text": text(i), "de": text(i).upper()},
        lambda i: {"text": text(i, "w9"), "de": "w8"},
        {**ONE, "target": "de"},
        encoder_decoder,
    ),
    "arrays": Kind(
        "image_classification",
        lambda i: {"image": np.random.default_rng(i).random((8, 8)).tolist(), "label": i % 2},
        model=None,
    ),
    "pictures": Kind(
        "image_classification",
        lambda i: {"image": picture(i), "label": i % 2},
        lambda i: {
            "image": picture(i, "L"),
            "label": i % 2,
        },  # one channel, of which the processor makes three
        model=vit,
        source="parquet",
    ),
    "sound": Kind(
        "audio_classification",
        clip,
        lambda i: clip(i, 0.5),
        {"seconds": 0.6},
        lambda path: wav2vec2(path, num_labels=2),
        source="parquet",
    ),
}

TRAIN, VALIDATION, TEST = range(60), range(60, 75), range(75, 95)


def written(kind: Kind, folder: Path, planted: bool, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Rows of which none stands twice, or some do.

    Planted are 3 test rows in train (one of them twice), 2 validation rows in train and one test
    row in validation.
    """
    numbers = {"train": [*TRAIN], "validation": [*VALIDATION], "test": [*TEST]}
    if planted:
        numbers["train"] += [75, 76, 77, 77, 60, 61]
        numbers["validation"] += [80]
    return stored(
        kind,
        {split: [kind.row(i) for i in those] for split, those in numbers.items()},
        folder,
        monkeypatch,
    )


def stored(
    kind: Kind, rows: dict[str, list[Row]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Recipe:
    import datasets

    folder.mkdir(exist_ok=True)
    path = str(folder)
    if kind.source == "jsonl":
        for split, those in rows.items():
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, those)))
    elif kind.source == "hub":
        found = DatasetDict({split: Dataset.from_list(those) for split, those in rows.items()})
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: found)
        path = "someone/something"
    else:
        for split, those in rows.items():
            data = Dataset.from_dict({name: [row[name] for row in those] for name in those[0]})
            getattr(data, f"to_{kind.source}")(str(folder / f"{split}.{kind.source}"))
    sizes = {
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        "hidden_size": 8,
        "num_hidden_layers": 1,
    }
    fresh = {
        "class_name": "ViTForImageClassification",
        "config": {**sizes, "num_attention_heads": 2},
    }
    raw = {
        "name": "test",
        "description": "for tests",
        "task": kind.task,
        "device": "cpu",
        "model": fresh if kind.model is None else {"path": str(kind.model(folder / "model"))},
        "data": {"path": path, "calibration": 1000, **kind.section},
        "select": {"keep_heads": 0.5},
    }
    return check_recipe(raw)


NONE_READ = {
    "test": {"train": 0, "calibration": 0, "validation": 0},
    "validation": {"train": 0, "calibration": 0},
}


@pytest.mark.parametrize("name", KINDS)
def test_planted_rows_are_counted_exactly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    chosen = written(kind, tmp_path / "data", True, monkeypatch)
    raw = load_rows(chosen)
    assert raw.facts["overlap"] == {
        "given": {"test": {"train": 3}, "validation": {"train": 2, "test": 1}}
    }
    assert [note.partition(" (")[0].partition(":")[0] for note in raw.warnings] == [
        "3 of 20 test rows stood among the train rows, too",
        "2 of 15 validation rows stood among the train rows, too",
        "1 validation rows stood among the test rows, too",
    ]
    assert raw.facts["train"]["rows"] == len(TRAIN)
    assert read_twice(encode_rows(chosen, raw, prepare(chosen)).examples) == NONE_READ


@pytest.mark.parametrize("name", KINDS)
def test_where_no_row_stands_twice_nothing_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = written(KINDS[name], tmp_path / "data", False, monkeypatch)
    raw = load_rows(chosen)
    assert raw.facts["overlap"] == {
        "given": {"test": {"train": 0}, "validation": {"train": 0, "test": 0}}
    }
    assert raw.warnings == ()
    data = encode_rows(chosen, raw, prepare(chosen))
    found = read_twice(data.examples)
    assert found == NONE_READ
    assert read_notes(found, data.examples) == ()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.twin is not None])
def test_rows_that_the_model_reads_as_others_are_counted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    assert kind.twin is not None
    train = [*map(kind.row, TRAIN), *map(kind.twin, (75, 76, 77, 60))]
    validation = [*map(kind.row, VALIDATION), kind.twin(78)]
    rows = {"train": train, "validation": validation, "test": [*map(kind.row, TEST)]}
    chosen = stored(kind, rows, tmp_path / "data", monkeypatch)
    raw = load_rows(chosen)
    assert raw.warnings == ()
    data = encode_rows(chosen, raw, prepare(chosen))
    found = read_twice(data.examples)
    assert found == {
        "test": {"train": 3, "calibration": 3, "validation": 1},
        "validation": {"train": 1, "calibration": 1},
    }
    first, second = read_notes(found, data.examples)
    assert first.startswith(
        "of 20 test rows the model reads some exactly as rows of other parts (3 of train, 3 of cal"
    )
    assert second.startswith(
        "of 16 validation rows the model reads some exactly as rows of other parts (1 of train, 1"
    )
    assert len(data.examples["test"]) == len(TEST)  # none is taken away


def test_parts_that_are_drawn_from_train_count_their_repetitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten rows stand twice in a single file; a draw parts some of them."""
    kind = KINDS["texts"]
    rows = {"train": [*map(kind.row, range(80)), *map(kind.row, range(10))]}
    raw = load_rows(stored(kind, rows, tmp_path / "data", monkeypatch))
    taken = {
        name: [rows["train"][i]["text"] for i in part.rows] for name, part in raw.parts.items()
    }
    drawn = {i for name in ("test", "validation") for i in raw.parts[name].rows}
    rest = {row["text"] for i, row in enumerate(rows["train"]) if i not in drawn}
    counts = {name: sum(said in rest for said in taken[name]) for name in ("test", "validation")}
    given = raw.facts["overlap"]["given"]
    assert given == {
        "test": {"train": counts["test"]},
        "validation": {"train": counts["validation"], "test": 0},
    }
    assert 0 < counts["test"] == raw.facts["train"]["dropped"] - counts["validation"]


def test_digits_have_no_row_twice() -> None:
    raw = {
        "name": "test",
        "description": "for tests",
        "task": "image_classification",
        "model": {"class_name": "ViTForImageClassification"},
        "data": {"path": "sklearn:digits"},
        "select": {"keep_heads": 0.5},
    }
    found = load_rows(check_recipe(raw))
    assert found.facts["overlap"]["given"] == {
        "test": {"train": 0},
        "validation": {"train": 0, "test": 0},
    }


def test_blocks_of_a_text_that_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [f"{text(i)} "[:24].ljust(24) for i in range(40)]
    (tmp_path / "text.txt").write_text(
        "".join([*blocks[:30], blocks[35], blocks[36], *blocks[30:]])
    )
    section = {
        "path": str(tmp_path / "text.txt"),
        "text": "text",
        "block": 24,
        "holdout": 4,
        "test_holdout": 6,
    }
    raw = {
        "name": "test",
        "description": "for tests",
        "task": "causal_lm",
        "model": {"path": str(llama(tmp_path / "model"))},
        "data": section,
        "select": {"keep_heads": 0.5},
    }
    found = load_rows(check_recipe(raw))
    assert found.facts["overlap"]["given"] == {
        "test": {"train": 2},
        "validation": {"train": 0, "test": 0},
    }


def test_a_run_says_and_records_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["texts"]
    assert kind.twin is not None
    rows = {
        "train": [*map(kind.row, TRAIN), kind.row(75), kind.twin(76)],
        "validation": [*map(kind.row, VALIDATION)],
        "test": [*map(kind.row, TEST)],
    }
    lines: list[str] = []
    subject = runner.prepared(stored(kind, rows, tmp_path / "data", monkeypatch), say=lines.append)
    record = subject.journal.record
    assert record.rows["overlap"]["given"]["test"]["train"] == 1
    assert record.rows["overlap"]["read"]["test"] == {"train": 1, "calibration": 1, "validation": 0}
    for start in (
        "1 of 20 test rows stood among the train rows, too",
        "of 20 test rows the model reads some exactly",
    ):
        (warning,) = [w for w in record.warnings if w.startswith(start)]
        assert f"    warning: {warning}" in lines


def test_a_digest_tells_names_shapes_and_types_apart() -> None:
    """Inputs of the same bytes are not the same inputs."""
    examples = [
        {"input_ids": [1, 2, 3]},
        {"other_ids": [1, 2, 3]},
        {"input_ids": [1, 2], "mask": [3]},
        {"input_ids": [1], "mask": [2, 3]},
        {"pixels": torch.zeros(2, 4)},
        {"pixels": torch.zeros(4, 2)},
        {"pixels": torch.zeros(4, dtype=torch.float64)},
        {"pixels": torch.zeros(8, dtype=torch.int32)},
    ]
    for i, one in enumerate(examples):
        others = examples[:i] + examples[i + 1 :]
        found = read_twice({"test": [one], "validation": [], "train": others, "calibration": []})
        assert found["test"] == {"train": 0, "calibration": 0, "validation": 0}
        again = read_twice(
            {"test": [{**one, "labels": 0}], "validation": [], "train": [one], "calibration": []}
        )
        assert again["test"]["train"] == 1
