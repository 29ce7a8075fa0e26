"""What stands in front of textbook attention that has lost heads: without any, or without an output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.layout import STATE_ATTRIBUTE
from headprune.core.mixin import Mixin


class OnlyBias(Mixin, nn.Module):
    """Put in front of a textbook attention without heads: the output projection of nothing, its bias."""

    headprune_gate: str

    def forward(self, *args: Tensor, query: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = args[0] if query is None else query
        out: Tensor = self.get_submodule(self.headprune_gate)(x.new_zeros(*x.shape[:-1], 0))
        return out


class Placed(Mixin, nn.Module):
    """Put in front of an attention without an output projection: zeros where the heads that left had their outputs."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state: Any = getattr(self, STATE_ATTRIBUTE)
        nothing = x.new_zeros(*x.shape[:-1], state.widths[1])
        if not state.heads:
            return torch.cat([nothing] * state.n_query_heads, -1)
        kept = super().forward(x, *args, **kwargs).chunk(len(state.heads), -1)
        present = dict(zip(state.heads, kept, strict=True))
        return torch.cat([present.get(head, nothing) for head in range(state.n_query_heads)], -1)
