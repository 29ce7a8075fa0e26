"""Slope and curvature together: the loss's rise when a head is removed, to second order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, ScoringProblem
from headprune.scoring._coupling import noted
from headprune.scoring._gradients import GradientScorer, gathered


@dataclass(frozen=True)
class Taylor2(GradientScorer):
    """``I_h = mean_i [-g_ih + 1/2 g_ih^2]``, ``g_ih = dl_i/dm_h`` at gates m = 1: one forward and
    one backward, needs labels.

    The expansion ``L(m_h = 0) - L(1) = -dL/dm_h + 1/2 d2L/dm_h2 - ...`` with the diagonal of the
    empirical Fisher matrix for the second derivative: an estimate of ``leave_one_out`` at the cost
    of ``taylor``. Exact where the loss is quadratic in the gates and its second derivative is the
    Fisher matrix's. Signed: negative where the model is expected to do better without the head.

    Source: the expansion is that of LeCun, Denker, Solla 1989, "Optimal Brain Damage", section 2,
    who drop the slope because they prune at a minimum; a fine-tuned model's gates are at none. The
    Fisher matrix is per example, as in ``fisher``.

    When: labels, and you look for heads whose removal should help.

    The standard error is that of the mean over examples.
    """

    def estimate(self, problem: ScoringProblem) -> Estimate:
        return noted(problem, averaged(gathered(problem, self).rows))

    def of_gradients(self, gradients: Tensor) -> Tensor:
        return gradients.square() / 2 - gradients
