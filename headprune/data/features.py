"""Encode rows as tokens, pixels or sound with labels, and pad them into batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.data.sound import Sounds
from headprune.data.sources import folder_of
from headprune.recipes.schema import DataSection, Task

#: Value at padded places; token numbers take the tokenizer's padding token.
_PADDING = {
    "attention_mask": 0,
    "token_type_ids": 0,
    "decoder_attention_mask": 0,
    "labels": -100,
}

_TOKENS = ("input_ids", "decoder_input_ids")

#: One row as the model reads it: lists of token numbers, or tensors, by argument name.
Example = dict[str, Any]


@dataclass(frozen=True)
class RowEncoder:
    """Turns rows into examples of one task.

    Args:
        task: The task.
        section: Names of the input columns, and the longest length.
        label: The label column.
        label_ids: Class number of each label, for classification.
        tokenizer: For text.
        processor: The model's own image processor, or its feature extractor of sound.
        pixels: Mean and standard deviation that images are normalised by, if any.
        start: Number of the token that a decoder begins with.
    """

    task: Task
    section: DataSection
    label: str = "label"
    label_ids: Mapping[Any, int] = field(default_factory=dict)
    tokenizer: Any = None
    processor: Any = None
    pixels: tuple[float, float] | None = None
    start: int = 0

    def encode(self, rows: Any) -> list[Example]:
        """Return one example per row, in order."""
        if self.task == "translation":
            return self._translations(rows)
        if self.task == "token_classification":
            return self._labelled_words(rows)
        examples = self._inputs(rows)
        if self.task == "causal_lm":
            return examples
        labels = rows[self.label]
        if self.task != "regression":
            labels = [self.label_ids[label] for label in labels]
        for example, label in zip(examples, labels, strict=True):
            example["labels"] = label
        return examples

    def _inputs(self, rows: Any) -> list[Example]:
        """Encode images, sound, tokens or text, without labels."""
        section = self.section
        if self.task == "image_classification":
            return [{"pixel_values": self._pixels(image)} for image in rows[section.image]]
        if self.task == "audio_classification":
            sounds = Sounds(folder_of(section), self.processor, section.seconds)
            return sounds.encode(rows[section.audio])
        if section.tokens is not None:
            return list(map(self._tokens, rows[section.tokens]))
        return self._text(rows)

    def _text(self, rows: Any) -> list[Example]:
        columns = [list(rows[name]) for name in self.section.text_columns]
        if self.section.prefix:  # as T5 reads its task
            columns[0] = [self.section.prefix + text for text in columns[0]]
        encoded = self.tokenizer(*columns, truncation=True, max_length=self.section.max_length)
        return [row_of(encoded, i) for i in range(len(columns[0]))]

    def _translations(self, rows: Any) -> list[Example]:
        """Encode sources and translations.

        The decoder reads a translation shifted by one token, and learns to write it unshifted.
        """
        targets = self.tokenizer(
            text_target=list(rows[str(self.section.target)]),
            truncation=True,
            max_length=self.section.max_length,
        )
        examples = self._text(rows)
        for example, ids in zip(examples, targets["input_ids"], strict=True):
            example["decoder_input_ids"] = [self.start, *ids[:-1]]
            example["decoder_attention_mask"] = [1] * len(ids)
            example["labels"] = list(ids)
        return examples

    def _tokens(self, ids: Sequence[int]) -> Example:
        ids = list(ids[: self.section.max_length])
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def _labelled_words(self, rows: Any) -> list[Example]:
        """Encode lists of words; only a word's first token has a label.

        Other tokens have -100, which the loss ignores.
        """
        words = list(map(list, rows[self.section.text_columns[0]]))
        encoded = self.tokenizer(
            words,
            truncation=True,
            max_length=self.section.max_length,
            is_split_into_words=True,
        )
        examples = []
        for i, labels in enumerate(rows[self.label]):
            numbers: list[int] = []  # [tokens]
            seen: set[int | None] = set()
            # The word of each token; None at special tokens.
            for word in encoded.word_ids(i):
                first = word is not None and word not in seen
                numbers.append(self.label_ids[labels[word]] if first else -100)
                seen.add(word)
            examples.append({**row_of(encoded, i), "labels": numbers})
        return examples

    def _pixels(self, image: Any) -> Tensor:
        """Return ``[channels, height, width]`` as the model reads it."""
        if self.processor is not None:
            image = image.convert("RGB") if _is_picture(image) else np.asarray(image)
            pixels: Tensor = self.processor(image, return_tensors="pt")["pixel_values"][0]
            return pixels
        array = torch.from_numpy(pixel_array(image))
        if self.pixels is None:
            return array
        mean, deviation = self.pixels
        return (array - mean) / deviation


def row_of(encoded: Any, i: int) -> Example:
    """Return row ``i`` of a tokenizer's output."""
    return {name: encoded[name][i] for name in encoded}


def _is_picture(image: Any) -> bool:
    """Whether it is an image of Pillow, and no array or list of numbers."""
    return hasattr(image, "convert")


def pixel_array(image: Any) -> np.ndarray:
    """Return an image as fp32 ``[channels, height, width]``.

    A picture's bytes are scaled to 0..1; numbers are unchanged.
    """
    picture = _is_picture(image)
    # A picture has one byte per value.
    scale = np.float32(255.0 if picture else 1.0)
    array: np.ndarray = np.asarray(image, dtype=np.float32) / scale
    if array.ndim == 2:  # one channel, without a dimension for it
        return array[None]
    if picture:  # Pillow has the channels last
        return np.ascontiguousarray(array.transpose(2, 0, 1))
    return array


def pixel_statistics(images: Iterable[Any]) -> tuple[float, float]:
    """Return mean and standard deviation over every pixel of every image."""
    values = np.concatenate([pixel_array(image).ravel() for image in images])
    # At least 1e-6 avoids a division by zero where all images are one colour.
    return float(values.mean()), float(max(values.std(), 1e-6))


@dataclass(frozen=True)
class Collate:
    """Pads examples into one batch of tensors.

    Args:
        pad: Number of the padding token.
        side: Where padding is put; ``left`` for generation.
        dtype: Dtype of pixels and sound: not every model casts them to that of its weights.
    """

    pad: int = 0
    side: str = "right"
    dtype: torch.dtype = torch.float32

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        if not examples:
            raise InvalidValue("batch", "made of examples", "none")
        return {name: self._column(name, examples) for name in examples[0]}

    def _column(self, name: str, examples: Sequence[Example]) -> Tensor:
        """Return one value of all examples: ``[batch, ...]``."""
        values = [example[name] for example in examples]
        if isinstance(values[0], Tensor):
            # Pixels or sound, all of one shape.
            stacked = torch.stack(values)
            return stacked.to(self.dtype) if stacked.is_floating_point() else stacked
        if not isinstance(values[0], list):
            # Numbers, such as labels: [batch]
            return torch.tensor(values)
        longest = max(map(len, values))
        fill = self.pad if name in _TOKENS else _PADDING.get(name, 0)
        padded = []
        for value in values:
            gap = [fill] * (longest - len(value))
            padded.append(gap + value if self.side == "left" else value + gap)
        return torch.tensor(padded)  # [batch, longest]
