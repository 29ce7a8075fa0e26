"""Models as Transformers builds them, without memory for their weights, and as it writes them."""

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
    """Parameters on the meta device; buffers are real, because tables such as rotary angles are not
    stored.

    Args:
        buffers: Without these, too, for a model that is only looked at.
    """
    from accelerate import init_empty_weights

    # Some classes draw numbers for a parameter before they make it one.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=buffers):
        yield


def is_known(model: nn.Module) -> bool:
    """Whether Transformers has the model's class by its name."""
    import transformers

    return getattr(transformers, type(model).__name__, None) is type(model)


def fresh(model: nn.Module, config: Any = None) -> nn.Module | None:
    """The model as it is built from its configuration or another; None for a class that we cannot
    find by name."""
    if class_named(type(model).__name__) is not type(model):
        return None
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
    """Writes the model's tensors as another class or configuration would, with that one's
    ``save_pretrained``.

    Args:
        original_names: Whether tensors get the names and the packing that the family has on disk,
            where they differ from the module's.
    """
    with no_memory():
        twin = kind(copy.deepcopy(config))
    twin.load_state_dict(state_of(model), assign=True)
    twin.tie_weights()
    twin.config.dtype = model.dtype
    if getattr(model, "generation_config", None) is not None:
        twin.generation_config = copy.deepcopy(model.generation_config)
    twin.save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=original_names)
