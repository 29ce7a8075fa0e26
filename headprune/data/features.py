"""Rows become what a model takes: tokens, pixels or sound with labels, and batches padded to their
longest example."""

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

#: What a padded place holds; token numbers take the tokenizer's own.
_PADDING = {"attention_mask": 0, "token_type_ids": 0, "decoder_attention_mask": 0, "labels": -100}

_TOKENS = ("input_ids", "decoder_input_ids")

Example = dict[str, Any]


@dataclass(frozen=True)
class Encoder:
    """Turns rows into examples of one task.

    Args:
        task: The task.
        section: Names of the input columns, and the longest length.
        label: The label column.
        label_ids: Number of every label, for classification.
        tokenizer: For text.
        processor: A model's own image processor, or its feature extractor of sound.
        pixels: Mean and standard deviation of the training images, where they are normalised by
            these.
        start: The token that a decoder begins with.
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
        """One example a row, in order."""
        if self.task == "image_classification":
            inputs: list[Example] = [
                {"pixel_values": self._pixels(image)} for image in rows[self.section.image]
            ]
        elif self.task == "audio_classification":
            section = self.section
            inputs = Sounds(folder_of(section), self.processor, section.seconds).encode(
                rows[section.audio]
            )
        elif self.task == "token_classification":
            return self._words(rows)
        elif self.task == "translation":
            return self._pairs(rows)
        elif self.section.tokens is not None:
            inputs = [self._tokens(ids) for ids in rows[self.section.tokens]]
        else:
            inputs = self._text(rows)
        if self.task == "causal_lm":
            return inputs
        labels = rows[self.label]
        numbers = (
            labels if self.task == "regression" else [self.label_ids[label] for label in labels]
        )
        return [
            {**example, "labels": label} for example, label in zip(inputs, numbers, strict=True)
        ]

    def _text(self, rows: Any) -> list[Example]:
        columns = [list(rows[name]) for name in self.section.text_columns]
        if self.section.prefix:
            columns[0] = [self.section.prefix + text for text in columns[0]]
        limit = {"truncation": True, "max_length": self.section.max_length}
        encoded = self.tokenizer(*columns, **limit)
        return [{name: encoded[name][i] for name in encoded} for i in range(len(columns[0]))]

    def _pairs(self, rows: Any) -> list[Example]:
        """Sources, and translations as a decoder reads them (a token later) and as it should write
        them."""
        limit = {"truncation": True, "max_length": self.section.max_length}
        targets = self.tokenizer(text_target=list(rows[str(self.section.target)]), **limit)[
            "input_ids"
        ]
        return [
            {
                **source,
                "decoder_input_ids": [self.start, *ids[:-1]],
                "decoder_attention_mask": [1] * len(ids),
                "labels": list(ids),
            }
            for source, ids in zip(self._text(rows), targets, strict=True)
        ]

    def _tokens(self, ids: Sequence[int]) -> Example:
        ids = list(ids[: self.section.max_length])
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def _words(self, rows: Any) -> list[Example]:
        """Words and a label for each; a word's label stands at its first piece."""
        words = [list(w) for w in rows[self.section.text_columns[0]]]
        limit = {
            "truncation": True,
            "max_length": self.section.max_length,
            "is_split_into_words": True,
        }
        encoded = self.tokenizer(words, **limit)
        examples = []
        for i, labels in enumerate(rows[self.label]):
            places = encoded.word_ids(i)
            first = [p is not None and p not in places[:k] for k, p in enumerate(places)]
            numbers = [
                self.label_ids[labels[p]] if f else -100 for p, f in zip(places, first, strict=True)
            ]
            examples.append({**{name: encoded[name][i] for name in encoded}, "labels": numbers})
        return examples

    def _pixels(self, image: Any) -> Tensor:
        if self.processor is not None:
            image = image.convert("RGB") if hasattr(image, "convert") else np.asarray(image)
            pixels: Tensor = self.processor(image, return_tensors="pt")["pixel_values"][0]
            return pixels
        array = torch.from_numpy(pixel_array(image))
        return array if self.pixels is None else (array - self.pixels[0]) / self.pixels[1]


def pixel_array(image: Any) -> np.ndarray:
    """``[channels, height, width]`` in fp32; a picture's bytes are scaled to 0..1, numbers are left
    as they are."""
    scale = 255.0 if hasattr(image, "convert") else 1.0
    array: np.ndarray = np.asarray(image, dtype=np.float32) / np.float32(scale)
    if array.ndim == 2:
        return array[None]
    return np.ascontiguousarray(array.transpose(2, 0, 1)) if hasattr(image, "convert") else array


def pixel_statistics(images: Iterable[Any]) -> tuple[float, float]:
    """Mean and standard deviation over every pixel of every image."""
    values = np.concatenate([pixel_array(image).ravel() for image in images])
    return float(values.mean()), float(max(values.std(), 1e-6))


@dataclass(frozen=True)
class Collate:
    """Examples into one batch of tensors.

    Args:
        pad: The token number at padded places.
        side: Where padding goes; ``left`` for generation.
        dtype: Of pixels and sound: not every model casts them to that of its weights.
    """

    pad: int = 0
    side: str = "right"
    dtype: torch.dtype = torch.float32

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        if not examples:
            raise InvalidValue("batch", "made of examples", "none")
        return {name: self._column(name, [e[name] for e in examples]) for name in examples[0]}

    def _column(self, name: str, values: list[Any]) -> Tensor:
        if isinstance(values[0], Tensor):
            found = torch.stack(values)
            return found.to(self.dtype) if found.is_floating_point() else found
        if not isinstance(values[0], list):
            return torch.tensor(values)
        longest, fill = (
            max(map(len, values)),
            self.pad if name in _TOKENS else _PADDING.get(name, 0),
        )
        gaps = [[fill] * (longest - len(v)) for v in values]
        return torch.tensor(
            [g + v if self.side == "left" else v + g for g, v in zip(gaps, values, strict=True)]
        )
