"""Wrappers with their own list of a model's parameters, such as ``DistributedDataParallel``.

A cut replaces parameters. Such a wrapper would continue to average the old ones, so every process
would silently train the new ones alone. ``torch.compile`` and ``DataParallel`` use the parameters
that are there in every call.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from headprune.core.errors import UnsupportedModel
from headprune.model.sites import unwrap

#: PyTorch's, and those of the same names in other packages (apex, fairscale, megatron).
_NAMES = ("DistributedDataParallel", "FullyShardedDataParallel")
_ORDER = (
    "Unwrap it first (model.module, or accelerate's unwrap_model), cut that, then wrap the smaller"
    " model anew and make its optimizer."
)


def check_unwrapped(model: nn.Module, parts: Iterable[str], must: str) -> None:
    """Refuse to replace parameters inside of such a wrapper.

    Args:
        model: The model as the caller has it.
        parts: Qualified names of the modules that get other parameters.
        must: What the model must be, for the message.

    Raises:
        UnsupportedModel: one of the modules lies in a wrapper.
    """
    wrappers = {}
    for name, module in unwrap(model).named_modules():
        if _keeps_parameters(type(module)):
            wrappers[name] = type(module).__name__
    # A wrapper keeps the parameters of everything inside it.
    for part in parts:
        for name, kind in wrappers.items():
            if not name or f"{part}.".startswith(f"{name}."):
                got = f"{part or 'it'} inside of {kind}, which would go on with the old parameters"
                raise UnsupportedModel("the model", must, got, _ORDER)


def retire_wrappers(changed: Iterable[nn.Module]) -> int:
    """Make every existing wrapper around changed modules refuse to train.

    To cut ``wrapper.module`` and wrap it anew is the right order; the old wrapper must not be used
    again.

    Returns:
        How many wrappers there are.
    """
    # Such wrappers need a process group.
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    changed_ids = set(map(id, changed))
    if not changed_ids:
        return 0
    # Only the garbage collector knows every object.
    wrappers = [x for x in gc.get_objects() if _keeps_parameters(type(x))]
    retired = [w for w in wrappers if not changed_ids.isdisjoint(map(id, w.modules()))]
    for wrapper in retired:
        wrapper.register_forward_pre_hook(_refuse, prepend=True)
    return len(retired)


def _keeps_parameters(kind: type) -> bool:
    """Whether a class is such a wrapper, by name: the packages need not be installed."""
    if not issubclass(kind, nn.Module):
        return False
    for base in kind.__mro__:
        if base.__name__ in _NAMES or str(base.__module__).startswith("deepspeed."):
            return True
    return False


def _refuse(wrapper: nn.Module, arguments: Any) -> None:
    """Refuse to train, as a forward pre-hook.

    Raises:
        UnsupportedModel: the wrapper is about to train.
    """
    if wrapper.training and torch.is_grad_enabled():
        must = "made after the model inside of it was cut"
        got = "one that would average the parameters from before the cut"
        hint = "Wrap the cut model again, then make a new optimizer for it."
        raise UnsupportedModel(type(wrapper).__name__, must, got, hint)
