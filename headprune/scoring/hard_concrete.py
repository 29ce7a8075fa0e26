"""Learned gates that close under a penalty on open ones: how open each is after training."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.gating.stochastic import GateDistribution
from headprune.gating.stochastic import HardConcrete as Gates
from headprune.scoring._learned import LearnedScorer


@dataclass(frozen=True)
class HardConcrete(LearnedScorer):
    """``I_h = log a_h`` at the minimum of ``mean_i l_i(g) + penalty(P(g > 0))``: `steps` forward
    and backward, needs labels.

    g_h is a hard concrete gate, whose log-odds of being open grow with log a_h; the model's weights
    are frozen. The scores rank best at about the wanted number of heads: heads that closed early
    differ little.

    Source: Louizos et al. 2018; Voita et al. 2019, who train the weights as well: for that see
    ``hp.learned_gates``, which has the formula and both penalties. There is one draw per block of
    examples.

    When: many heads are removed, and some hundred training steps can be paid: heads are judged
    together.

    Args:
        keep: Heads to keep in expectation: a share, or a count.
        price: What an open head costs, in units of the loss; then ``keep`` is None.
        warmup: Updates in which the target, or the price, is approached.
        temperature: Of the concrete distribution.

    Further settings, of both learned scorers: ``steps``, updates of the gates; ``learning_rate`` of
    Adam; ``block``, examples of an update, in data order, whatever the loader's batch size;
    ``seed`` of the draws. The order of the data matters as far as examples move from one block to
    another.
    """

    keep: float | int | None = 0.5
    price: float | None = None
    warmup: int = 50
    temperature: float = 0.33

    def distribution(self) -> GateDistribution:
        return Gates(
            keep=self.keep, price=self.price, warmup=self.warmup, temperature=self.temperature
        )
