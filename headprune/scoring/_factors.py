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
from headprune.scoring._contexts import by_example
from headprune.scoring._sharing import summed

_SUMS = ("weight", "x", "xx", "gg", "tokens")


class Factors:
    """A site's sums over tokens, by block of examples, in fp64 on its device."""

    def __init__(self, bound: BoundSite, blocks: int) -> None:
        self.bound = bound
        self.width = len(bound.site.heads) * bound.site.value_dim
        dtype, device = wide(next(bound.module.parameters())), device_of(bound.module)
        #: Weights of tokens, ``[blocks]``.
        self.weight = torch.zeros(blocks, dtype=dtype, device=device)
        #: Weighted contexts and their products, ``[blocks, width]`` and ``[blocks, width, width]``.
        self.x = self.weight.new_zeros(blocks, self.width)
        self.xx = self.weight.new_zeros(blocks, self.width, self.width)
        #: Products of slopes, ``[blocks, width, width]``.
        self.gg = torch.zeros_like(self.xx)
        #: Tokens that are no padding.
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)

    def add_slopes(self, examples: range, g: Tensor, batch: Any, here: Tensor | None) -> Tensor:
        """Add the slopes of one target at one run.

        Args:
            examples: Numbers of the batch's examples.
            g: The slopes, as the site read its contexts.
            batch: The batch of the run.
            here: Which tokens are no padding; None where all of them count.

        Returns:
            ``[examples, tokens]``: how much each token weighs.
        """
        g = self._by_example(g, len(examples), batch).to(self.gg.dtype)
        n_examples, n_tokens = g.shape[:2]
        if here is None:
            self.tokens += n_examples * n_tokens
        else:
            # Chosen, not multiplied by 0: attention may leave NaN at padding.
            is_padding = ~here.to(g.device).reshape(n_examples, n_tokens, 1)
            g = g.masked_fill(is_padding, 0)
            self.tokens += here.sum().to(self.tokens.device)
        for number, some in by_block(examples, len(self.gg)):
            rows = g[some].flatten(0, 1)
            self.gg[number].addmm_(rows.T, rows)
        return g.square().sum(-1)

    def add_tokens(self, examples: range, x: Tensor, weights: Tensor, batch: Any) -> None:
        """Add one run's contexts, by the weights of their tokens ``[examples, tokens]``."""
        x = self._by_example(x, len(examples), batch).to(self.xx.dtype)
        # Chosen, not multiplied by 0: attention may leave NaN at padding.
        x = x.masked_fill(weights[..., None] == 0, 0)
        for number, some in by_block(examples, len(self.xx)):
            rows, w = x[some].flatten(0, 1), weights[some].flatten()
            weighted = rows * w[:, None]
            self.weight[number] += w.sum()
            self.x[number] += weighted.sum(0)
            self.xx[number].addmm_(weighted.T, rows)

    def parts(self) -> dict[str, Tensor]:
        """All sums, for the other processes."""
        return {name: getattr(self, name) for name in _SUMS}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Replace the own sums by those of all processes."""
        for name in _SUMS:
            # A copy: tensors of a file may begin anywhere in memory, where products round
            # otherwise.
            setattr(self, name, summed(parts, name).to(self.weight.device).clone())

    def _by_example(self, x: Tensor, size: int, batch: Any) -> Tensor:
        return by_example(self.bound, rows_of(self.bound, x, batch), size)
