"""Tiny random models of Transformers, and batches for them: what every family's laws run on.

A builder takes the class name of a model and the settings of its configuration, and returns ``(seed) -> (model,
batch)``. Nothing is imported before a model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

#: Large enough that every head matters to the output of a tiny model.
_SPREAD = 0.3
_VOCABULARY = 50

#: Makes a batch, given the module ``torch``; draws from torch's global generator.
Batch = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class TinyModel:
    """``(seed) -> (model, batch)`` for one class of Transformers.

    Args:
        model: Name of the class.
        batch: Makes the batch.
        settings: Of the configuration.
    """

    model: str
    batch: Batch = field(compare=False)
    settings: dict[str, Any] = field(hash=False)

    def __call__(self, seed: int) -> tuple[Any, Any]:
        import torch
        import transformers

        kind = getattr(transformers, self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            example = self.batch(torch)
            return kind(kind.config_class(**self.settings)), example


def encoder(model: str, **settings: Any) -> TinyModel:
    """Sequence classification of three classes over 7 tokens; the last example is padded."""
    given = {"vocab_size": _VOCABULARY, "num_labels": 3, "initializer_range": _SPREAD, "pad_token_id": 0}
    return TinyModel(model, _labelled_text, given | settings)


def decoder(model: str, **settings: Any) -> TinyModel:
    """A causal language model over 7 tokens; the last example is padded on the right."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return TinyModel(model, _text, {"vocab_size": _VOCABULARY, "initializer_range": _SPREAD, **tokens} | settings)


def encoder_decoder(model: str, **settings: Any) -> TinyModel:
    """Text to text: 7 tokens in, of which the last example pads three, and 5 tokens out."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return TinyModel(model, _text_to_text, {"vocab_size": _VOCABULARY, **tokens} | settings)


def images(model: str, size: int = 8, channels: int = 1, **settings: Any) -> TinyModel:
    """Image classification of three classes."""
    given = {"image_size": size, "num_channels": channels, "num_labels": 3, "initializer_range": _SPREAD}
    return TinyModel(model, partial(_images, channels=channels, size=size), given | settings)


def speech(model: str, samples: int = 400, **settings: Any) -> TinyModel:
    """Classification of waveforms into three classes."""
    given = {"num_labels": 3, "initializer_range": _SPREAD}
    return TinyModel(model, partial(_waveforms, samples=samples), given | settings)


def _ids(torch: Any, lowest: int) -> dict[str, Any]:
    mask = torch.tensor([[1] * 7, [1] * 7, [1, 1, 1, 1, 0, 0, 0]])
    return {"input_ids": torch.randint(lowest, _VOCABULARY, (3, 7)) * mask, "attention_mask": mask}


def _text(torch: Any) -> dict[str, Any]:
    return _ids(torch, 3)


def _labelled_text(torch: Any) -> dict[str, Any]:
    return {**_ids(torch, 1), "labels": torch.tensor([0, 2, 1])}


def _text_to_text(torch: Any) -> dict[str, Any]:
    return {**_ids(torch, 3), "decoder_input_ids": torch.randint(3, _VOCABULARY, (3, 5))}


def _images(torch: Any, channels: int, size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(3, channels, size, size), "labels": torch.tensor([0, 2, 1])}


def _waveforms(torch: Any, samples: int) -> dict[str, Any]:
    return {"input_values": torch.randn(3, samples), "labels": torch.tensor([0, 2, 1])}
