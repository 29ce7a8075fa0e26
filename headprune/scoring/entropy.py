"""How focused a head is: the entropy of its attention, negated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headprune.scoring._maps import MapScorer


@dataclass(frozen=True)
class Entropy(MapScorer):
    """``I_h = mean_i mean_q sum_k A_qk log A_qk``, minus the entropy in nats: one eager forward
    pass, no labels.

    A is the head's attention map, q runs over the queries that are no padding. Higher is more
    focused, and counts as more important here, as for ``confidence``.
    **A statistic of the map, not importance**: a head may be sharp and of no use (many attend to a
    separator only) or diffuse and needed.

    Source: entropies of heads as in Clark et al. 2019, "What Does BERT Look At?", section 3.4.
    Every example counts the same, whatever its length; a unit of several heads is their mean. Needs
    maps: Transformers' models run eagerly for the pass, our own attention shows its weights, a
    fused kernel is refused.

    When: to study heads, or to repeat results of papers; not to choose which heads to keep.
    """

    def of_rows(self, probabilities: Tensor) -> Tensor:
        negative: Tensor = torch.special.entr(probabilities).sum(-1)
        return -negative
