"""Learned gates of which exactly k are open: the weights that chose a soft subset of heads."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.gating.stochastic import GateDistribution
from headprune.gating.stochastic import SubsetTopk as Gates
from headprune.scoring._learned import LearnedScorer


@dataclass(frozen=True)
class SubsetTopk(LearnedScorer):
    """``I_h = w_h`` at the minimum of ``mean_i l_i(g)``, gates that sum to k: `steps` forward and
    backward, needs labels.

    ``g_h = sigmoid((w_h + Gumbel noise - v) / T)``, v such that they sum to k, T falling over three
    quarters of the steps; the model's weights are frozen.

    Source: Li et al. 2021, who train the weights as well: for that see ``hp.learned_gates``, which
    has the formula. There is one draw per block of examples.

    When: the number of heads to keep is fixed, and some hundred training steps can be paid.

    Args:
        keep: Heads to keep, k: a share, or a count.
        start: T to begin with.
        end: T in the end.
        gumbel: Whether there is noise.

    Further settings: ``steps``, ``learning_rate``, ``block``, ``seed``, as in ``hard_concrete``.
    The order of the data matters, as far as examples move from one block to another.
    """

    keep: float | int = 0.5
    start: float = 1.0
    end: float = 0.1
    gumbel: bool = True

    def distribution(self) -> GateDistribution:
        falling = max(1, 3 * self.steps // 4)
        return Gates(
            keep=self.keep, steps=falling, start=self.start, end=self.end, gumbel=self.gumbel
        )
