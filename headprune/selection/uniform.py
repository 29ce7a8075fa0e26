"""Keep the same number of heads at every site, as many as the budget allows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from headprune.selection._base import Position, Problem, Selector, positions_of
from headprune.selection._budget import best_first, infeasible

#: The lawful units of one site by their number of heads, as `Problem.states` gives them.
_States = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Uniform(Selector):
    """Keep the same number of heads at every site, as many as the budget allows.

    The best heads of each site are kept. Sites of unlike size keep the same share instead: of n
    units, the whole part of share * n, for the largest share that fits and keeps a head. Where a
    site may not have that number, it keeps the next lower one, or else the lowest that it may have.
    Budget that cannot pay for one more unit at every site is not used.

    When: all layers must keep one shape, for example for a checkpoint that loads without headprune;
    or as a baseline.
    Cost: no pass over data; a sort.
    """

    across: ClassVar[bool] = False

    def keep(self, problem: Problem) -> frozenset[Position]:
        # Of each site, the best units by number of heads.
        rows = problem.states(best_first(problem.scores))
        sites = problem.scores.sites
        sizes = [len(site.units) for site in sites]
        # An answer without any head counts only where there is no other.
        some_have_heads = any(any(states.values()) for states in rows)
        may_be_empty = problem.kept_elsewhere is not None or not some_have_heads
        best: frozenset[Position] | None = None
        costs = []
        for share in _shares(sizes):
            keep = _with_share(rows, sizes, share)
            if not keep and not may_be_empty:
                continue
            cost = problem.cost(keep)
            costs.append(cost)
            # No break: a measured latency may fall where heads are added.
            if cost <= problem.limit:
                best = keep
        if best is None:
            raise infeasible(problem, min(costs, default=0))
        return best


def _shares(sizes: list[int]) -> list[Fraction]:
    """Every share at which some site keeps a unit more, rising."""
    shares = {Fraction(0)}
    for size in set(sizes):
        shares.update(Fraction(units, size) for units in range(1, size + 1))
    return sorted(shares)


def _with_share(
    rows: tuple[_States, ...], sizes: list[int], share: Fraction
) -> frozenset[Position]:
    """The kept units when every site keeps this share."""
    kept = []
    for states, size in zip(rows, sizes, strict=True):
        kept.append(_at_most(states, int(share * size)))
    return positions_of(kept)


def _at_most(states: _States, units: int) -> tuple[int, ...]:
    """The largest state of at most so many units, or the smallest of all."""
    fitting = [state for state in states.values() if len(state) <= units]
    if not fitting:
        return next(iter(states.values()))
    return fitting[-1]
