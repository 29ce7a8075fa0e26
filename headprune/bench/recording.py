"""What goes into every attention module in one pass of a model, kept so that the modules can be run
again alone."""

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

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Run:
    """One call of an attention module in a pass of the model."""

    bound: BoundSite
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def recorded(
    model: nn.Module, bound: list[BoundSite], inputs: Any
) -> dict[str, list[tuple[Any, Run]]]:
    """For every site the runs of its module in one pass, each with what tells kinds of runs apart;
    one run a kind keeps its inputs."""
    seen: dict[str, list[tuple[Any, Run]]] = {b.site.name: [] for b in bound}
    kept: dict[Any, Run] = {}

    def hook(b: BoundSite) -> Callable[..., None]:
        def given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            key = (_build(b), _shape((args, kwargs)))
            if key not in kept:
                kept[key] = Run(b, *fresh((args, kwargs), _cloned))
            seen[b.site.name].append((key, kept[key]))

        return given

    with ExitStack() as stack:
        for b in bound:
            stack.callback(b.module.register_forward_pre_hook(hook(b), with_kwargs=True).remove)
        call(model, inputs)
    if idle := [name for name, runs in seen.items() if not runs]:
        hint = "Give a batch that uses it, or leave it out of sites=."
        raise UnsupportedModel(
            idle[0],
            "run by the batch that latency is measured on",
            "an attention that is not",
            hint,
        )
    return seen


def _build(b: BoundSite) -> Any:
    """Equal for modules that are built alike: class, heads, shapes, and settings other than a
    layer's number."""
    site = b.site
    heads = (site.layout, site.kind, site.geometry, site.policy, site.grouping, site.heads)
    shapes = tuple(
        (name, p.shape, p.dtype)
        for name, p in [*b.module.named_parameters(), *b.module.named_buffers()]
    )
    plain = tuple(
        (name, value)
        for name, value in sorted(vars(b.module).items())
        if isinstance(value, (bool, int, str, type(None)))
        and not (type(value) is int and ("layer" in name or "idx" in name))
    )
    return type(b.module), heads, shapes, plain


def _shape(value: Any) -> Any:
    """Equal for inputs that take a module the same work."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride()
    if isinstance(value, Mapping):
        return tuple((k, _shape(v)) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_shape, value))
    return value if isinstance(value, _PLAIN) else type(value)


def tokens_of(run: Run) -> int:
    first = next((t for t in tensors((run.args, run.kwargs)) if t.ndim > 2), None)
    return 1 if first is None else first.shape[1 - run.bound.layout.batch_axis]


def fresh(value: Any, of_tensor: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
    """The value with ``of_tensor`` of its tensors and copies of what is no plain data: a cache that
    is filled would be longer in the next call."""
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, Mapping):
        return {k: fresh(v, of_tensor) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(fresh(v, of_tensor) for v in value)
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def _cloned(tensor: Tensor) -> Tensor:
    """A copy that no later call changes."""
    return tensor.clone(memory_format=torch.preserve_format)
