"""Removes the least important heads of the whole model first, until the budget is met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headprune.core.errors import InvalidValue
from headprune.core.scores import ScoredUnit
from headprune.selection._base import Position, Problem, Selector
from headprune.selection._budget import best_first, minimum, places

Normalise = Literal["none", "l2", "zscore"]


@dataclass(frozen=True)
class GlobalTopk(Selector):
    """Removes the least important heads of the whole model first, until the budget is met.

    Then what was removed comes back, most important first, where the budget still has room for it
    (units of unlike cost): nothing that is gone could have stayed beside what is kept. The order is
    that of Michel et al. (2019, "Are Sixteen Heads Really Better than One?", section 4), whose
    paper sets no minimum a layer. With ``multiple_of``, as many heads of one site as that takes go
    or stay together, as important as they are on average.

    When: the default, for scores that mean the same at every site, such as a rise of the loss.
    Cost: no pass over data; a sort.

    Args:
        normalise: Makes the scores of different sites comparable first. ``l2`` divides a site's
            scores by their l2 norm (Molchanov et al. 2017; Michel et al. 2019 do it for gradient
            scores), ``zscore`` subtracts their mean and divides by their standard deviation. It
            changes a lot which layers lose heads.
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
        if min(row) == max(row):  # the rounding of the mean is no spread
            return row[0], 1.0
        mean = math.fsum(row) / len(row)
        return mean, _norm([v - mean for v in row]) / math.sqrt(len(row))

    def keep(self, problem: Problem) -> frozenset[Position]:
        # Removing from the bottom up to the budget and then adding back is the same as filling up
        # from the top
        # onto the minimum: as long a top of the ranking as fits, then whatever else fits.
        level = [_comparable(row, *self.scale(row)) for row in problem.scores.values]
        ranking = sorted(
            best_first(problem.scores), key=lambda u: -level[u.site][u.unit]
        )  # stable: ties stay
        keep = problem.by_site(minimum(problem, ranking))
        left = problem.limit - sum(
            problem.site_cost(site, units) for site, units in enumerate(keep)
        )
        for site, block in _blocks(problem, ranking, keep, level):
            more = keep[site] | block
            cost = problem.site_cost(site, more) - problem.site_cost(site, keep[site])
            if cost <= left and problem.heads(site, more) in problem.counts[site]:
                keep[site], left = more, left - cost
        return frozenset((site, unit) for site, units in enumerate(keep) for unit in units)


def _blocks(
    problem: Problem,
    ranking: Sequence[ScoredUnit],
    start: Sequence[set[int]],
    level: Sequence[Sequence[float]],
) -> list[tuple[int, set[int]]]:
    """What each site may gain, unit by unit or as ``multiple_of`` has it, the most important
    first."""
    blocks: list[tuple[float, float, int, int, set[int]]] = []
    for site, states in enumerate(problem.states(places(ranking))):
        held = set(start[site])
        for state in states.values():
            if held < set(state):
                block = set(state) - held
                held = set(state)
                first, second = (
                    -math.fsum(row[site][u] for u in block) / len(block)
                    for row in (level, problem.scores.values)
                )
                blocks.append((first, second, site, min(block), block))
    return [(site, block) for _, _, site, _, block in sorted(blocks, key=lambda b: b[:-1])]


def _comparable(row: Sequence[float], shift: float, divisor: float) -> Sequence[float]:
    """The scores of one site on a scale that is comparable between sites."""
    return [(v - shift) / divisor for v in row]


def _norm(row: Sequence[float]) -> float:
    """Euclidean norm; fsum, so that the order of the heads does not show in the last digit."""
    scale = max(map(abs, row))
    return scale * math.sqrt(math.fsum((v / scale) ** 2 for v in row)) if scale else 0.0
