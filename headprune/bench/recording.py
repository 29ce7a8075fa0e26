"""Recorded inputs of every site's module in one pass, so that modules can run again alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import UnsupportedModel
from headprune.model.running import call, tensors
from headprune.model.sites import BoundSite

# Types of settings that are equal or not, and that a call cannot change.
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class RecordedCall:
    """One call of a site's module in a pass of the model, with copies of its arguments."""

    bound: BoundSite
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def recorded(
    model: nn.Module, bound: list[BoundSite], inputs: Any
) -> dict[str, list[tuple[Any, RecordedCall]]]:
    """Run a model once and return the calls of each site's module, each with its kind.

    Calls of one kind take the same time. The first of each kind is recorded; the others refer to
    it.

    Raises:
        UnsupportedModel: a site that this batch does not run.
    """
    calls: dict[str, list[tuple[Any, RecordedCall]]] = {b.site.name: [] for b in bound}
    firsts: dict[Any, RecordedCall] = {}  # by kind

    def hook(b: BoundSite) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kind = (_build(b), _shape((args, kwargs)))
            if kind not in firsts:
                own_args, own_kwargs = fresh((args, kwargs), _cloned)
                firsts[kind] = RecordedCall(b, own_args, own_kwargs)
            calls[b.site.name].append((kind, firsts[kind]))

        return record

    with ExitStack() as stack:
        for b in bound:
            stack.callback(b.module.register_forward_pre_hook(hook(b), with_kwargs=True).remove)
        call(model, inputs)
    for name, of_site in calls.items():
        if not of_site:
            must = "run by the batch that latency is measured on"
            hint = "Give a batch that uses it, or leave it out of sites=."
            raise UnsupportedModel(name, must, "one that does not run", hint)
    return calls


def _build(b: BoundSite) -> Any:
    """Return a key that is equal for modules of equal class, heads, shapes and settings."""
    site = b.site
    heads = (site.layout, site.kind, site.geometry, site.policy, site.grouping, site.heads)
    weights = [*b.module.named_parameters(), *b.module.named_buffers()]
    shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in weights)
    settings = []
    for name, value in sorted(vars(b.module).items()):
        # The number of a layer makes no difference.
        is_index = type(value) is int and ("layer" in name or "idx" in name)
        if isinstance(value, (bool, int, str, type(None))) and not is_index:
            settings.append((name, value))
    return type(b.module), heads, shapes, tuple(settings)


def _shape(value: Any) -> Any:
    """Return a key that is equal for inputs on which a module does the same work."""
    if isinstance(value, Tensor):
        # Kernels differ by stride too.
        return value.shape, value.dtype, value.stride()
    if isinstance(value, Mapping):
        return tuple((k, _shape(v)) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_shape, value))
    return value if isinstance(value, _PLAIN) else type(value)


def tokens_of(one: RecordedCall) -> int:
    """Return the tokens per example in the first input that has any."""
    for tensor in tensors((one.args, one.kwargs)):
        if tensor.ndim > 2:
            return tensor.shape[1 - one.bound.layout.batch_axis]
    return 1


def fresh(value: Any, of_tensor: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
    """Copy inputs for one call: ``of_tensor`` of tensors, deep copies of other objects.

    A cache, for example, grows in a call and would be longer in the next one.
    """
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, Mapping):
        return {k: fresh(v, of_tensor) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(fresh(v, of_tensor) for v in value)
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def _cloned(tensor: Tensor) -> Tensor:
    """Copy a tensor so that no later call changes it."""
    return tensor.clone(memory_format=torch.preserve_format)
