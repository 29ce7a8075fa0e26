"""Remove the least important heads of the whole model first, until the budget is met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headprune.core.errors import InvalidValue
from headprune.selection._base import Position, Problem, Selector, positions_of
from headprune.selection._budget import best_first, minimum

Normalise = Literal["none", "l2", "zscore"]


@dataclass(frozen=True)
class GlobalTopk(Selector):
    """Remove the least important heads of the whole model first, until the budget is met.

    Then removed units come back, most important first, where the budget still has room (units of
    unlike cost): no removed unit could be kept in addition. The order is that of Michel et al.
    (2019, "Are Sixteen Heads Really Better than One?", section 4), whose paper sets no minimum per
    layer. With ``multiple_of``, that many heads of one site are kept or removed together, by their
    mean importance.

    When: the default, for scores that mean the same at every site, such as a rise of the loss.
    Cost: no pass over data; a sort.

    Args:
        normalise: Makes the scores of different sites comparable first. ``l2`` divides a site's
            scores by their l2 norm (Molchanov et al. 2017; Michel et al. 2019 do it for gradient
            scores), ``zscore`` subtracts their mean and divides by their standard deviation. Which
            layers lose heads depends a lot on it.
    """

    normalise: Normalise = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalise not in ("none", "l2", "zscore"):
            raise InvalidValue(
                "GlobalTopk.normalise", "'none', 'l2' or 'zscore'", repr(self.normalise)
            )

    def scale(self, row: Sequence[float]) -> tuple[float, float]:
        if self.normalise == "none" or not row:
            return 0.0, 1.0
        if self.normalise == "l2":
            return 0.0, _norm(row) or 1.0
        if min(row) == max(row):
            # The rounding of their mean would count as a spread.
            return row[0], 1.0
        mean = math.fsum(row) / len(row)
        return mean, _norm([v - mean for v in row]) / math.sqrt(len(row))

    def keep(self, problem: Problem) -> frozenset[Position]:
        # Removing from the bottom up to the budget and then adding back is the same as filling up
        # from the top onto the minimum: as long a top of the ranking as fits, then whatever else
        # fits.
        levels = []  # scores on a scale that is comparable between sites
        for row in problem.scores.values:
            shift, divisor = self.scale(row)
            levels.append([(value - shift) / divisor for value in row])
        # The sort is stable: equal levels keep the order of the scores.
        ranking = sorted(best_first(problem.scores), key=lambda at: -levels[at[0]][at[1]])
        keep = problem.by_site(minimum(problem, ranking))
        room = problem.limit  # what the budget still allows
        for site, units in enumerate(keep):
            room -= problem.site_cost(site, units)
        for site, block in _blocks(problem, ranking, keep, levels):
            more = keep[site] | block
            cost = problem.site_cost(site, more) - problem.site_cost(site, keep[site])
            if cost <= room and problem.heads(site, more) in problem.counts[site]:
                keep[site] = more
                room -= cost
        return positions_of(keep)


def _blocks(
    problem: Problem,
    ranking: Sequence[Position],
    start: Sequence[set[int]],
    levels: Sequence[Sequence[float]],
) -> list[tuple[int, set[int]]]:
    """The steps by which each site may grow, the most important first.

    A step is a unit, or as many as ``multiple_of`` asks for.
    """
    blocks: list[tuple[float, float, int, int, set[int]]] = []
    for site, states in enumerate(problem.states(ranking)):
        kept = set(start[site])
        before = (-math.inf, -math.inf)
        for state in states.values():
            if kept < set(state):
                block = set(state) - kept
                kept = set(state)
                # By comparable scores; of equals by the scores themselves, then by place.
                key = (-_mean(levels[site], block), -_mean(problem.scores.values[site], block))
                if problem.has_neuron_bundles(site):
                    # A level of more neurons sums to more, and still comes after better ones.
                    key = before = max(before, key)
                blocks.append((*key, site, min(block), block))
    blocks.sort(key=lambda block: block[:-1])
    return [(site, block) for _, _, site, _, block in blocks]


def _mean(row: Sequence[float], units: set[int]) -> float:
    return math.fsum(row[u] for u in units) / len(units)


def _norm(row: Sequence[float]) -> float:
    """Euclidean norm; by `fsum`, the order of the heads does not change its last digit."""
    largest = max(map(abs, row))
    if not largest:
        return 0.0
    # Scaled by the largest value, so that squares neither overflow nor vanish.
    return largest * math.sqrt(math.fsum((v / largest) ** 2 for v in row))
