"""Close calls: units on either side of the cut whose scores do not say which of them should stay."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from headprune.selection._base import Position, Problem, Selector

#: So many units are named on each side.
_NAMED = 3


@dataclass(frozen=True)
class _Unit:
    """A unit that might change places, its score as the selector compares it, and what changing places turns on."""

    position: Position
    level: float
    error: float
    heads: int
    cost: int


def close_calls(problem: Problem, selector: Selector, keep: frozenset[Position]) -> tuple[str, ...]:
    """A note where other examples might as well have chosen otherwise; empty where none could, or none is known to.

    A unit that stays and one that goes are a close call if they could change places (the budget and every rule hold
    afterwards, too) and their scores differ by no more than the standard error of the difference, the root of the sum
    of both squares. Without standard errors that are equal scores, which place decides. A selector that goes by more
    than scores has none.
    """
    if selector.needs:
        return ()
    stay, go = _sides(problem, selector, keep)
    swaps = _Swaps(problem, selector, keep)
    close = [[unit for unit in stay if swaps.any(unit, go)], [unit for unit in go if swaps.any(unit, stay)]]
    if not close[0]:
        return ()
    verbs = ("stays", "stay"), ("goes", "go")
    sides = [f"{_names(problem, units)} {verb[len(units) > 1]}" for units, verb in zip(close, verbs, strict=True)]
    equal = not any(unit.error for units in close for unit in units)
    why = "their scores are equal, so place decides" if equal else "their scores differ by no more than standard errors"
    return (f"Close call: {sides[0]} and {sides[1]}; {why}.",)


def _sides(problem: Problem, selector: Selector, keep: frozenset[Position]) -> tuple[list[_Unit], list[_Unit]]:
    """What stays, lowest first, and what goes, highest first, without what was told to."""
    scales = [selector.scale(row) for row in problem.scores.values]
    units: tuple[list[_Unit], list[_Unit]] = ([], [])
    for unit in problem.scores.ranked():
        position, (shift, divisor) = (unit.site, unit.unit), scales[unit.site]
        if position not in problem.stay | problem.go:
            level, error = (unit.value - shift) / divisor, (unit.standard_error or 0.0) / divisor
            cost = problem.costs[unit.site][unit.unit]
            units[position not in keep].append(_Unit(position, level, error, len(unit.heads), cost))
    stay, go = (sorted(side, key=lambda u: u.level) for side in units)  # stable: ties as they are ranked
    return stay, go[::-1]


class _Swaps:
    """Which units could change places, told in constant time a pair."""

    def __init__(self, problem: Problem, selector: Selector, keep: frozenset[Position]) -> None:
        self._problem = problem
        self._across = selector.across
        self._heads = [problem.heads(site, units) for site, units in enumerate(problem.by_site(keep))]
        self._left = problem.limit - problem.cost(keep)
        self._keep = keep

    def any(self, unit: _Unit, others: list[_Unit]) -> bool:
        """Whether one of the others, which lie on the other side and are in order, is a close call with a unit."""
        rising = unit.position not in self._keep  # what stays is in rising order, what goes in falling order
        sign = 1.0 if rising else -1.0

        def key(unit: _Unit) -> float:
            return sign * unit.level

        widest = math.hypot(unit.error, max((other.error for other in others), default=0.0))
        level = key(unit)
        for other in others[bisect_left(others, level - widest, key=key) :]:
            if key(other) > level + widest:
                return False
            if abs(other.level - unit.level) <= math.hypot(unit.error, other.error):
                pair = (other, unit) if rising else (unit, other)
                if self._possible(*pair):
                    return True
        return False

    def _possible(self, out: _Unit, back: _Unit) -> bool:
        """Whether budget and rules allow one kept unit to go and one removed unit to come back."""
        (site, _), (other, _) = out.position, back.position
        heads = {site: self._heads[site] - out.heads}
        heads[other] = heads.get(other, self._heads[other]) + back.heads
        if site != other and not self._across:
            return False
        if any(n not in self._problem.counts[s] for s, n in heads.items()):
            return False
        if self._problem.steps is None:
            return back.cost - out.cost <= self._left
        steps = self._problem.steps
        return sum((steps[s][n] or 0) - (steps[s][self._heads[s]] or 0) for s, n in heads.items()) <= self._left


def _names(problem: Problem, units: list[_Unit]) -> str:
    """The first few by name, the rest by number."""
    sites = problem.scores.sites
    named = [f"{sites[s].name}{list(sites[s].units[u])}" for s, u in (unit.position for unit in units[:_NAMED])]
    more = len(units) - _NAMED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")
