"""Keeps the same number of heads at every site, the best of each, as many as the budget allows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from headprune.selection._base import Position, Problem, Selector
from headprune.selection._budget import best_first, infeasible, places


@dataclass(frozen=True)
class Uniform(Selector):
    """Keeps the same number of heads at every site, the best of each, as many as the budget allows.

    Sites of unlike size keep the same share instead: of n units, the whole part of share * n, for
    the largest share that fits and leaves a head; where that is no number of heads that a site may
    have, the next lower one, or else the lowest that it may have. No site is filled up with what
    one more unit everywhere would overspend.

    When: all layers must keep one shape, for example for a checkpoint that loads without headprune;
    or as a baseline.
    Cost: no pass over data; a sort.
    """

    across: ClassVar[bool] = False

    def keep(self, problem: Problem) -> frozenset[Position]:
        rows = problem.states(places(best_first(problem.scores)))
        sizes = [len(site.units) for site in problem.scores.sites]
        shares = [Fraction(0), *sorted({Fraction(k, n) for n in sizes for k in range(1, n + 1)})]
        some = problem.kept_elsewhere is None and any(
            units for row in rows for units in row.values()
        )
        best: frozenset[Position] | None = None
        least: int | None = None
        for share in shares:
            keep = frozenset(
                (s, u) for s, row in enumerate(rows) for u in _at_most(row, int(share * sizes[s]))
            )
            if not keep and some:
                continue
            cost = problem.cost(keep)
            least = cost if least is None else min(least, cost)
            if cost <= problem.limit:
                best = keep
        if best is None:
            raise infeasible(problem, least or 0)
        return best


def _at_most(states: dict[int, tuple[int, ...]], units: int) -> tuple[int, ...]:
    """The largest state of so many units, or the smallest of all."""
    fitting = [state for state in states.values() if len(state) <= units]
    return fitting[-1] if fitting else next(iter(states.values()))
