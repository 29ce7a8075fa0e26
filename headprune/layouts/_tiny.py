"""Tiny random models of Transformers and batches for them, for the tests of every family.

A builder takes the class name of a model and the settings of its configuration, and returns
``(seed) -> (model, batch)``. Nothing is imported before a model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

#: Standard deviation of weights; large enough that every head matters to the output.
_SPREAD = 0.3
_VOCABULARY = 50
#: Of encoder-decoders.
_SPECIAL_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

#: Sizes of a tiny encoder or decoder.
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
#: Sizes of a tiny model that classifies text.
TEXT_SIZES: dict[str, Any] = {**SIZES, "max_position_embeddings": 32}
#: Sizes of a tiny model that classifies sound.
SPEECH_SIZES: dict[str, Any] = {
    **SIZES,
    # Convolutions that turn 400 samples into 10 positions.
    "conv_dim": (8, 8),
    "conv_kernel": (10, 4),
    "conv_stride": (10, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}

#: Sizes of a tiny Swin, of either version.
SWIN_SIZES: dict[str, Any] = {
    "size": 16,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 1],
    "num_heads": [3, 4],  # per stage; the width doubles between them
    "window_size": 2,
    "mlp_ratio": 1.5,
}

#: Makes a batch from the module ``torch``; draws from its global generator.
Batch = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class TinyModel:
    """``(seed) -> (model, batch)`` for one class of Transformers.

    Args:
        model: Name of the class.
        batch: Makes the batch.
        settings: Settings of the configuration.
    """

    model: str
    batch: Batch = field(compare=False)
    settings: dict[str, Any] = field(hash=False)

    def __call__(self, seed: int) -> tuple[Any, Any]:
        import torch
        import transformers

        kind = getattr(transformers, self.model)
        # Forked, so that a test's own random numbers do not change.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            example = self.batch(torch)
            return kind(kind.config_class(**self.settings)), example


@dataclass(frozen=True)
class TinyModule:
    """``(seed) -> (model, batch)`` by the function ``tiny(name)`` of a file of this folder.

    Args:
        file: Name of the file without ``.py``.
        name: What its function ``tiny`` gets.
    """

    file: str
    name: str

    def __call__(self, seed: int) -> tuple[Any, Any]:
        from importlib import import_module

        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made: tuple[Any, Any] = import_module(f"headprune.layouts.{self.file}").tiny(self.name)
            return made


def encoder(model: str, **settings: Any) -> TinyModel:
    """Sequence classification of three classes over 7 tokens; the last example is padded."""
    defaults = {
        "vocab_size": _VOCABULARY,
        "num_labels": 3,
        "initializer_range": _SPREAD,
        "pad_token_id": 0,
    }
    return TinyModel(model, _labelled_text, defaults | settings)


def decoder(model: str, **settings: Any) -> TinyModel:
    """A causal language model over 7 tokens; the last example is padded on the right."""
    defaults = {
        "vocab_size": _VOCABULARY,
        "initializer_range": _SPREAD,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return TinyModel(model, _text, defaults | settings)


def encoder_decoder(model: str, **settings: Any) -> TinyModel:
    """Text to text: 7 tokens in, 5 tokens out; the last example pads three."""
    defaults = {"vocab_size": _VOCABULARY, **_SPECIAL_TOKENS}
    return TinyModel(model, _text_to_text, defaults | settings)


def speech_to_text(model: str, frames: int = 12, mels: int = 4, **settings: Any) -> TinyModel:
    """Speech to text: ``frames`` mel spectra in and 5 tokens out."""
    defaults = {
        "vocab_size": _VOCABULARY,
        "num_mel_bins": mels,
        "max_source_positions": frames // 2,  # its convolutions halve the length
        "init_std": _SPREAD,
        **_SPECIAL_TOKENS,
    }
    batch = partial(_features, frames=frames, mels=mels)
    return TinyModel(model, batch, defaults | settings)


def images(
    model: str, size: int = 8, channels: int = 1, labelled: bool = True, **settings: Any
) -> TinyModel:
    """Classification of square images into three classes.

    Without labels (``labelled=False``), the model may be of any kind.
    """
    defaults = {
        "image_size": size,
        "num_channels": channels,
        "num_labels": 3,
        "initializer_range": _SPREAD,
    }
    batch = partial(_images, channels=channels, size=size, labelled=labelled)
    return TinyModel(model, batch, defaults | settings)


def images_and_text(
    model: str,
    vision: dict[str, Any],
    text: dict[str, Any],
    size: int = 8,
    channels: int = 1,
    **settings: Any,
) -> TinyModel:
    """An image tower and a text tower; of 7 tokens, the last example pads three."""
    image = {"image_size": size, "num_channels": channels, "initializer_range": _SPREAD, **vision}
    words = {"vocab_size": _VOCABULARY, "initializer_range": _SPREAD, "pad_token_id": 0, **text}
    batch = partial(_images_and_text, channels=channels, size=size)
    return TinyModel(model, batch, {"vision_config": image, "text_config": words, **settings})


def images_in_text(
    model: str, size: int = 8, patch: int = 4, image_token: int = 1, **settings: Any
) -> TinyModel:
    """A causal language model over 9 tokens, some of which stand for an image."""
    n_tokens = (size // patch) ** 2  # one per patch
    defaults = {"image_token_index": image_token, "image_seq_length": n_tokens}
    batch = partial(_images_in_text, size=size, n_tokens=n_tokens, image_token=image_token)
    return TinyModel(model, batch, defaults | settings)


def speech(model: str, samples: int = 400, **settings: Any) -> TinyModel:
    """Classification of waveforms into three classes; half of the last one is padding."""
    defaults = {"num_labels": 3, "initializer_range": _SPREAD}
    return TinyModel(model, partial(_waveforms, samples=samples), defaults | settings)


# Batches. Each has three examples, [3, length], so that no axis has the size of another.


def _ids(torch: Any, lowest: int) -> dict[str, Any]:
    mask = torch.tensor([[1] * 7, [1] * 7, [1, 1, 1, 1, 0, 0, 0]])
    ids = torch.randint(lowest, _VOCABULARY, (3, 7)) * mask  # 0 is the padding token
    return {"input_ids": ids, "attention_mask": mask}


def _text(torch: Any) -> dict[str, Any]:
    return _ids(torch, 3)  # above the special tokens


def _labelled_text(torch: Any) -> dict[str, Any]:
    return {**_ids(torch, 1), "labels": torch.tensor([0, 2, 1])}


def _text_to_text(torch: Any) -> dict[str, Any]:
    return {**_ids(torch, 3), "decoder_input_ids": torch.randint(3, _VOCABULARY, (3, 5))}


def _images(torch: Any, channels: int, size: int, labelled: bool = True) -> dict[str, Any]:
    batch = {"pixel_values": torch.randn(3, channels, size, size)}
    if labelled:
        batch["labels"] = torch.tensor([0, 2, 1])
    return batch


def _images_and_text(torch: Any, channels: int, size: int) -> dict[str, Any]:
    return {**_images(torch, channels, size, labelled=False), **_ids(torch, 3)}


def _images_in_text(torch: Any, size: int, n_tokens: int, image_token: int) -> dict[str, Any]:
    mask = torch.tensor([[1] * 9, [1] * 9, [1] * 7 + [0] * 2])
    ids = torch.randint(3, _VOCABULARY, (3, 9)) * mask
    ids[:, 1 : 1 + n_tokens] = image_token  # after the first token, as a processor puts it
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(3, 1, size, size)}


def _waveforms(torch: Any, samples: int) -> dict[str, Any]:
    mask = torch.ones(3, samples, dtype=torch.long)
    mask[-1, samples // 2 :] = 0
    return {
        "input_values": torch.randn(3, samples) * mask,
        "attention_mask": mask,
        "labels": torch.tensor([0, 2, 1]),
    }


def _features(torch: Any, frames: int, mels: int) -> dict[str, Any]:
    return {
        "input_features": torch.randn(3, mels, frames),
        "decoder_input_ids": torch.randint(3, _VOCABULARY, (3, 5)),
    }
