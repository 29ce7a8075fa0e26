"""Gradient checkpointing in evaluation mode; Transformers has it in training mode only, where
dropout is on."""

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
    """For as long as the block lasts, layers that the user wants checkpoints of keep their inputs
    alone, and run again in the backward pass, in the mode that they are in.

    Those are the layers of Transformers for which ``model.gradient_checkpointing_enable()`` was
    called. Numbers stay as they are; hooks inside of the layers run twice. As in training, layers
    get no cache.
    """
    layers = [
        m for m in model.modules() if getattr(m, "gradient_checkpointing", False) and _is_layer(m)
    ]
    with ExitStack() as stack:
        if any(
            offloaders(m) for m in model.modules()
        ):  # a pass that stops early leaves what its hooks have fetched
            stack.enter_context(set_checkpoint_early_stop(False))
        stack.enter_context(
            other_forwards((layer, functools.partial(_twice, layer)) for layer in layers)
        )
        yield


def _is_layer(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _twice(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    from transformers import Cache

    reads_only = getattr(layer, "_can_checkpoint_with_cache", False)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not reads_only:  # a layer would write into its cache twice
            args = tuple(None if isinstance(value, Cache) else value for value in args)
            kwargs = {
                name: None if isinstance(value, Cache) else value for name, value in kwargs.items()
            }
        unused = {"use_cache": False} if "use_cache" in kwargs else {}
        return checkpoint(forward, *args, use_reentrant=False, **{**kwargs, **unused})

    return run
