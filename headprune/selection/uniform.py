"""Keeps the same number of heads at every site, the best of each, as many as the budget allows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from headprune.selection._base import Position, Problem, Selector
from headprune.selection._budget import best_first, check_min_heads, minimum


@dataclass(frozen=True)
class Uniform(Selector):
    """Keeps the same number of heads at every site, the best of each, as many as the budget allows.

    Sites of unlike size keep the same share instead: of n units, the whole part of share * n, for the largest share
    that fits. No site is filled up with what one more unit everywhere would overspend.

    Args:
        min_heads: No site goes below this many heads, rounded up to whole KV groups; one that has fewer keeps those.
    """

    min_heads: int = 1

    def __post_init__(self) -> None:
        check_min_heads(self.min_heads, "Uniform.min_heads")

    def keep(self, problem: Problem) -> frozenset[Position]:
        ranking = best_first(problem.scores)
        best = minimum(problem, ranking, self.min_heads)
        sizes = [len(site.units) for site in problem.scores.sites]
        order: list[list[Position]] = [[] for _ in sizes]
        for unit in ranking:
            order[unit.site].append((unit.site, unit.unit))
        for share in sorted({Fraction(k, n) for n in sizes for k in range(1, n + 1)}):
            keep = best.union(*(row[: int(share * len(row))] for row in order))
            if not problem.fits(keep):
                break
            best = keep
        return best
