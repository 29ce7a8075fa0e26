"""How much a head's channels vary over tokens, weighted by the output projection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headprune.core.errors import check_one_of
from headprune.core.scores import Bundling
from headprune.model.transfers import in_main_memory
from headprune.scoring._activations import (
    ActivationScorer,
    ChannelMoments,
    Gathers,
    of_units,
    output_weight,
)


@dataclass(frozen=True)
class Fluctuation(ActivationScorer):
    """``S_j = Var(x_j) |W_:,j|^2``, z-scored over the layer's channels, mean over a unit: one
    forward pass, no labels.

    x_j is channel j of the output projection's input over all tokens, W the projection. A channel
    that does not vary can be replaced by its mean at no loss; ``mean_fold`` puts the mean into the
    bias.

    Source: An et al. 2024, "Fluctuation-based Adaptive Structured Pruning" (FLAP), section 3.2
    (WIFV) and 3.3 (standardisation, so that layers can be ranked together). Their running variance
    reads a mean that it has already overwritten and comes out low; ours equals the two-pass
    variance (n - 1), whatever the batches. We take it over single tokens, padding left out. The
    standard error is a jackknife over 20 blocks of examples.

    When: no labels, and recovery is by ``mean_fold``.

    Args:
        normalize: ``zscore`` (the paper), or ``none``.
    """

    #: A head's score is a mean over its channels, too.
    bundling: ClassVar[Bundling] = "mean"

    normalize: str = "zscore"

    def __post_init__(self) -> None:
        check_one_of("Fluctuation.normalize", self.normalize, ("zscore", "none"))

    @property
    def gathers(self) -> Gathers:
        return (ChannelMoments,)

    def site_values(self, statistic: ChannelMoments, weights: Tensor) -> Tensor:
        variance = statistic.variance(weights)  # [heads * width]
        channels = variance * output_weight(statistic.bound).to(variance).square().sum(0)
        if self.normalize == "zscore":
            centred = channels - channels.mean()
            spread = channels.new_zeros(())
            if len(channels) > 1:
                spread = channels.std()
            # Chosen on the device, so that nothing waits for it.
            channels = torch.where(spread == 0, 0, centred / spread)  # NaN stays, to be refused
        return of_units(statistic.bound, channels, Tensor.mean)

    def notes(self, statistics: Iterable[ChannelMoments]) -> tuple[str, ...]:
        of_sites = list(statistics)
        varies = in_main_memory(s.variance(torch.ones_like(s.count)).any() for s in of_sites)
        constant = []
        for statistic, any_varies in zip(of_sites, varies, strict=True):
            if not bool(any_varies):
                constant.append(statistic.bound.site.name)
        if not constant:
            return ()
        names = ", ".join(constant)
        return (f"Nothing varies over the tokens at {names}: all scores there are 0.",)
