"""The data of a run: rows for every purpose, checked and told apart, then encoded and batched."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from headprune.core.errors import InvalidValue, did_you_mean
from headprune.data.features import Collate, Encoder, Example, pixel_array, pixel_statistics
from headprune.data.models import Preparation
from headprune.data.order import LikeLengths
from headprune.data.overlap import given_notes, given_twice
from headprune.data.questions import check_answers, cut_off, encode_questions, has_unanswerable
from headprune.data.sound import clip_of
from headprune.data.sources import Source, check_pictures, folder_of, load_source, undecoded
from headprune.data.splits import Part, calibration_rows, normalised, partition
from headprune.recipes.schema import CLASSIFICATIONS, UNLABELLED, DataSection, Recipe, Task


@dataclass(frozen=True)
class RawData:
    """Rows by purpose (train, validation, test, calibration), not yet encoded.

    Args:
        splits: The rows.
        label: The label column.
        labels: Label values in the order of their numbers; empty where there are no classes.
        facts: Which rows these are, for the record.
        parts: The rows' numbers in the data, by purpose.
        warnings: What a reader of the record should know.
        columns: The columns of text, that of the translation last.
        class_names: The label of every value of that column, where these are not the labels
            themselves: the data has numbers and says what they are called, or names that the model
                spells another way.
        said: What the data itself calls its class numbers, where it does (``ClassLabel``).
        present: Values of the label column that some row has.
        numbering: How labels got their numbers: by their ``name`` or ``number``, ``sorted``, or
            ``given``; empty where a head is trained for them, which any order serves.
    """

    splits: dict[str, Any]
    label: str
    labels: tuple[Any, ...]
    facts: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    class_names: Mapping[Any, str] = field(default_factory=dict)
    said: Mapping[int, str] = field(default_factory=dict)
    present: tuple[Any, ...] = ()
    numbering: Literal["", "name", "number", "sorted", "given"] = ""

    @property
    def label_ids(self) -> dict[Any, int]:
        """The number of every label, as the rows have it."""
        numbers = {label: i for i, label in enumerate(self.labels)}
        return {value: numbers[name] for value, name in self.class_names.items()} or numbers

    def texts(self) -> list[str]:
        """The texts of the train rows, column after column, that of the translation last: what a
        tokenizer learns."""
        train = self.splits["train"]
        return [text for name in self.columns for text in train[name]]

    def numbers(self) -> dict[str, Any]:
        """Every purpose's split and row numbers there, under the digest that the record has too."""
        return {
            n: {"digest": p.digest, "from": p.source, "rows": list(p.rows)}
            for n, p in self.parts.items()
        }


@dataclass(frozen=True)
class Data:
    """Examples by purpose, and how they are batched.

    Args:
        examples: What the model reads.
        collate: Makes batches of them.
        seed: Of the order of batches.
        targets: What a model's own words are compared with: true translations, or questions with
            their true answers.
        warnings: What a reader of the record should know.
    """

    examples: dict[str, list[Example]]
    collate: Collate
    seed: int
    targets: dict[str, list[Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def batches(self, purpose: str, size: int) -> list[dict[str, Tensor]]:
        """Batches in data order, made once."""
        rows = self.examples[purpose]
        return [self.collate(rows[i : i + size]) for i in range(0, len(rows), size)]

    def evaluation(self, purpose: str, size: int) -> list[dict[str, Tensor]]:
        """Batches of examples of like length, made once: less padding, the same results."""
        rows = [self.examples[purpose][i] for i in self._by_length(purpose)]
        return [self.collate(rows[i : i + size]) for i in range(0, len(rows), size)]

    def references(self, purpose: str) -> list[Any]:
        """The targets, in the order of ``evaluation``."""
        return [self.targets[purpose][i] for i in self._by_length(purpose)]

    def _by_length(self, purpose: str) -> list[int]:
        rows = self.examples[purpose]
        return sorted(range(len(rows)), key=lambda i: len(rows[i].get("input_ids", ())))

    def loader(self, purpose: str, size: int) -> DataLoader[Any]:
        """Batches in a new seeded order each time; where there are targets, of examples of like
        length."""
        order = torch.Generator().manual_seed(self.seed)
        rows: Any = self.examples[purpose]
        if self.targets:
            like = LikeLengths(
                [len(e["input_ids"]) + len(e.get("labels", ())) for e in rows], size, order
            )
            return DataLoader(rows, batch_sampler=like, collate_fn=self.collate)
        return DataLoader(
            rows, batch_size=size, shuffle=True, generator=order, collate_fn=self.collate
        )

    def redrawn(self, calibration: int, seed: int) -> Data:
        """The same with another draw of calibration rows out of the train rows, and another order
        of batches."""
        train = self.examples["train"]
        drawn = [train[i] for i in calibration_rows(len(train), calibration, seed)]
        return replace(self, examples={**self.examples, "calibration": drawn}, seed=seed)


def load_rows(recipe: Recipe) -> RawData:
    """Loads the rows, checks them, and decides which are for what.

    Raises:
        InvalidValue: no data, a missing column, a row without text or label.
    """
    section, task = recipe.data, recipe.task
    source = load_source(section)
    if task == "audio_classification":
        splits = {role: undecoded(rows, section.audio) for role, rows in source.splits.items()}
        source = replace(source, splits=splits)
    for rows in source.splits.values() if task == "image_classification" else ():
        check_pictures(rows, section.image)
    present = source.splits["train"].column_names
    label = next(
        (name for name in section.label_columns if name in present), section.label_columns[0]
    )
    for role, rows in source.splits.items():
        _check_columns(rows, section, task, role, label)
    keys = {role: _keys(rows, section, task, role) for role, rows in source.splits.items()}
    if section.target is not None:
        _check_targets(source, section.target)
    for role, rows in source.splits.items() if task == "question_answering" else ():
        check_answers(rows, section, label, role)
    present = _present(source, label, task)
    labels = _labels(present, task)
    names = _class_names(source, label, task)
    strata = (
        list(source.splits["train"][label])
        if task in CLASSIFICATIONS and task != "token_classification"
        else None
    )
    amounts = (section.holdout, section.test_holdout, section.calibration)
    parts = partition(keys, strata, *amounts, seed=recipe.seed)
    splits = {name: source.splits[part.source].select(part.rows) for name, part in parts.items()}
    columns = {"label": label} if task not in UNLABELLED else {}
    said = {
        "rows": _digest(keys)
    }  # a table of paths stays as it is where the files that it names are replaced
    twice = given_twice(keys, parts)
    facts = {
        "source": {**source.facts, **said, **columns},
        **{name: part.facts for name, part in parts.items()},
    }
    facts["overlap"] = {"given": twice}
    texts = (*section.text_columns, *([section.target] if section.target else []))
    order = tuple(names.values()) or labels
    warnings = (*source.warnings, *given_notes(twice, parts))
    return RawData(splits, label, order, facts, parts, warnings, texts, names, names, present)


def encode_rows(
    recipe: Recipe, raw: RawData, preparation: Preparation, *, dtype: torch.dtype = torch.float32
) -> Data:
    """Encodes every row with the model's own tokenizer or processor; pixels and sound get the
    model's ``dtype``."""
    section = recipe.data
    if recipe.task == "question_answering":
        return _encode_questions(recipe, raw, preparation)
    pixels = None
    if (
        recipe.task == "image_classification"
        and preparation.processor is None
        and section.normalise is not False
    ):
        pixels = pixel_statistics(raw.splits["train"][section.image])
    tools = (preparation.tokenizer, preparation.processor, pixels, preparation.start)
    encoder = Encoder(recipe.task, section, raw.label, raw.label_ids, *tools)
    examples = {name: encoder.encode(rows) for name, rows in raw.splits.items()}
    for name, rows in examples.items():
        for i, example in enumerate(rows if recipe.task == "causal_lm" else ()):
            if len(example["input_ids"]) < 2:
                raise InvalidValue(
                    f"data: {name}, row {i}", "at least two tokens long", len(example["input_ids"])
                )
    targets = (
        {name: list(rows[section.target]) for name, rows in raw.splits.items()}
        if section.target
        else {}
    )
    return Data(examples, Collate(preparation.pad, dtype=dtype), recipe.seed, targets)


def _encode_questions(recipe: Recipe, raw: RawData, preparation: Preparation) -> Data:
    unanswerable = has_unanswerable(raw.splits.values(), raw.label)
    tools = (recipe.data, raw.label, preparation.tokenizer, unanswerable)
    examples: dict[str, list[Example]] = {name: [] for name in raw.splits}
    targets: dict[str, list[Any]] = {"validation": [], "test": []}
    for name, rows in raw.splits.items():
        for example, question in encode_questions(rows, *tools):
            examples[name].append(example)
            if name in targets:  # the others are never judged
                targets[name].append(question)
    notes = cut_off(examples, recipe.data.max_length)
    return Data(examples, Collate(preparation.pad), recipe.seed, targets, notes)


def _columns(section: DataSection, task: Task, label: str) -> dict[str, str]:
    """The columns that a task needs, by the recipe's key."""
    if task == "image_classification":
        inputs = {"data.image": section.image}
    elif task == "audio_classification":
        inputs = {"data.audio": section.audio}
    elif section.tokens is not None:
        inputs = {"data.tokens": section.tokens}
    else:
        inputs = {
            f"data.text.{i}" if i else "data.text": name
            for i, name in enumerate(section.text_columns)
        }
    if task == "translation":
        return {**inputs, "data.target": str(section.target)}
    return inputs if task == "causal_lm" else {**inputs, "data.label": label}


def _check_columns(rows: Any, section: DataSection, task: Task, role: str, label: str) -> None:
    for key, column in _columns(section, task, label).items():
        if column not in rows.column_names:
            hint = did_you_mean(column, rows.column_names)
            raise InvalidValue(
                key, f"a column of the {role} rows of {section.path}", repr(column), hint
            )


def _keys(rows: Any, section: DataSection, task: Task, role: str) -> list[str]:
    """What each row says, as text that can be compared."""
    if task == "image_classification":
        return [_image_key(image, f"{role} row {i}") for i, image in enumerate(rows[section.image])]
    if task == "audio_classification":
        folder = folder_of(section)
        return [
            clip_of(value, f"data: {role}, row {i}", folder).key
            for i, value in enumerate(rows[section.audio])
        ]
    columns = [rows[name] for name in (section.text_columns or [str(section.tokens)])]
    keys = []
    for i, values in enumerate(zip(*columns, strict=True)):
        for value in values:
            if (
                value is None
                or (not isinstance(value, str) and not isinstance(value, (list, tuple)))
                or not value
            ):
                must = "a list" if section.tokens or task == "token_classification" else "text"
                raise InvalidValue(
                    f"data: {role}, row {i}", f"{must} that is not empty", repr(value)
                )
        keys.append(
            "\x1f".join(
                normalised(v) if isinstance(v, str) else normalised(_joined(v)) for v in values
            )
        )
    return keys


def _digest(keys: Mapping[str, Sequence[str]]) -> str:
    """SHA-256 of what all rows say."""
    found = hashlib.sha256()
    for role, said in sorted(keys.items()):
        for key in (role, *said):
            found.update(hashlib.sha256(key.encode(errors="surrogatepass")).digest())
    return found.hexdigest()


def _check_targets(source: Source, column: str) -> None:
    for role, rows in source.splits.items():
        for i, text in enumerate(rows[column]):
            if not isinstance(text, str) or not text:
                raise InvalidValue(
                    f"data: {role}, row {i}", "a translation that is not empty", repr(text)
                )


def _joined(items: Sequence[Any]) -> str:
    return " ".join(map(str, items))


def _image_key(image: Any, where: str) -> str:
    array = pixel_array(image)
    if not np.isfinite(array).all():
        raise InvalidValue(f"data: {where}", "an image of finite numbers", "NaN or infinite values")
    return hashlib.sha256(f"{array.shape}".encode() + array.tobytes()).hexdigest()


def _present(source: Source, column: str, task: Task) -> tuple[Any, ...]:
    """Label values that rows have, each once, of tasks whose labels are classes."""
    if task in UNLABELLED or task == "question_answering":
        return ()
    values: dict[Any, None] = {}
    for role, rows in source.splits.items():
        for i, label in enumerate(rows[column]):
            found = label if task == "token_classification" and isinstance(label, list) else [label]
            for value in found:
                _check_label(value, task, f"data: {role}, row {i}")
            values.update(dict.fromkeys(found))
    return () if task == "regression" else tuple(values)


def _labels(values: Sequence[Any], task: Task) -> tuple[Any, ...]:
    """Label values in the order of their numbers."""
    if task not in CLASSIFICATIONS:
        return ()
    if all(
        isinstance(v, int) for v in values
    ):  # numbers of classes already, some maybe without rows here
        if min(values) < 0:
            raise InvalidValue(
                "data.label",
                "class numbers >= 0",
                min(values),
                "Rows without labels cannot be used.",
            )
        return tuple(range(max(values) + 1))
    if not all(isinstance(v, str) for v in values):
        raise InvalidValue("data.label", "all numbers or all names", "both")
    return tuple(sorted(values))


def _class_names(source: Source, column: str, task: Task) -> dict[int, str]:
    """What the data calls its class numbers, where it has such and says so."""
    from datasets import ClassLabel

    if task not in CLASSIFICATIONS:
        return {}
    kind = source.splits["train"].features[column]
    kind = getattr(kind, "feature", kind)  # of a list, what is in it
    return dict(enumerate(kind.names)) if isinstance(kind, ClassLabel) else {}


def _check_label(value: Any, task: Task, where: str) -> None:
    if task == "regression":
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise InvalidValue(where, "labelled with a finite number", repr(value))
    elif not isinstance(value, (int, str)) or value == "":
        raise InvalidValue(where, "labelled with a class number or name", repr(value))
