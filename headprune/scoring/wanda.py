"""Size of the output projection's weights times the size of their inputs, summed over a head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headprune.scoring._activations import (
    ActivationScorer,
    ChannelMoments,
    Gathers,
    of_units,
    output_weight,
)


@dataclass(frozen=True)
class Wanda(ActivationScorer):
    """``I_u = sum_{j in u} rms(x_j) mean_o |W_oj|``: one forward pass, no labels.

    x_j is channel j of the output projection's input over all tokens, W the projection; the sum
    runs over the channels of the unit's heads.

    Source: Sun et al. 2024, "A Simple and Effective Pruning Approach for Large Language Models"
    (Wanda), section 3, ``|W_oj| |x_j|_2`` for single weights; summed over a structure as in the
    comparison of An et al. 2024 (Wanda-sp). We divide ``|x_j|_2`` by the root of the number of
    tokens, so that scores do not grow with the data, and leave padding out. The standard error is a
    jackknife over 20 blocks of examples.

    When: no labels, as a simple baseline that reads activations.
    """

    @property
    def gathers(self) -> Gathers:
        return (ChannelMoments,)

    def site_values(self, statistic: ChannelMoments, weights: Tensor) -> Tensor:
        size = statistic.mean_square(weights).sqrt()  # [heads * width]
        channels = size * output_weight(statistic.bound).to(size).abs().mean(0)
        return of_units(statistic.bound, channels, Tensor.sum)
