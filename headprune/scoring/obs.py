"""Block optimal brain surgeon: the error of a layer's best reconstruction without a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.scoring._activations import (
    ActivationScorer,
    Gathers,
    Products,
    has_unit_per_channel,
    output_weight,
    unit_columns,
)
from headprune.scoring._constant import ConstantWork
from headprune.scoring._inverse import inverted


@dataclass(frozen=True)
class Obs(ActivationScorer, ConstantWork):
    """``rho_u = tr(W_u [(H^-1)_uu]^-1 W_u')`` with ``H = X'X / N + lambda I``: one forward pass, no
    labels.

    X ``[N, width]`` is what the output projection W reads at N tokens, W_u and ``(H^-1)_uu`` are
    the columns of a unit's heads. rho is exactly how much the smallest
    ``mean_t |W x_t - V x_t|^2 + lambda |W - V|^2`` rises from 0 when V may not use the unit: the
    price of a head after the others have been refitted (recovery by least squares).

    Source: Hassibi, Stork 1992, equation (5), for single weights; in blocks Kurtic et al. 2023
    (ZipLM), section 3.1. We take the mean over tokens, so that scores do not grow with the data.
    Each unit is judged alone: two that can replace each other both score low.

    When: no labels, few heads are removed, and the rest is refitted (recovery by ``lstsq``).
    Cost: one forward pass, ``width^2`` multiply-adds per token, ``blocks + 1`` inversions per site;
    ``blocks width^2`` fp64 numbers per site.

    Args:
        ridge: lambda as a share of the mean of the diagonal of ``X'X / N``.
        blocks: Blocks of examples for the standard error (a jackknife); 1 gives none and saves
            memory.
    """

    ridge: float = 1e-2
    blocks: int = 8

    def __post_init__(self) -> None:
        if not self.ridge >= 0:
            raise InvalidValue("Obs.ridge", "a number >= 0", self.ridge)
        if self.blocks < 1:
            raise InvalidValue("Obs.blocks", "a count >= 1", self.blocks)

    @property
    def gathers(self) -> Gathers:
        return Products, self.blocks

    def only_passes(self) -> _ObsPasses:
        return _ObsPasses(self.ridge, self.blocks)

    def site_values(self, statistic: Products, weights: Tensor) -> Tensor:
        products = statistic.mean(weights)  # [width, width], X'X / N
        # Not 0, even where all contexts are.
        added = (self.ridge * products.diagonal().mean()).clamp(min=1e-30)
        identity = torch.eye(len(products), dtype=products.dtype, device=products.device)
        inverse, failed = inverted(products + added * identity)
        weight = output_weight(statistic.bound).to(products)
        if has_unit_per_channel(statistic.bound):
            neurons = weight.square().sum(0) / inverse.diagonal()
            return neurons.masked_fill(failed, torch.nan)
        values = []
        # Failures are collected without reading them, which would wait for an accelerator: a number
        # is missing then, and ``refused`` says why.
        for unit in unit_columns(statistic.bound):
            columns = weight[:, unit]
            block, code = torch.linalg.inv_ex(inverse[unit][:, unit])
            values.append((columns @ block * columns).sum())
            failed = failed | (code != 0)
        return torch.stack(values).masked_fill(failed, torch.nan)

    def refused(self, statistic: Products) -> InvalidValue:
        everything = torch.ones_like(statistic.count)
        if not bool(torch.isfinite(statistic.mean(everything)).all()):
            return super().refused(statistic)
        got = f"{self.ridge} at {statistic.bound.site.name}, with linearly dependent channels"
        return InvalidValue(
            "Obs.ridge", "large enough to invert X'X", got, "Use a larger one, or more data."
        )


class _ObsPasses(Obs):
    """The passes of ``Obs`` without its inverses."""

    def site_values(self, statistic: Products, weights: Tensor) -> Tensor:
        return torch.ones(len(statistic.bound.site.units), dtype=torch.float64)
