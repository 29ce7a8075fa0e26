"""Build models as Transformers does, without memory for weights, and write them as it does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.model.classes import class_named
from headprune.model.offloaded import state_of


@contextmanager
def no_memory(buffers: bool = False) -> Iterator[None]:
    """Build modules with parameters on the meta device.

    Buffers are real, because checkpoints do not store tables such as rotary angles.

    Args:
        buffers: Put buffers on the meta device too, for a model that never runs.
    """
    from accelerate import init_empty_weights

    # Some classes draw numbers for a parameter before they make it one.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=buffers):
        yield


def is_known(model: nn.Module) -> bool:
    """Whether Transformers has the model's class by its name."""
    import transformers

    # A class of the user's with the same name is another one.
    return getattr(transformers, type(model).__name__, None) is type(model)


def fresh(model: nn.Module, config: Any = None) -> nn.Module | None:
    """A new model of the same class, without memory for its weights.

    Args:
        model: The model.
        config: The new model's configuration; default the model's own.

    Returns:
        The new model; None where its class is not known by name.
    """
    if class_named(type(model).__name__) is not type(model):
        return None
    # The constructor may change its configuration.
    with no_memory():
        return type(model)(copy.deepcopy(model.config if config is None else config))


def save_as(
    kind: Any,
    config: Any,
    model: Any,
    folder: Path,
    max_shard_size: int | str,
    original_names: bool,
) -> None:
    """Write a model's tensors with the ``save_pretrained`` of another class or configuration.

    Args:
        kind: The class.
        config: Its configuration.
        model: The model whose tensors are written.
        folder: Where to.
        max_shard_size: Bytes, or text such as ``"5GB"``.
        original_names: Whether tensors get the names and the packing that the family has on disk,
            where they differ from the module's.
    """
    with no_memory():
        writer = kind(copy.deepcopy(config))
    writer.load_state_dict(state_of(model), assign=True)  # no copy
    writer.tie_weights()
    writer.config.dtype = model.dtype
    if getattr(model, "generation_config", None) is not None:
        writer.generation_config = copy.deepcopy(model.generation_config)
    writer.save_pretrained(
        folder, max_shard_size=max_shard_size, save_original_format=original_names
    )
