"""Rows that stand in two parts of the data are counted, for every task and source: as given, and as
read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from headprune.data.datasets import encode_rows, load_rows
from headprune.data.models import prepare
from headprune.data.overlap import read_notes, read_twice
from headprune.recipes.schema import Recipe
from headprune.run import runner
from tests.small_recipes import checked_recipe, write_rows
from tests.tiny_models import bert, encoder_decoder, llama, vit, wav2vec2

Row = dict[str, Any]


def words(i: int, *more: str) -> list[str]:
    return [*(f"w{n}" for n in (i % 10, 10 + i // 10, 20 + i % 7, 3, 3, 3, 3, 3)), *more]


def text(i: int, *more: str) -> str:
    return " ".join(words(i, *more))


def labelled(i: int, *more: str) -> Row:
    return {"text": text(i, *more), "label": i % 2}


def paired(i: int, *more: str) -> Row:
    return {"a": text(i, *more), "b": "w1", "label": i % 2}


def answered(i: int, *more: str) -> Row:
    context = text(i, *more)
    label = {"text": [context.split()[0]], "answer_start": [0]}
    return {"question": "w1", "context": context, "label": label}


def tokens(i: int, *more: int) -> Row:
    return {"ids": [5 + i % 20, 5 + i // 20, 6, 6, *more]}


def translated(i: int, *more: str) -> Row:
    return {"text": text(i, *more), "de": "w8" if more else text(i).upper()}


def picture(i: int, mode: str = "RGB") -> Row:
    """Of one channel the processor makes three."""
    from PIL import Image

    grey = np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8)
    return {"image": Image.fromarray(grey).convert(mode), "label": i % 2}


def clip(i: int, tail: float = 0.0) -> Row:
    samples = np.random.default_rng(i).uniform(-1, 1, 80)
    samples[60:] = tail
    return {"audio": {"array": samples.tolist(), "sampling_rate": 100}, "label": i % 2}


@dataclass(frozen=True)
class Kind:
    """A task on some kind of row; ``more`` makes of row ``i`` one that is given as another, and that
    the model reads as row ``i``."""

    task: str
    row: Callable[..., Row]
    more: Any = "w9"
    section: dict[str, Any] = field(default_factory=dict)
    model: Callable[[Path], Path] = bert
    source: str = "jsonl"

    def twin(self, i: int) -> Row:
        return self.row(i, self.more)


def answerer(path: Path) -> Path:
    return bert(path, "BertForQuestionAnswering")


TEXTS, IMAGES = "text_classification", "image_classification"
ONE = {"text": "text", "max_length": 6}
TWO = {"text": ["a", "b"], "max_length": 8}
SQUAD = {"text": ["question", "context"], "max_length": 9}
IDS = {"tokens": "ids", "max_length": 4}
KINDS = {
    "texts": Kind(TEXTS, labelled, section=ONE),
    "pairs": Kind(TEXTS, paired, section=TWO),
    "questions": Kind("question_answering", answered, section=SQUAD, model=answerer),
    "tokens": Kind("causal_lm", tokens, 7, IDS, llama),
    "translation": Kind("translation", translated, "w9", {**ONE, "target": "de"}, encoder_decoder),
    "pictures": Kind(IMAGES, picture, "L", model=vit, source="parquet"),
    "sound": Kind("audio_classification", clip, 0.5, {"seconds": 0.6}, wav2vec2, "parquet"),
}
TRAIN, VALIDATION, TEST = range(60), range(60, 75), range(75, 95)


def stored(kind: Kind, rows: dict[str, list[Row]], folder: Path) -> Recipe:
    folder.mkdir(exist_ok=True)
    for split, those in rows.items():
        if kind.source == "jsonl":
            write_rows(folder / f"{split}.jsonl", those)
        else:
            Dataset.from_list(those).to_parquet(folder / f"{split}.parquet")
    section = {"path": str(folder), "calibration": 1000, **kind.section}
    return checked_recipe(kind.task, kind.model(folder / "model"), section)


NONE_GIVEN = {"test": {"train": 0}, "validation": {"train": 0, "test": 0}}
NONE_READ = {
    "test": {"train": 0, "calibration": 0, "validation": 0},
    "validation": {"train": 0, "calibration": 0},
}


@pytest.mark.parametrize("name", KINDS)
def test_planted_rows_are_counted_as_given_and_as_the_model_reads_them(name, tmp_path):
    """Given twice are 3 test rows in train (one of them three times), 2 validation rows in train and
    one test row in validation; read twice are 2, 1 and 1 others."""
    kind = KINDS[name]
    train = [*map(kind.row, (*TRAIN, 75, 76, 77, 77, 60, 61)), *map(kind.twin, (78, 79, 62))]
    validation = [*map(kind.row, (*VALIDATION, 80)), kind.twin(81)]
    rows = {"train": train, "validation": validation, "test": list(map(kind.row, TEST))}
    chosen = stored(kind, rows, tmp_path / "data")
    raw = load_rows(chosen)
    given = {"test": {"train": 3}, "validation": {"train": 2, "test": 1}}
    assert raw.facts["overlap"] == {"given": given}
    assert [note.partition(" (")[0].partition(":")[0] for note in raw.warnings] == [
        "3 of 20 test rows are also in the train rows",
        "2 of 16 validation rows are also in the train rows",
        "1 validation rows are also in the test rows",
    ]
    assert raw.facts["train"]["rows"] == len(TRAIN) + 3
    data = encode_rows(chosen, raw, prepare(chosen))
    found = read_twice(data.examples)
    assert found["test"] == {"train": 2, "calibration": 2, "validation": 1}
    assert found["validation"] == {"train": 1, "calibration": 1}
    first, second = read_notes(found, data.examples)
    assert first.startswith(
        "some of 20 test rows are, as the model reads them, equal to rows of other parts"
    )
    assert "(2 of train, 2 of cal" in first
    assert second.startswith("some of 16 validation rows")
    assert "(1 of train, 1" in second
    assert len(data.examples["test"]) == len(TEST)  # none is taken away


def test_where_no_row_stands_twice_nothing_is_said(tmp_path):
    kind, numbers = KINDS["texts"], {"train": TRAIN, "validation": VALIDATION, "test": TEST}
    rows = {split: list(map(kind.row, those)) for split, those in numbers.items()}
    chosen = stored(kind, rows, tmp_path / "data")
    raw = load_rows(chosen)
    assert raw.facts["overlap"] == {"given": NONE_GIVEN}
    assert raw.warnings == ()
    data = encode_rows(chosen, raw, prepare(chosen))
    found = read_twice(data.examples)
    assert found == NONE_READ
    assert read_notes(found, data.examples) == ()


def test_blocks_of_a_text_that_come_again(tmp_path):
    blocks = [f"{text(i)} "[:24].ljust(24) for i in range(40)]
    path = tmp_path / "text.txt"
    path.write_text("".join([*blocks[:30], blocks[35], blocks[36], *blocks[30:]]))
    section = {"path": str(path), "text": "text", "block": 24, "holdout": 4, "test_holdout": 6}
    found = load_rows(checked_recipe("causal_lm", llama(tmp_path / "model"), section))
    assert found.facts["overlap"]["given"] == {**NONE_GIVEN, "test": {"train": 2}}


def test_a_run_says_and_records_both(tmp_path):
    kind = KINDS["texts"]
    rows = {
        "train": [*map(kind.row, TRAIN), kind.row(75), kind.twin(76)],
        "validation": list(map(kind.row, VALIDATION)),
        "test": [*map(kind.row, TEST)],
    }
    lines: list[str] = []
    subject = runner.prepared(stored(kind, rows, tmp_path / "data"), say=lines.append)
    record = subject.journal.record
    assert record.rows["overlap"]["given"]["test"]["train"] == 1
    assert record.rows["overlap"]["read"]["test"] == {"train": 1, "calibration": 1, "validation": 0}
    for start in (
        "1 of 20 test rows are also in the train rows",
        "some of 20 test rows are, as the model reads them",
    ):
        (warning,) = [w for w in record.warnings if w.startswith(start)]
        assert f"    warning: {warning}" in lines


def test_inputs_of_the_same_bytes_are_not_the_same_inputs():
    examples = [
        *({"input_ids": [1, 2, 3]}, {"other_ids": [1, 2, 3]}),
        *({"input_ids": [1, 2], "mask": [3]}, {"input_ids": [1], "mask": [2, 3]}),
        *({"pixels": torch.zeros(2, 4)}, {"pixels": torch.zeros(4, 2)}),
        {"pixels": torch.zeros(4, dtype=torch.float64)},
        {"pixels": torch.zeros(8, dtype=torch.int32)},
    ]
    for i, one in enumerate(examples):
        others = examples[:i] + examples[i + 1 :]
        found = read_twice({"test": [one], "validation": [], "train": others, "calibration": []})
        assert found["test"] == NONE_READ["test"]
