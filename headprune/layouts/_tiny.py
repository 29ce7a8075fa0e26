"""Tiny random models of Transformers, and batches for them: what every family's laws run on.

A builder takes the class name of a model and the settings of its configuration, and returns ``(seed) -> (model,
batch)``. Nothing is imported before a model is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headprune.core.layout import Tiny

#: Large enough that every head matters to the output of a tiny model.
_SPREAD = 0.3
_VOCABULARY = 50


def encoder(model: str, **settings: Any) -> Tiny:
    """Sequence classification of three classes over 7 tokens; the last example is padded."""

    def batch(torch: Any) -> dict[str, Any]:
        return {**_ids(torch, 1), "labels": torch.tensor([0, 2, 1])}

    settings = {"vocab_size": _VOCABULARY, "num_labels": 3, "initializer_range": _SPREAD, "pad_token_id": 0} | settings
    return _builder(model, batch, settings)


def decoder(model: str, **settings: Any) -> Tiny:
    """A causal language model over 7 tokens; the last example is padded on the right."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = {"vocab_size": _VOCABULARY, "initializer_range": _SPREAD, **tokens} | settings
    return _builder(model, lambda torch: _ids(torch, 3), settings)


def encoder_decoder(model: str, **settings: Any) -> Tiny:
    """Text to text: 7 tokens in, of which the last example pads three, and 5 tokens out."""

    def batch(torch: Any) -> dict[str, Any]:
        return {**_ids(torch, 3), "decoder_input_ids": torch.randint(3, _VOCABULARY, (3, 5))}

    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return _builder(model, batch, {"vocab_size": _VOCABULARY, **tokens} | settings)


def images(model: str, size: int = 8, channels: int = 1, labelled: bool = True, **settings: Any) -> Tiny:
    """Image classification of three classes."""

    def batch(torch: Any) -> dict[str, Any]:
        pixels = {"pixel_values": torch.randn(3, channels, size, size)}
        return {**pixels, "labels": torch.tensor([0, 2, 1])} if labelled else pixels

    given = {"image_size": size, "num_channels": channels, "num_labels": 3, "initializer_range": _SPREAD}
    return _builder(model, batch, given | settings)


def speech(model: str, samples: int = 400, **settings: Any) -> Tiny:
    """Classification of waveforms into three classes."""

    def batch(torch: Any) -> dict[str, Any]:
        return {"input_values": torch.randn(3, samples), "labels": torch.tensor([0, 2, 1])}

    return _builder(model, batch, {"num_labels": 3, "initializer_range": _SPREAD} | settings)


def with_batch(model: str, batch: Any, **settings: Any) -> Tiny:
    """Any model with a batch of its own: ``batch(torch) -> dict``."""
    return _builder(model, batch, settings)


def _ids(torch: Any, lowest: int) -> dict[str, Any]:
    mask = torch.tensor([[1] * 7, [1] * 7, [1, 1, 1, 1, 0, 0, 0]])
    return {"input_ids": torch.randint(lowest, _VOCABULARY, (3, 7)) * mask, "attention_mask": mask}


def _builder(name: str, batch: Any, settings: dict[str, Any]) -> Tiny:
    def build(seed: int) -> tuple[Any, Any]:
        import torch
        import transformers

        kind = getattr(transformers, name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            example = batch(torch)
            return kind(kind.config_class(**settings)), example

    return build
