"""Multiplies every kept head by the factor that brings the stream nearest to the teacher's; needs
no training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headprune.core.errors import check_one_of
from headprune.model.transfers import sent
from headprune.recovery._layerwise import (
    PRECISIONS,
    LayerwiseRecovery,
    Precision,
    WeightChange,
    check_max_bytes,
    check_ridge,
)
from headprune.recovery._least_squares import Normal, solved
from headprune.recovery._targets import Target

INTERCEPTS = ("fold", "drop", "none")


@dataclass(frozen=True)
class HeadRescale(LayerwiseRecovery):
    """Multiplies every kept head by one factor, without training.

    In the order of the network, from the first attention on that lost heads:
    ``min over a, b of  mean_t |T_t - R_t - Σ_h a_h W_h x_{t,h} - b|² + λ |a - 1|²`` with x, R and T
    as in `Lstsq`. The factors a are multiplied into the heads' columns of the output projection.

    Source: mask tuning, Kwon et al. 2022. Their code fits an intercept and drops it:
    ``intercept="drop"``.

    Args:
        intercept: ``fold`` b into the bias; fit it and ``drop`` it; or ``none``.
        ridge: λ as a share of the mean square of what a head writes.
        precision: The type to add up in, ``float64`` or ``float32``.
        max_bytes: Memory for the teacher's streams, and again for layers' outputs. 0 keeps none
            and is slower.

    >>> HeadRescale(intercept="drop").settings["intercept"]
    'drop'
    """

    intercept: Literal["fold", "drop", "none"] = "fold"
    ridge: float = 1e-4
    precision: Precision = "float64"
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        check_ridge("HeadRescale.ridge", self.ridge)
        check_one_of("HeadRescale.intercept", self.intercept, INTERCEPTS)
        check_one_of("HeadRescale.precision", self.precision, PRECISIONS)
        check_max_bytes("HeadRescale.max_bytes", self.max_bytes)

    @property
    def adds_biases(self) -> bool:
        return self.intercept == "fold"

    def fitted_numbers(self, target: Target) -> int:
        """Return the number of factors, one per head; all output channels share them."""
        return len(target.heads)

    def change(self, target: Target, normal: Normal, ridge: float) -> WeightChange:
        heads = target.heads
        if not heads:
            return WeightChange(torch.zeros_like(target.weight.T).to(normal.xx))
        if self.intercept == "none":
            normal = normal.uncentred()
        weight = target.weight.T.to(normal.xx)  # [in, out]
        # Heads are of one width: [heads, width].
        columns = sent(heads, normal.xx.device, torch.long)

        def by_head(x: Tensor) -> Tensor:
            """Add up the rows of each head."""
            return x[columns].sum(1)

        # <W_h x_h, W_k x_k> summed over tokens, from the products of the channels alone.
        between = by_head(by_head(normal.xx * (weight @ weight.T)).T)  # [heads, heads]
        towards = by_head((normal.xe * weight).sum(1, keepdim=True))  # [heads, 1]
        factors, regular = solved(between, towards, ridge)
        change = torch.empty_like(weight)
        change[columns] = factors.unsqueeze(1) * weight[columns]
        if regular:
            return WeightChange(change)
        note = "its heads write multiples of each other; the smallest change of factors was taken."
        return WeightChange(change, note)
