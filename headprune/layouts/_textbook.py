"""Run textbook attention that lost all heads, or has no output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.layout import STATE_ATTRIBUTE
from headprune.core.mixin import Mixin


class OnlyBias(Mixin, nn.Module):
    """Put in front of a textbook attention without heads: return the output projection's bias."""

    headprune_gate: str
    #: Path of the attribute that holds attention weights, its axes, and the inputs' batch axis.
    headprune_weights: tuple[str, tuple[str, ...], int] | None = None

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
        query, key = _inputs(args, kwargs)
        if self.headprune_weights is not None:
            path, axes, batch = self.headprune_weights
            length = 1 - batch  # the other of the first two axes
            sizes = {
                "batch": query.shape[batch],
                "queries": query.shape[length],
                "keys": key.shape[length],
                "heads": 0,
            }
            parent, _, name = path.rpartition(".")
            # Code that reads the weights after a call finds those of no heads.
            weights = query.new_zeros([sizes[axis] for axis in axes])
            setattr(self.get_submodule(parent), name, weights)
        no_heads = query.new_zeros(*query.shape[:-1], 0)
        out: Tensor = self.get_submodule(self.headprune_gate)(no_heads)
        return out


def _inputs(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return queries and keys of a call; one input alone attends to itself."""
    query = args[0] if args else _named(kwargs, ("query", "queries", "x"))
    key = args[1] if len(args) > 1 else _named(kwargs, ("key", "keys"))
    return query, query if key is None else key


def _named(kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first of these arguments that is not None."""
    for name in names:
        if kwargs.get(name) is not None:
            return kwargs[name]
    return None


class Placed(Mixin, nn.Module):
    """Put in front of an attention without output projection: fill in zeros for removed heads."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state: Any = getattr(self, STATE_ATTRIBUTE)
        nothing = x.new_zeros(*x.shape[:-1], state.widths[1])  # [batch, length, head_dim]
        # Without heads, the module's own code would concatenate an empty list.
        if not state.heads:
            return torch.cat([nothing] * state.n_query_heads, -1)
        kept = super().forward(x, *args, **kwargs).chunk(len(state.heads), -1)
        outputs = dict(zip(state.heads, kept, strict=True))
        return torch.cat([outputs.get(head, nothing) for head in range(state.n_query_heads)], -1)
