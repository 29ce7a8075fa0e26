"""Decide from one run which attentions take their keys from another sequence than their queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.layout import AttentionLayout
from headprune.detect.prove import Scratch
from headprune.model.running import call
from headprune.model.sites import Sites


def cross_attentions(scratch: Scratch, sites: Sites) -> set[str]:
    """Return the names of the modules whose queries and keys are of different arguments.

    Gradients tell which arguments of a module reach its two projections. An argument that reaches
    both, such as ``x`` where keys are of ``cat(latents, x)``, makes it attention to one sequence.

    Args:
        scratch: The model.
        sites: Its attentions. Those that make queries and keys by one projection, or by no module,
            are never cross-attention.
    """
    watchers = []
    for site in sites:
        module = scratch.model.get_submodule(site.name)
        query = _projection(module, sites.layouts[site.layout], "query")
        key = _projection(module, sites.layouts[site.layout], "key")
        if query is not None and key is not None and query is not key:
            watchers.append(_Arguments(site.name, module, query, key))
    try:
        with scratch.running(), torch.enable_grad():
            call(scratch.model, scratch.example)
        return {watcher.name for watcher in watchers if watcher.are_apart()}
    except RuntimeError:  # code that does not run with gradients
        return set()
    finally:
        for watcher in watchers:
            watcher.remove()


def _projection(module: nn.Module, layout: AttentionLayout, unit: str) -> nn.Module | None:
    """The projection of the queries or keys; None where it is a bare tensor or a list."""
    for slab in layout.slabs:
        if slab.axis == "out" and (unit in slab.units or f"gated_{unit}" in slab.units):
            return dict(module.named_modules()).get(slab.path)
    return None


class _Arguments:
    """Which tensors a module was called with, and what its two projections were called with.

    Args:
        name: Of the module.
        module: The attention.
        query: Its projection of the queries.
        key: Its projection of the keys.
    """

    def __init__(self, name: str, module: nn.Module, query: nn.Module, key: nn.Module) -> None:
        self.name = name
        # Each tensor it was called with, and the leaf of the graph that stands for it.
        self._leaves: list[tuple[Tensor, Tensor]] = []
        self._inputs: dict[str, Tensor] = {}
        self._handles = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            query.register_forward_pre_hook(self._keep("query"), with_kwargs=True),
            key.register_forward_pre_hook(self._keep("key"), with_kwargs=True),
        ]

    def are_apart(self) -> bool:
        """Whether no argument reaches both projections, and one reaches each."""
        queries, keys = self._reaching("query"), self._reaching("key")
        return bool(queries and keys) and not queries & keys

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._leaves = []
        args = tuple(map(self._as_leaf, args))
        return args, {name: self._as_leaf(value) for name, value in kwargs.items()}

    def _as_leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        for known, leaf in self._leaves:
            # ``x + position`` may be computed twice, once for the queries and once for the keys.
            if known is value or torch.equal(known, value):
                return leaf
        # A copy, so that the module may write to it.
        leaf = value.detach().requires_grad_().clone()
        self._leaves.append((value, leaf))
        return leaf

    def _keep(self, which: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self._inputs[which] = tensors[0]

        return keep

    def _reaching(self, which: str) -> set[int]:
        """Numbers of the arguments that the input of a projection depends on."""
        taken = self._inputs.get(which)
        if taken is None or not taken.requires_grad or not self._leaves:
            return set()
        leaves = [leaf for _, leaf in self._leaves]
        gradients = torch.autograd.grad(taken.sum(), leaves, retain_graph=True, allow_unused=True)
        return {number for number, gradient in enumerate(gradients) if gradient is not None}
