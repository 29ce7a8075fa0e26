"""Size of a head's activations: the input of the output projection, or the part of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headprune.core.errors import check_one_of
from headprune.core.scores import Bundling
from headprune.scoring._activations import ActivationScorer, Gathers, Magnitudes, of_units


@dataclass(frozen=True)
class ActivationNorm(ActivationScorer):
    """``I_u = |a_u|`` with ``a_j = sqrt(mean_i (mean_t |x_itj|)^2)``: one forward pass, no labels.

    x_itj is channel j of the output projection's input at token t of example i; the norm runs over
    the channels of the unit's heads. With ``of="output"``,
    ``I_u = sqrt(mean_i (mean_t |W_u x_itu|)^2)``, the size of what the unit adds to the layer's
    output: it sees W_O, and channels that cancel.

    Source: Muralidharan et al. 2024, "Compact Language Models via Pruning and Knowledge
    Distillation" (Minitron), section 2.2: absolute values, mean over the sequence, l2 over the
    batch, norm over the head. We take the root of the mean over examples in place of the sum (a
    factor that all heads share) and leave padding out. The standard error is a jackknife over 20
    blocks of examples.

    When: no labels, and time for one forward pass only; it does not see how a head changes the
    loss.

    Args:
        of: ``channels`` (the paper) or ``output``.
    """

    #: A head's score is a norm over its channels, too.
    bundling: ClassVar[Bundling] = "norm"

    of: str = "channels"

    def __post_init__(self) -> None:
        check_one_of("ActivationNorm.of", self.of, ("channels", "output"))

    @property
    def gathers(self) -> Gathers:
        return Magnitudes, self.of

    def site_values(self, statistic: Magnitudes, weights: Tensor) -> Tensor:
        size = statistic.size(weights)  # of channels, or of units
        if self.of == "output":
            return size
        return of_units(statistic.bound, size, Tensor.norm)
