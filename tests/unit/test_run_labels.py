"""Numbers of labels: every kind of label column with every kind of model names gets the right
classes, or stops."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from headprune.core.errors import InvalidValue
from headprune.data.datasets import Data, RawData, encode_rows, load_rows
from headprune.data.features import Collate
from headprune.data.label_order import _labels_in_order, check_order, mapping_words, measure
from headprune.data.labels import number_labels
from headprune.data.models import prepare
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import check_recipe
from headprune.run import runner
from tests.small_recipes import checked_recipe, quietly_prepared, write_rows
from tests.tiny_models import bert

#: What the model's classes mean, and how many rows there are of each split.
MEANING = ("not sure", "very good", "very bad")
ROWS = {"train": 300, "validation": 80, "test": 80}
KINDS = {"text": "BertForSequenceClassification", "token": "BertForTokenClassification"}


def recipe(model: Path, data: Path, task: str = "text_classification", **section: Any) -> Recipe:
    columns = {"text": "text", "label": "label", "calibration": 32, **section}
    return checked_recipe(task, model, {"path": str(data), **columns})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that answer with the number of the first word, of a text and word by word."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    found = {}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    for task, kind in KINDS.items():
        found[task] = bert(folder / task, kind, num_labels=3, **no_dropout)
        _train_(folder / task, kind)
    return found


def _train_(folder: Path, kind: str) -> None:
    model = getattr(transformers, kind).from_pretrained(folder).train()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(400):
        words = torch.randint(30, (64, 6))
        words[:, 0] %= 3
        first, last = torch.full((64, 1), 2), torch.full((64, 1), 3)  # [CLS] and [SEP]
        ids, ends = torch.cat([first, words + 4, last], 1), torch.full((64, 1), -100)
        tags = torch.cat([ends, words % 3, ends], 1)
        labels = words[:, 0] if kind == KINDS["text"] else tags
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def rows_of(split: str, label: Callable[[int], Any], words: bool) -> list[dict[str, Any]]:
    """Rows that all begin otherwise; the class of a word is its number's rest by 3, that of a text
    is its first's."""
    draw = np.random.default_rng(len(split))
    rows = []
    for _ in range(ROWS[split]):
        numbers = [int(n) for n in draw.integers(0, 30, 6)]
        if not words:
            numbers[0] %= 3
        labels = [label(n % 3) for n in numbers]
        text = [f"w{n}" for n in numbers]
        given = (text, labels) if words else (" ".join(text), labels[0])
        rows.append(dict(zip(("text", "label"), given, strict=True)))
    return rows


#: How the classes 0, 1 and 2 are called in the data; where the column is a ``ClassLabel``: its
#: names, and the number that stands for each class.
TEXTS: dict[str, list[Any]] = {
    "names": list(MEANING),
    "names with underscores": ["not_sure", "very-good", " very  bad"],
    "other names, sorted right": ["a", "b", "c"],
    "other names, sorted wrong": ["b", "c", "a"],
    "numbers": [0, 1, 2],
    "other numbers": [2, 0, 1],
    "numbers from one": [1, 2, 3],
    "numbers as text": ["0", "1", "2"],
    "other numbers as text": ["1", "2", "0"],
    "generic names": ["LABEL_0", "LABEL_1", "LABEL_2"],
    "generic names in another order": ["LABEL_1", "LABEL_2", "LABEL_0"],
}
CLASSED: dict[str, tuple[list[str], list[int]]] = {
    "classed": (list(MEANING), [0, 1, 2]),
    "classed in another order": (["very bad", "very good", "not sure"], [2, 1, 0]),
    "classed by other names": (["a", "b", "c"], [0, 1, 2]),
    "classed, one name at another number": (["very good", "b", "c"], [1, 0, 2]),
}
#: What the model calls its classes.
NAMES: dict[str, list[str]] = {
    "named": list(MEANING),
    "in capitals": [name.upper() for name in MEANING],
    "generic": ["LABEL_0", "LABEL_1", "LABEL_2"],
    "doubled": ["x", "x", "y"],
    "digits": ["0", "1", "2"],
}
SPELLED = ("names", "names with underscores", "classed in another order")
NUMBERED = ("numbers", "numbers as text", "classed", "classed by other names")
#: Combinations whose labels get the right classes. All others stop, but for those that are warned
#: of.
RIGHT = {
    *((kind, called) for kind in SPELLED for called in ("named", "in capitals")),
    *((kind, called) for kind in NUMBERED for called in NAMES),
    *(("other names, sorted right", called) for called in ("generic", "doubled")),
    *(("generic names", called) for called in ("generic", "doubled")),
}
#: Data and model say the same names, and the model's answers say that one of them is wrong.
WARNED = {("other numbers as text", "digits"), ("generic names in another order", "generic")}


def written(folder: Path, kind: str, words: bool) -> Path:
    from datasets import ClassLabel, Dataset, Features, List, Value

    folder.mkdir(parents=True)
    for split in ROWS:
        if kind in TEXTS:
            rows = rows_of(split, TEXTS[kind].__getitem__, words)
            write_rows(folder / f"{split}.jsonl", rows)
            continue
        names, numbers = CLASSED[kind]
        rows = rows_of(split, numbers.__getitem__, words)
        label, text = ClassLabel(names=names), Value("string")
        columns = {"text": text, "label": label}
        features = Features({k: List(v) if words else v for k, v in columns.items()})
        Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


def named(folder: Path, at: Path, names: list[str]) -> Path:
    shutil.copytree(folder, at)
    numbers = {name: i for i, name in enumerate(names)}
    config = json.loads((at / "config.json").read_text())
    config |= {"id2label": dict(enumerate(names)), "label2id": numbers}
    (at / "config.json").write_text(json.dumps(config))
    return at


def classes_of(chosen: Recipe, model: nn.Module) -> tuple[list[Any], RawData, tuple[str, ...]]:
    raw = number_labels(chosen, load_rows(chosen))
    data = encode_rows(chosen, raw, prepare(chosen))
    _, notes = check_order(model, data, raw)
    return [example["labels"] for example in data.examples["test"]], raw, (*raw.warnings, *notes)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *((kind, False) for kind in (*TEXTS, *CLASSED)),
        *((kind, True) for kind in ("names", "classed in another order")),
    ],
)
def test_labels_get_the_right_classes_or_stop(kind, words, trained, tmp_path):
    folder = trained["token" if words else "text"]
    model = loaded(folder, words)
    data = written(tmp_path / "data", kind, words)
    task = "token_classification" if words else "text_classification"
    expected = [row["label"] for row in rows_of("test", int, words)]
    for called, names in NAMES.items():
        chosen = recipe(named(folder, tmp_path / called, names), data, task)
        if (kind, called) not in RIGHT | WARNED:
            with pytest.raises(InvalidValue, match=r"data\.label"):
                classes_of(chosen, model)
            continue
        got, raw, notes = classes_of(chosen, model)
        flat = [[n for n in row if n >= 0] for row in got] if words else got
        assert (flat == expected) == ((kind, called) in RIGHT), (kind, called)
        said = [note for note in notes if "right on 0.0%" in note and "on 100.0%" in note]
        assert bool(said) == ((kind, called) in WARNED), (kind, called)
        assert not [note for note in notes if "no more than" in note]
        assert mapping_words(raw).startswith("labels: ")
        assert mapping_words(raw).count(" is class ") == 3


def loaded(folder: Path, words: bool = False) -> nn.Module:
    kind = getattr(transformers, KINDS["token" if words else "text"])
    model: nn.Module = kind.from_pretrained(folder).eval()
    return model


@pytest.mark.parametrize(
    ("kind", "called"),
    [
        *((kind, "named") for kind in ("names", "other numbers", "classed by other names")),
        *(("other names, sorted wrong", called) for called in NAMES),
    ],
)
def test_the_order_that_the_recipe_gives_is_taken(kind, called, trained, tmp_path):
    data = written(tmp_path / "data", kind, False)
    order = TEXTS[kind] if kind in TEXTS else [CLASSED[kind][0][n] for n in CLASSED[kind][1]]
    path = named(trained["text"], tmp_path / "model", NAMES[called])
    got, raw, notes = classes_of(recipe(path, data, labels=order), loaded(trained["text"]))
    assert got == [row["label"] for row in rows_of("test", int, False)]
    assert raw.numbering == "given"
    assert not [note for note in notes if "right on" in note]
    telling = called in ("named", "in capitals", "digits")
    assert list(raw.labels) == (NAMES[called] if telling else [str(label) for label in order])


def test_who_insists_on_another_order_is_warned(trained, tmp_path):
    data = written(tmp_path / "data", "other names, sorted wrong", False)
    chosen = recipe(trained["text"], data, labels=["a", "b", "c"])
    _, raw, notes = classes_of(chosen, loaded(trained["text"]))
    assert raw.numbering == "given"
    assert "as data.labels says" in notes[-1]
    assert "set data.labels: [b, c, a]" in notes[-1]


def test_the_mapping_is_said_before_the_run(trained, tmp_path):
    data = written(tmp_path / "data", "other names, sorted right", False)
    lines: list[str] = []
    subject = runner.prepared(recipe(trained["text"], data), say=lines.append)
    assert "labels: 'a' is class 0, 'b' is class 1, 'c' is class 2 (in sorted" in "\n".join(lines)
    assert "    the model is right on 100.0% of the labels of 80 train rows" in lines
    (note,) = [w for w in subject.journal.record.warnings if "does not name its classes" in w]
    assert f"    warning: {note}" in lines
    facts = subject.journal.record.metrics["labels"]
    assert (facts["numbered"], facts["accuracy"]) == ("sorted", 1.0)
    assert facts["classes"] == ("a", "b", "c")
    wrong = written(tmp_path / "wrong", "other names, sorted wrong", False)
    with pytest.raises(InvalidValue, match=r"data\.labels: must be given.* fits .* far") as caught:
        quietly_prepared(recipe(trained["text"], wrong))
    assert "where the model is right on 0.0% of the labels" in str(caught.value)
    assert "Add data.labels: [b, c, a] (--set 'data.labels=[b, c, a]')," in str(caught.value)


def test_a_model_with_more_classes_than_the_data(trained, tmp_path):
    for kind in ("numbers", "numbers as text", "names", "other names, sorted right"):
        for split in ROWS:
            rows = [row for row in rows_of(split, int, False) if row["label"] < 2]
            labelled = ({**row, "label": TEXTS[kind][row["label"]]} for row in rows)
            write_rows(tmp_path / kind / f"{split}.jsonl", labelled)
        names = NAMES["named" if kind == "names" else "generic"]
        chosen = recipe(named(trained["text"], tmp_path / f"{kind} model", names), tmp_path / kind)
        if kind == "other names, sorted right":
            with pytest.raises(InvalidValue, match=r"must be given: .*3 classes without names"):
                number_labels(chosen, load_rows(chosen))
            continue
        got, raw, _ = classes_of(chosen, loaded(trained["text"]))
        assert got == [row["label"] for row in rows_of("test", int, False) if row["label"] < 2]
        assert len(raw.labels) == 3
        assert quietly_prepared(chosen).model.config.num_labels == 3


def test_an_order_that_is_proposed_has_every_label_once():
    """The class without a label in the data has the name "1", as another label has."""
    raw = RawData({}, "label", ("2", "b", "1"), {}, class_names={1: "2", 2: "b"}, numbering="given")
    assert _labels_in_order(raw, (1, 0, 2)) == [2, 1, "class 2"]


def test_answers_by_chance_are_no_reason_to_stop(trained, tmp_path):
    """Where no order fits far better, labels are numbered as before; that nothing speaks for it is
    said."""
    torch.manual_seed(1)
    path = named(trained["text"], tmp_path / "model", NAMES["generic"])
    config = transformers.AutoConfig.from_pretrained(trained["text"])
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(path)
    chosen = recipe(path, written(tmp_path / "data", "names", False))
    got, raw, notes = classes_of(chosen, model)
    assert set(got) == {0, 1, 2}
    assert raw.numbering == "sorted"
    assert "no more than if it always predicted the most frequent one" in notes[-1]


def test_luck_with_few_rows_is_no_better_order():
    """Out of all orders one always fits the rows that it is chosen on: those that judge it are
    others."""

    class Drawn(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.weight, self.n = nn.Parameter(torch.zeros(1)), n

        def forward(self, place: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            seeds = [torch.Generator().manual_seed(int(i)) for i in place]
            scores = [torch.randn(self.n, generator=seed) for seed in seeds]
            logits = torch.stack(scores) + self.weight
            return transformers.modeling_outputs.SequenceClassifierOutput(logits=logits)

    for n_labels in (2, 40):
        for n_rows in (8, 300):
            rows = [{"place": 1000 * n_labels + i, "labels": i % n_labels} for i in range(n_rows)]
            data = Data(dict.fromkeys(("train", "validation", "test"), rows), Collate(), 0)
            fit = measure(Drawn(n_labels), data, n_labels)
            assert fit.order == ()
            assert fit.accuracy < 0.8


def test_an_order_without_a_label_of_the_data(trained, tmp_path):
    data = written(tmp_path / "data", "names", False)
    chosen = recipe(trained["text"], data, labels=["not sure", "very god", "very bad"])
    with pytest.raises(InvalidValue, match=r"every label .*very good too.*Did you mean 'very god'"):
        number_labels(chosen, load_rows(chosen))


def test_a_model_that_is_trained_is_not_asked(trained, tmp_path):
    data = written(tmp_path / "data", "other names, sorted wrong", False)
    raw = {**recipe(trained["text"], data).model_dump(), "train": {"epochs": 0.05}}
    lines: list[str] = []
    subject = runner.prepared(check_recipe(raw), say=lines.append)
    assert "labels" not in subject.journal.record.metrics
    assert "    labels: 'a' is class 0, 'b' is class 1, 'c' is class 2 (of a new head)" in lines
    assert not [line for line in lines if "right on" in line]
