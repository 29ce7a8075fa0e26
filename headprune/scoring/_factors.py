"""K-FAC's two factors at one site, gathered over tokens: products of contexts and products of their
slopes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headprune.model.contexts import rows_of, wide
from headprune.model.running import device_of
from headprune.model.sites import BoundSite
from headprune.scoring._activations import by_block
from headprune.scoring._base import added
from headprune.scoring._contexts import by_example


class Factors:
    """A site's sums over tokens, by block of examples, in fp64 on its device."""

    def __init__(self, bound: BoundSite, blocks: int) -> None:
        self.bound = bound
        self.width = len(bound.site.heads) * bound.site.value_dim
        parameter = next(bound.module.parameters())
        nothing = torch.zeros(blocks, dtype=wide(parameter), device=device_of(bound.module))
        self.weight = nothing.clone()
        self.x = nothing.new_zeros(blocks, self.width)
        self.xx = nothing.new_zeros(blocks, self.width, self.width)
        self.gg = torch.zeros_like(self.xx)
        self.tokens = torch.zeros((), dtype=torch.int64, device=nothing.device)

    def add_slopes(self, examples: range, g: Tensor, batch: Any, here: Tensor | None) -> Tensor:
        """Adds the slopes of one target at one run; returns how much each token weighs,
        ``[examples, tokens]``."""
        g = self._by_example(g, len(examples), batch).to(self.gg.dtype)
        if here is not None:  # chosen, not multiplied by 0: attention may leave NaN at padding
            g = g.masked_fill(~here.to(g.device).reshape(g.shape[:2])[..., None], 0)
        for number, some in by_block(examples, len(self.gg)):
            rows = g[some].flatten(0, 1)
            self.gg[number].addmm_(rows.T, rows)
        self.tokens += (
            g.shape[0] * g.shape[1] if here is None else here.sum().to(self.tokens.device)
        )
        return g.square().sum(-1)

    def add_tokens(self, examples: range, x: Tensor, weights: Tensor, batch: Any) -> None:
        """Adds one run's contexts, by the weights of their tokens; those that weigh nothing are
        left out."""
        x = self._by_example(x, len(examples), batch).to(self.xx.dtype)
        x = x.masked_fill(weights[..., None] == 0, 0)
        for number, some in by_block(examples, len(self.xx)):
            rows, w = x[some].flatten(0, 1), weights[some].flatten()
            weighted = rows * w[:, None]
            self.weight[number] += w.sum()
            self.x[number] += weighted.sum(0)
            self.xx[number].addmm_(weighted.T, rows)

    def parts(self) -> dict[str, Tensor]:
        """All sums, for the other processes."""
        sums = {"weight": self.weight, "x": self.x, "xx": self.xx, "gg": self.gg}
        return {**sums, "tokens": self.tokens}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Takes the sums of all processes in place of its own."""
        # In memory of their own: what was read from a file may begin anywhere, and products there
        # round otherwise.
        self.weight, self.x, self.xx, self.gg, self.tokens = (
            added(parts, name).to(self.weight.device).clone()
            for name in ("weight", "x", "xx", "gg", "tokens")
        )

    def _by_example(self, x: Tensor, size: int, batch: Any) -> Tensor:
        return by_example(self.bound, rows_of(self.bound, x, batch), size)
