"""What stands in front of textbook attention that has lost heads: without any, or without an output
projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.layout import STATE_ATTRIBUTE
from headprune.core.mixin import Mixin


class OnlyBias(Mixin, nn.Module):
    """Put in front of a textbook attention without heads: the output projection of nothing, its
    bias.

    Where the module's own code keeps its attention weights, those of no head are kept.
    """

    headprune_gate: str
    headprune_weights: tuple[str, tuple[str, ...], int] | None = None

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
        query, key = _inputs(args, kwargs)
        if self.headprune_weights is not None:
            path, axes, batch = self.headprune_weights
            sizes = {
                "batch": query.shape[batch],
                "queries": query.shape[1 - batch],
                "keys": key.shape[1 - batch],
            }
            parent, _, name = path.rpartition(".")
            weights = query.new_zeros([0 if axis == "heads" else sizes[axis] for axis in axes])
            setattr(self.get_submodule(parent), name, weights)
        out: Tensor = self.get_submodule(self.headprune_gate)(query.new_zeros(*query.shape[:-1], 0))
        return out


def _inputs(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Queries and keys of a call; a module that is called with one input attends to itself."""
    given: list[Any] = list(args[:2])
    for position, names in enumerate((("query", "queries", "x"), ("key", "keys"))):
        if position == len(given):
            given.append(next((kwargs[n] for n in names if kwargs.get(n) is not None), None))
    query, key = given
    return query, query if key is None else key


class Placed(Mixin, nn.Module):
    """Put in front of an attention without an output projection: zeros where the heads that left
    had their outputs."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state: Any = getattr(self, STATE_ATTRIBUTE)
        nothing = x.new_zeros(*x.shape[:-1], state.widths[1])
        if not state.heads:
            return torch.cat([nothing] * state.n_query_heads, -1)
        kept = super().forward(x, *args, **kwargs).chunk(len(state.heads), -1)
        present = dict(zip(state.heads, kept, strict=True))
        return torch.cat([present.get(head, nothing) for head in range(state.n_query_heads)], -1)
