"""Wrappers that keep a list of a model's parameters of their own, as those do that average
gradients over processes.

A cut replaces parameters. ``DistributedDataParallel`` goes on to average the old ones, so every
process would train the new ones by itself, without a word. ``torch.compile`` and ``DataParallel``
look at what is there in every call.
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
    """Refuses to replace parameters inside of such a wrapper.

    Args:
        model: The model as the caller has it.
        parts: Qualified names of the modules that get other parameters.
        must: What the model must be.

    Raises:
        UnsupportedModel: one of the modules lies in a wrapper.
    """
    wrappers = {
        name: type(m).__name__
        for name, m in unwrap(model).named_modules()
        if _keeps_parameters(type(m))
    }
    for part in parts if wrappers else ():
        kind = next(
            (
                kind
                for name, kind in wrappers.items()
                if not name or f"{part}.".startswith(f"{name}.")
            ),
            None,
        )
        if kind is not None:
            got = f"{part or 'it'} inside of {kind}, which would go on with the old parameters"
            raise UnsupportedModel("the model", must, got, _ORDER)


def retire_wrappers(changed: Iterable[nn.Module]) -> int:
    """Makes every living wrapper around modules that were changed refuse to train; returns how many
    there are.

    Who cuts ``wrapper.module`` does it in the right order and wraps it anew; the old wrapper must
    not be used again.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    changed_ids = {id(module) for module in changed}
    living = (
        [found for found in gc.get_objects() if _keeps_parameters(type(found))]
        if changed_ids
        else []
    )
    retired = [w for w in living if not changed_ids.isdisjoint(map(id, w.modules()))]
    for wrapper in retired:
        wrapper.register_forward_pre_hook(_refuse, prepend=True)
    return len(retired)


def _keeps_parameters(kind: type) -> bool:
    """Known by name: a model need not have any of these packages."""
    if not issubclass(kind, nn.Module):
        return False
    return any(
        c.__name__ in _NAMES or str(c.__module__).startswith("deepspeed.") for c in kind.__mro__
    )


def _refuse(wrapper: nn.Module, arguments: Any) -> None:
    """Raises:
    UnsupportedModel: the wrapper is about to train.
    """
    if wrapper.training and torch.is_grad_enabled():
        must = "made after the model inside of it was cut"
        got = "one that would average the parameters from before the cut"
        raise UnsupportedModel(
            type(wrapper).__name__,
            must,
            got,
            "Wrap the cut model anew, and make its optimizer then.",
        )
