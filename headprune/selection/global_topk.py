"""Removes the least important heads of the whole model first, until the budget is met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headprune.core.errors import InvalidValue
from headprune.core.scores import HeadScores, ScoredUnit
from headprune.selection._base import Position, Problem, Selector
from headprune.selection._budget import best_first, check_min_heads, minimum

Normalise = Literal["none", "l2", "zscore"]


@dataclass(frozen=True)
class GlobalTopk(Selector):
    """Removes the least important heads of the whole model first, until the budget is met.

    Then what was removed comes back, most important first, where the budget still has room for it (units of unlike
    cost): nothing that is gone could have stayed beside what is kept. The order is that of Michel et al. (2019,
    "Are Sixteen Heads Really Better than One?", section 4), whose paper sets no minimum a layer.

    Args:
        min_heads: No site goes below this many heads, rounded up to whole KV groups; one that has fewer keeps those.
        normalise: Makes the scores of different sites comparable first. ``l2`` divides a site's scores by their
            l2 norm (Molchanov et al. 2017; Michel et al. 2019 do it for gradient scores), ``zscore`` subtracts their
            mean and divides by their standard deviation. It changes a lot which layers lose heads.
    """

    min_heads: int = 1
    normalise: Normalise = "none"

    def __post_init__(self) -> None:
        check_min_heads(self.min_heads, "GlobalTopk.min_heads")
        if self.normalise not in ("none", "l2", "zscore"):
            raise InvalidValue("GlobalTopk.normalise", "'none', 'l2' or 'zscore'", repr(self.normalise))

    def keep(self, problem: Problem) -> frozenset[Position]:
        # Removing from the bottom up to the budget and then adding back is the same as filling up from the top
        # onto the minimum: as long a top of the ranking as fits, then whatever else fits.
        ranking = self._ranking(problem.scores)
        keep = set(minimum(problem, ranking, self.min_heads))
        left = problem.limit - problem.cost(keep)
        for unit in ranking:
            position = (unit.site, unit.unit)
            if position not in keep and (cost := problem.cost([position])) <= left:
                keep.add(position)
                left -= cost
        return frozenset(keep)

    def _ranking(self, scores: HeadScores) -> list[ScoredUnit]:
        level = [_comparable(row, self.normalise) for row in scores.values]
        return sorted(best_first(scores), key=lambda u: -level[u.site][u.unit])  # stable: ties stay as they are


def _comparable(row: Sequence[float], normalise: Normalise) -> Sequence[float]:
    """The scores of one site on a scale that is comparable between sites."""
    if normalise == "none" or not row:
        return row
    if normalise == "l2":
        norm = _norm(row)
        return [v / norm if norm else 0.0 for v in row]
    mean = math.fsum(row) / len(row)
    off = [v - mean for v in row]
    deviation = _norm(off) / math.sqrt(len(row))
    flat = min(row) == max(row)  # the rounding of the mean is no spread
    return [0.0 if flat else v / deviation for v in off]


def _norm(row: Sequence[float]) -> float:
    """Euclidean norm; fsum, so that the order of the heads does not show in the last digit."""
    scale = max(map(abs, row))
    return scale * math.sqrt(math.fsum((v / scale) ** 2 for v in row)) if scale else 0.0
