"""The heads that stay are taken after a norm that needs all of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headprune.core.mixin import Mixin, mix_in
from headprune.layouts._transformers import picked


class Picking(Mixin, nn.Module):
    """Put in front of a norm's class: normalises all heads, returns some."""

    headprune_picks: tuple[int, ...]
    headprune_width: int

    def forward(self, hidden_states: Tensor) -> Tensor:
        heads = super().forward(hidden_states).unflatten(-1, (-1, self.headprune_width))
        return picked(heads, -2, self.headprune_picks).flatten(-2)


def pick_(norm: Any, heads: tuple[int, ...], width: int) -> None:
    """Lets ``norm`` return only the heads at these positions."""
    mix_in(norm, Picking)
    norm.headprune_picks, norm.headprune_width = heads, width
