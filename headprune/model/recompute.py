"""Gradient checkpointing in evaluation mode; Transformers has it in training mode only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from headprune.model.offloaded import offloaders
from headprune.model.running import other_forwards


@contextmanager
def recomputed(model: nn.Module) -> Iterator[None]:
    """Checkpoint the layers inside the block that the user wants checkpoints of.

    Such layers keep only their inputs, and run again in the backward pass, in the mode that they
    are in. They are the layers of Transformers for which ``model.gradient_checkpointing_enable()``
    was called. Results do not change; hooks inside the layers run twice. As in training, layers get
    no cache.
    """
    layers = filter(_wants_checkpoint, model.modules())
    replaced = [(layer, functools.partial(_checkpointed, layer)) for layer in layers]
    with ExitStack() as stack:
        # A second pass that stops early would not send back what its hooks have fetched.
        if any(offloaders(module) for module in model.modules()):
            stack.enter_context(set_checkpoint_early_stop(False))
        stack.enter_context(other_forwards(replaced))
        yield


def _wants_checkpoint(module: nn.Module) -> bool:
    """Whether a module is a layer of Transformers with checkpoints switched on."""
    if not getattr(module, "gradient_checkpointing", False):
        return False
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _checkpointed(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward with a checkpoint at its inputs."""
    from transformers import Cache

    reads_cache_only = getattr(layer, "_can_checkpoint_with_cache", False)

    def without_cache(value: Any) -> Any:
        return None if isinstance(value, Cache) else value

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not reads_cache_only:  # a layer would write into its cache twice
            args = tuple(map(without_cache, args))
            kwargs = {name: without_cache(value) for name, value in kwargs.items()}
        if "use_cache" in kwargs:
            kwargs = {**kwargs, "use_cache": False}
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
