"""Load, check, split, encode and batch the rows of a recipe."""

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

from headprune.core.bars import bar
from headprune.core.errors import InvalidValue, did_you_mean
from headprune.data.features import (
    Collate,
    Example,
    RowEncoder,
    pixel_array,
    pixel_statistics,
)
from headprune.data.models import Preparation
from headprune.data.order import LikeLengths
from headprune.data.overlap import given_notes, given_twice
from headprune.data.questions import (
    check_answers,
    encode_questions,
    has_unanswerable,
    notes_on_lost_answers,
)
from headprune.data.sound import clip_of
from headprune.data.sources import Source, check_pictures, folder_of, load_source, undecoded
from headprune.data.splits import Part, calibration_rows, normalised, partition
from headprune.data.tidy import with_plain_labels, without_incomplete
from headprune.recipes.schema import CLASSIFICATIONS, UNLABELLED, DataSection, Recipe, Task

#: Rows that are encoded at once, between two steps of progress.
_ENCODED = 1000


@dataclass(frozen=True)
class RawData:
    """Rows by purpose (train, validation, test, calibration), not yet encoded.

    Args:
        splits: The rows.
        label: The label column.
        labels: Label values in the order of their numbers; empty where there are no classes.
        facts: Identity of the rows, for the record.
        parts: The rows' numbers in the data, by purpose.
        warnings: Notes for readers of the record.
        columns: The text columns; that of the translation last.
        class_names: The label of each value in the label column, where they differ: the data has
            numbers with names, or names that the model spells another way.
        dataset_names: The names that the data set gives its class numbers (``ClassLabel``), if any.
        present: Values of the label column that some row has.
        numbering: How labels got their numbers: by their ``name`` or ``number``, ``sorted``, or
            ``given``; empty where a new head is trained, for which any order will do.
    """

    splits: dict[str, Any]
    label: str
    labels: tuple[Any, ...]
    facts: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    class_names: Mapping[Any, str] = field(default_factory=dict)
    dataset_names: Mapping[int, str] = field(default_factory=dict)
    present: tuple[Any, ...] = ()
    numbering: Literal["", "name", "number", "sorted", "given"] = ""

    @property
    def label_ids(self) -> dict[Any, int]:
        """The class number of each value in the label column."""
        numbers = dict(zip(self.labels, range(len(self.labels)), strict=True))
        # Without class names, the column holds the labels themselves.
        if not self.class_names:
            return numbers
        return {value: numbers[name] for value, name in self.class_names.items()}

    def texts(self) -> list[str]:
        """Return the train texts, column by column, for training a tokenizer."""
        texts: list[str] = []
        for name in self.columns:
            texts.extend(self.splits["train"][name])
        return texts

    def numbers(self) -> dict[str, Any]:
        """Return each purpose's split and row numbers, and the digest that the record has too."""
        return {
            purpose: {"digest": part.digest, "from": part.source, "rows": list(part.rows)}
            for purpose, part in self.parts.items()
        }


@dataclass(frozen=True)
class Data:
    """Encoded examples by purpose, and how they are batched.

    Args:
        examples: What the model reads.
        collate: Makes batches of them.
        seed: Seed for the order of batches.
        targets: What generated answers are compared with: true translations, or questions with
            their true answers.
        warnings: Notes for readers of the record.
        texts: Of every test row, as the data has it; empty where the model reads none.
        test_rows: The test rows' numbers in their split of the data.
        test_split: That split.
    """

    examples: dict[str, list[Example]]
    collate: Collate
    seed: int
    targets: dict[str, list[Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    test_rows: tuple[int, ...] = ()
    test_split: str = "test"

    def batches(self, purpose: str, size: int) -> list[dict[str, Tensor]]:
        """Return batches of ``size`` rows in data order."""
        return self._collated(self.examples[purpose], size)

    def evaluation(self, purpose: str, size: int) -> list[dict[str, Tensor]]:
        """Return batches of like length: less padding, the same results."""
        rows = self.examples[purpose]
        return self._collated([rows[i] for i in self.evaluated(purpose)], size)

    def of_like_length(self, purpose: str, size: int) -> list[dict[str, Tensor]]:
        """Return batches, each of rows of like length: the longest first, the others in random
        order.

        So a length that the memory cannot hold shows at once. Rows that all have the same length
        stay in data order. Standard errors from blocks of rows leave out what differs between
        lengths, because every block gets rows of all lengths.
        """
        return list(self.same_batches(purpose, size))

    def same_batches(self, purpose: str, size: int) -> DataLoader[Any]:
        """Return a loader of the batches of ``of_like_length``, the same in every pass."""
        rows: Any = self.examples[purpose]
        order = self.evaluated(purpose)
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        if len(set(map(_length, rows))) > 1:
            generator = torch.Generator().manual_seed(self.seed)
            *others, longest = batches
            numbers = torch.randperm(len(others), generator=generator).tolist()
            batches = [longest, *(others[number] for number in numbers)]
        return DataLoader(rows, batch_sampler=batches, collate_fn=self.collate)

    def references(self, purpose: str) -> list[Any]:
        """Return the targets, in the order of ``evaluation``."""
        return [self.targets[purpose][i] for i in self.evaluated(purpose)]

    def _collated(
        self,
        rows: Sequence[Example],
        size: int,
    ) -> list[dict[str, Tensor]]:
        return [self.collate(rows[i : i + size]) for i in range(0, len(rows), size)]

    def evaluated(self, purpose: str) -> list[int]:
        """Return the rows' numbers in the order of ``evaluation``: by length."""
        rows = self.examples[purpose]
        return sorted(range(len(rows)), key=lambda i: _length(rows[i]))

    def loader(self, purpose: str, size: int) -> DataLoader[Any]:
        """Return a loader that draws a new order of batches in every pass.

        Where there are targets, a batch has examples of like length.
        """
        # Each pass continues this generator, so passes differ and runs agree.
        generator = torch.Generator().manual_seed(self.seed)
        rows: Any = self.examples[purpose]
        # Translations and answers to questions: batches of like length have the least padding.
        if self.targets:
            lengths = [len(row["input_ids"]) + len(row.get("labels", ())) for row in rows]
            sampler = LikeLengths(lengths, size, generator)
            return DataLoader(rows, batch_sampler=sampler, collate_fn=self.collate)
        return DataLoader(
            rows, batch_size=size, shuffle=True, generator=generator, collate_fn=self.collate
        )

    def redrawn(self, calibration: int, seed: int) -> Data:
        """Return a copy with other calibration rows and another order of batches."""
        return replace(self, seed=seed)._drawn("train", "calibration", calibration)

    def some(self, purpose: str, count: int | None) -> Data:
        """Return a copy with at most ``count`` rows of a purpose, drawn at random by the seed."""
        if count is None or len(self.examples[purpose]) <= count:
            return self
        return self._drawn(purpose, purpose, count)

    def _drawn(self, source: str, purpose: str, count: int) -> Data:
        """Return a copy with rows of ``purpose`` and their targets drawn from ``source``."""
        rows = self.examples[source]
        places = calibration_rows(len(rows), count, self.seed)
        examples = {**self.examples, purpose: [rows[i] for i in places]}
        targets = dict(self.targets)
        if source in targets:
            targets[purpose] = [targets[source][i] for i in places]
        return replace(self, examples=examples, targets=targets)


def _length(row: Example) -> int:
    """Tokens of an example; 0 where it has none."""
    return len(row.get("input_ids", ()))


# ---------------------------------------------------------------- loading


def load_rows(recipe: Recipe) -> RawData:
    """Load the rows, check them, and assign them to purposes.

    Raises:
        InvalidValue: no data, a missing column, or a row without text or label.
    """
    section, task = recipe.data, recipe.task
    # 1. Load and check every column that the task needs.
    source = _openable(load_source(section), section, task)
    label = _label_column(source, section)
    for role, rows in source.splits.items():
        _check_columns(rows, section, task, role, label)
    # The numbers of the rows in the data, where some of them are dropped.
    numbers: Mapping[str, Sequence[int]] = {}
    if section.drop_incomplete:
        needed = _needed_columns(section, task, label).values()
        source, numbers = without_incomplete(source, needed)
    if task in CLASSIFICATIONS:
        source = with_plain_labels(source, label)
    keys: dict[str, list[str]] = {}
    for role, rows in source.splits.items():
        keys[role] = _keys(rows, section, task, role)
        _check_answers(rows, section, task, role, label)
    # 2. Number the labels.
    present = _label_values(source, label, task)
    labels = _numbered_labels(present, task)
    names = _dataset_names(source, label, task)
    # 3. Assign rows to purposes; draws keep the proportions of labels.
    whole_rows = task in CLASSIFICATIONS and task != "token_classification"
    strata = list(source.splits["train"][label]) if whole_rows else None
    amounts = (section.holdout, section.test_holdout, section.calibration)
    parts = partition(keys, strata, *amounts, seed=recipe.seed)
    # 4. Describe them for the record. A digest of contents notices a replaced sound file; the table
    # that names it is unchanged.
    of_source = {**source.facts, "rows": _digest(keys)}
    if task not in UNLABELLED:
        of_source["label"] = label
    facts: dict[str, Any] = {"source": of_source}
    splits = {}
    overlap = given_twice(keys, parts)
    for name, part in parts.items():
        splits[name] = source.splits[part.source].select(part.rows)
        if numbers:
            in_data = numbers[part.source]
            parts[name] = replace(part, rows=tuple(in_data[i] for i in part.rows))
        facts[name] = parts[name].facts
    facts["overlap"] = {"given": overlap}
    columns = section.text_columns
    if section.target:
        columns = [*columns, section.target]
    return RawData(
        splits,
        label,
        labels=tuple(names.values()) or labels,
        facts=facts,
        parts=parts,
        warnings=(*source.warnings, *given_notes(overlap, parts)),
        columns=tuple(columns),
        class_names=names,
        dataset_names=names,
        present=present,
    )


def _openable(source: Source, section: DataSection, task: Task) -> Source:
    """Keep sound undecoded, and refuse pictures that are devices or FIFOs."""
    if task == "audio_classification":
        splits = {role: undecoded(rows, section.audio) for role, rows in source.splits.items()}
        return replace(source, splits=splits)
    if task == "image_classification":
        for rows in source.splits.values():
            check_pictures(rows, section.image)
    return source


def _label_column(source: Source, section: DataSection) -> str:
    """Return the first label column that the train rows have."""
    for name in section.label_columns:
        if name in source.splits["train"].column_names:
            return name
    # None is there, which is refused with the other columns.
    return section.label_columns[0]


def _needed_columns(section: DataSection, task: Task, label: str) -> dict[str, str]:
    """Return the columns that a task needs, by the recipe's key."""
    needed = {}
    if task == "image_classification":
        needed["data.image"] = section.image
    elif task == "audio_classification":
        needed["data.audio"] = section.audio
    elif section.tokens is not None:
        needed["data.tokens"] = section.tokens
    else:
        for i, name in enumerate(section.text_columns):
            needed[f"data.text.{i}" if i else "data.text"] = name
    if task == "translation":
        needed["data.target"] = str(section.target)
    elif task != "causal_lm":
        needed["data.label"] = label
    return needed


def _check_columns(
    rows: Any,
    section: DataSection,
    task: Task,
    role: str,
    label: str,
) -> None:
    for key, column in _needed_columns(section, task, label).items():
        if column not in rows.column_names:
            must = f"a column of the {role} rows of {section.path}"
            hint = did_you_mean(column, rows.column_names)
            raise InvalidValue(key, must, repr(column), hint)


def _check_answers(
    rows: Any,
    section: DataSection,
    task: Task,
    role: str,
    label: str,
) -> None:
    """Refuse answers that do not stand in their context, and empty translations."""
    if task == "question_answering":
        check_answers(rows, section, label, role)
    if section.target is None:
        return
    for i, text in enumerate(rows[section.target]):
        if not isinstance(text, str) or not text:
            must = "a translation that is not empty"
            raise InvalidValue(f"data: {role}, row {i}", must, repr(text))


# ---------------------------------------------------------------- contents as keys


def _keys(rows: Any, section: DataSection, task: Task, role: str) -> list[str]:
    """Return each row's input as text, so that equal inputs have equal keys."""
    doing = f"reading {role} rows"
    if task == "image_classification":
        images = enumerate(bar(rows[section.image], doing))
        return [_image_key(image, f"data: {role} row {i}") for i, image in images]
    if task == "audio_classification":
        folder, clips = folder_of(section), enumerate(bar(rows[section.audio], doing))
        return [clip_of(clip, f"data: {role}, row {i}", folder).key for i, clip in clips]
    lists = section.tokens is not None or task == "token_classification"
    must = f"{'a list' if lists else 'text'} that is not empty"
    first, *others = [rows[name] for name in section.text_columns or [str(section.tokens)]]
    keys = []
    for i, values in enumerate(zip(bar(first, doing), *others, strict=True)):
        where = f"data: {role}, row {i}"
        # The separator is a control character, so that "a b" + "c" differs from "a" + "b c".
        keys.append("\x1f".join(_text_key(value, must, where) for value in values))
    return keys


def _text_key(value: Any, must: str, where: str) -> str:
    if not isinstance(value, (str, list, tuple)) or not value:
        raise InvalidValue(where, must, repr(value))
    return normalised(value if isinstance(value, str) else " ".join(map(str, value)))


def _image_key(image: Any, where: str) -> str:
    array = pixel_array(image)  # [channels, height, width]
    if not np.isfinite(array).all():
        raise InvalidValue(where, "an image of finite numbers", "NaN or infinite values")
    return hashlib.sha256(f"{array.shape}".encode() + array.tobytes()).hexdigest()


def _digest(keys: Mapping[str, Sequence[str]]) -> str:
    """Return the SHA-256 of all rows' keys."""
    digest = hashlib.sha256()
    for role, of_rows in sorted(keys.items()):
        for key in (role, *of_rows):
            digest.update(hashlib.sha256(key.encode(errors="surrogatepass")).digest())
    return digest.hexdigest()


# ---------------------------------------------------------------- labels


def _label_values(source: Source, column: str, task: Task) -> tuple[Any, ...]:
    """Check all labels; return each value once, where labels are classes."""
    if task in UNLABELLED or task == "question_answering":
        return ()
    seen: dict[Any, None] = {}  # used as a set that keeps the order
    for role, rows in source.splits.items():
        for i, label in enumerate(rows[column]):
            per_word = task == "token_classification" and isinstance(label, list)
            values = label if per_word else [label]
            for value in values:
                _check_label(value, task, f"data: {role}, row {i}")
            seen.update(dict.fromkeys(values))
    return () if task == "regression" else tuple(seen)


def _check_label(value: Any, task: Task, where: str) -> None:
    if task == "regression":
        # A bool is an int in Python, but no grade.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise InvalidValue(where, "labelled with a finite number", repr(value))
    elif not isinstance(value, (int, str)) or value == "":
        raise InvalidValue(where, "labelled with a class number or name", repr(value))


def _numbered_labels(values: Sequence[Any], task: Task) -> tuple[Any, ...]:
    """Return label values in the order of their numbers."""
    if task not in CLASSIFICATIONS:
        return ()
    if all(isinstance(value, int) for value in values):
        if min(values) < 0:
            hint = "Rows without labels cannot be used."
            raise InvalidValue("data.label", "class numbers >= 0", min(values), hint)
        # They are class numbers already; some classes may have no rows here.
        return tuple(range(max(values) + 1))
    if not all(isinstance(value, str) for value in values):
        raise InvalidValue("data.label", "all numbers or all names", "both")
    # Names have no order of their own; sorted, runs agree.
    return tuple(sorted(values))


def _dataset_names(source: Source, column: str, task: Task) -> dict[int, str]:
    """Return the names that the data set gives its class numbers, if any."""
    from datasets import ClassLabel

    if task not in CLASSIFICATIONS:
        return {}
    feature = source.splits["train"].features[column]
    # The type of a list leads to that of its items.
    feature = getattr(feature, "feature", feature)
    return dict(enumerate(feature.names)) if isinstance(feature, ClassLabel) else {}


# ---------------------------------------------------------------- encoding


def encode_rows(
    recipe: Recipe,
    raw: RawData,
    preparation: Preparation,
    *,
    dtype: torch.dtype = torch.float32,
) -> Data:
    """Encode every row with the model's own tokenizer or processor.

    Args:
        recipe: The recipe.
        raw: The rows.
        preparation: Tokenizer or processor.
        dtype: The model's dtype, for pixels and sound.

    Raises:
        InvalidValue: rows that the tokenizer, the processor or the task cannot use.
    """
    section, task = recipe.data, recipe.task
    if task == "question_answering":
        return _encode_questions(recipe, raw, preparation)
    # Without a processor of the model, images are normalised by the train images.
    pixels = None
    normalise = preparation.processor is None and section.normalise is not False
    if task == "image_classification" and normalise:
        pixels = pixel_statistics(raw.splits["train"][section.image])
    encoder = RowEncoder(
        task,
        section,
        raw.label,
        raw.label_ids,
        preparation.tokenizer,
        preparation.processor,
        pixels,
        preparation.start,
    )
    examples: dict[str, list[Example]] = {}
    targets: dict[str, list[Any]] = {}
    for name, rows in raw.splits.items():
        examples[name] = _encoded(encoder, rows, f"encoding {name} rows")
        if task == "causal_lm":
            _check_lengths(examples[name], name)
        if section.target:
            targets[name] = list(rows[section.target])
    collate = Collate(preparation.pad, dtype=dtype)
    return Data(examples, collate, recipe.seed, targets, **_test_rows(recipe, raw))


def _test_rows(recipe: Recipe, raw: RawData) -> dict[str, Any]:
    """What ``Data`` has of the test rows, for reports."""
    part = raw.parts["test"]
    return {"texts": _texts(recipe, raw), "test_rows": part.rows, "test_split": part.source}


def _encoded(encoder: RowEncoder, rows: Any, doing: str) -> list[Example]:
    """Encode rows, some at a time, so that progress shows."""
    examples: list[Example] = []
    # Clips of sound are compared with each other.
    size = max(1, len(rows)) if encoder.task == "audio_classification" else _ENCODED
    with bar(None, doing, total=len(rows)) as progress:
        for start in range(0, len(rows), size):
            some = rows.select(range(start, min(start + size, len(rows))))
            examples += encoder.encode(some)
            progress.update(len(some))
    return examples


def _texts(recipe: Recipe, raw: RawData) -> tuple[str, ...]:
    """Return the text of every test row, for reports; empty for images and sound."""
    columns = [map(_words, raw.splits["test"][name]) for name in recipe.data.text_columns]
    return tuple(map(" / ".join, zip(*columns, strict=True)))


def _words(text: Any) -> str:
    """A text; one that comes as a list of words, joined."""
    return " ".join(map(str, text)) if isinstance(text, list) else str(text)


def _check_lengths(examples: Sequence[Example], name: str) -> None:
    """Refuse rows of one token, in which there is no next token to predict."""
    for i, example in enumerate(examples):
        length = len(example["input_ids"])
        if length < 2:
            where = f"data: {name}, row {i}"
            raise InvalidValue(where, "at least two tokens long", length)


def _encode_questions(
    recipe: Recipe,
    raw: RawData,
    preparation: Preparation,
) -> Data:
    unanswerable = has_unanswerable(raw.splits.values(), raw.label)
    tools = (recipe.data, raw.label, preparation.tokenizer, unanswerable)
    examples: dict[str, list[Example]] = {}
    # Rows of other purposes are never judged.
    targets: dict[str, list[Any]] = {"validation": [], "test": []}
    for name, rows in raw.splits.items():
        examples[name] = []
        found = encode_questions(rows, *tools)
        for example, question in bar(found, f"encoding {name} rows"):
            examples[name].append(example)
            if name in targets:
                targets[name].append(question)
    # A window holds one answer only if the context is not cut before it.
    notes = notes_on_lost_answers(examples, recipe.data.max_length)
    return Data(
        examples,
        Collate(preparation.pad),
        recipe.seed,
        targets,
        notes,
        **_test_rows(recipe, raw),
    )
