"""Take the kept heads after a norm that needs all heads (OLMo 2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headprune.core.mixin import Mixin, mix_in
from headprune.layouts._transformers import picked


class Picking(Mixin, nn.Module):
    """Put in front of a norm's class: normalise all heads, return some."""

    headprune_picks: tuple[int, ...]
    headprune_width: int

    def forward(self, hidden_states: Tensor) -> Tensor:
        # [..., heads * width] -> [..., heads, width] -> [..., picked heads * width]
        heads = super().forward(hidden_states).unflatten(-1, (-1, self.headprune_width))
        return picked(heads, -2, self.headprune_picks).flatten(-2)


def pick_(norm: Any, heads: tuple[int, ...], width: int) -> None:
    """Let a norm return only the heads at these positions.

    Args:
        norm: The norm over all heads; it is changed in place.
        heads: Ascending positions.
        width: Width of a head.
    """
    mix_in(norm, Picking)
    norm.headprune_picks = heads
    norm.headprune_width = width
