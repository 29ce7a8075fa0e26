"""Close calls: units on either side of the cut whose scores do not say which of them should
stay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headprune.selection._base import Position, Problem, Selector

#: So many units are named on each side.
_NAMED = 3


@dataclass(frozen=True)
class _Unit:
    """A unit that might change places, its score as the selector compares it, and what changing
    places turns on."""

    position: Position
    level: float
    error: float
    heads: int
    cost: int


def close_calls(problem: Problem, selector: Selector, keep: frozenset[Position]) -> tuple[str, ...]:
    """A note where other examples might as well have chosen otherwise; empty where none could, or
    none is known to.

    A unit that stays and one that goes are a close call if they could change places (the budget and
    every rule hold afterwards, too) and their scores differ by no more than the standard error of
    the difference, the root of the sum of both squares. Without standard errors that are equal
    scores, which place decides. A selector that goes by more than scores has none.
    """
    if selector.needs:
        return ()
    stay, go = _sides(problem, selector, keep)
    swaps = _Swaps(problem, selector, keep)
    close = [swaps.close(stay, go), swaps.close(go, stay)]
    if not close[0]:
        return ()
    verbs = ("stays", "stay"), ("goes", "go")
    sides = [
        f"{_names(problem, units)} {verb[len(units) > 1]}"
        for units, verb in zip(close, verbs, strict=True)
    ]
    equal = not any(unit.error for units in close for unit in units)
    why = (
        "their scores are equal, so place decides"
        if equal
        else "their scores differ by no more than standard errors"
    )
    return (f"Close call: {sides[0]} and {sides[1]}; {why}.",)


def _sides(
    problem: Problem, selector: Selector, keep: frozenset[Position]
) -> tuple[list[_Unit], list[_Unit]]:
    """What stays, lowest first, and what goes, highest first, without what was told to."""
    scales = [selector.scale(row) for row in problem.scores.values]
    settled = problem.must_keep | problem.must_remove
    units: tuple[list[_Unit], list[_Unit]] = ([], [])
    for unit in problem.scores.ranked():
        position, (shift, divisor) = (unit.site, unit.unit), scales[unit.site]
        if position not in settled:
            level, error = (unit.value - shift) / divisor, (unit.standard_error or 0.0) / divisor
            cost = problem.costs[unit.site][unit.unit]
            units[position not in keep].append(_Unit(position, level, error, len(unit.heads), cost))
    stay, go = (
        sorted(side, key=lambda u: u.level) for side in units
    )  # stable: ties as they are ranked
    return stay, go[::-1]


@dataclass(frozen=True)
class _Node:
    """Some units that lie next to each other in the order of their levels, and bounds for all of
    them.

    Args:
        low, high: The lowest and the highest level.
        error: The largest error.
        price: The least that one of them adds to the cost when it changes places with a unit of
            another site.
        site: Their site; None where there are several.
        parts: Two nodes that make up this one; none of a single unit.
        unit: The single unit.
    """

    low: float
    high: float
    error: float
    price: int
    site: int | None
    parts: tuple[_Node, ...] = ()
    unit: _Unit | None = None


def _joined(first: _Node, second: _Node) -> _Node:
    return _Node(
        low=min(first.low, second.low),
        high=max(first.high, second.high),
        error=max(first.error, second.error),
        price=min(first.price, second.price),
        site=first.site if first.site == second.site else None,
        parts=(first, second),
    )


def _tree(nodes: list[_Node]) -> _Node | None:
    """One node over all, in as many steps as the number of units has binary digits; None over
    none."""
    while len(nodes) > 1:
        pairs = [_joined(nodes[i], nodes[i + 1]) for i in range(0, len(nodes) - 1, 2)]
        nodes = pairs + nodes[2 * len(pairs) :]
    return nodes[0] if nodes else None


class _Swaps:
    """Which units could change places, found without looking at every pair.

    Units of the other side lie in a tree; what no unit of a part of it can fulfil is seen at that
    part. Units of the same site, which another rule holds for, lie in trees of those with as many
    heads and of equal cost.
    """

    def __init__(self, problem: Problem, selector: Selector, keep: frozenset[Position]) -> None:
        self._problem = problem
        self._across = selector.across
        self._heads = [
            problem.heads(site, units) for site, units in enumerate(problem.by_site(keep))
        ]
        self._left = problem.limit - problem.cost(keep)
        self._keep = keep

    def close(self, units: list[_Unit], others: list[_Unit]) -> list[_Unit]:
        """The units that are a close call with one of the others, which lie on the other side."""
        widest = max((other.error for other in others), default=0.0)
        prices = {unit.position: self._price(unit) for unit in (*units, *others)}
        able = [other for other in others if self._across and prices[other.position] is not None]
        everywhere = _tree([_leaf(other, prices[other.position]) for other in able])
        kinds: dict[tuple[int, int, int], list[_Unit]] = {}
        for other in others:
            kinds.setdefault((other.position[0], other.heads, other.cost), []).append(other)
        here: dict[int, list[tuple[_Unit, _Node | None]]] = {}
        for (site, _, _), alike in kinds.items():
            here.setdefault(site, []).append(
                (alike[0], _tree([_leaf(other, 0) for other in alike]))
            )

        def is_close(unit: _Unit) -> bool:
            site, price = unit.position[0], prices[unit.position]
            room = None if price is None else self._left - price
            if room is not None and self._any(unit, everywhere, widest, room, site):
                return True
            possible = (
                tree for one, tree in here.get(site, ()) if self._possible(*self._pair(unit, one))
            )
            return any(self._any(unit, tree, widest) for tree in possible)

        return [unit for unit in units if is_close(unit)]

    def _any(
        self,
        unit: _Unit,
        tree: _Node | None,
        widest: float,
        room: int | None = None,
        site: int | None = None,
    ) -> bool:
        """Whether one in a tree is a close call with a unit: outside of ``site``, within ``room``,
        if given."""
        level, reach = unit.level, math.hypot(unit.error, widest)
        waiting = [tree] if tree is not None else []
        while waiting:
            node = waiting.pop()
            if (site is not None and node.site == site) or (room is not None and node.price > room):
                continue
            apart = max(node.low - level, level - node.high, 0.0)
            if apart > math.hypot(unit.error, node.error) * (
                1 + 1e-12
            ):  # the last digit is left to the units
                continue
            if node.unit is None:
                waiting.extend(
                    sorted(node.parts, key=lambda part: -max(part.low - level, level - part.high))
                )
                continue
            other = node.unit
            near = abs(other.level - level) <= math.hypot(unit.error, other.error)
            if (
                near
                and self._within(unit, other, reach)
                and self._possible(*self._pair(unit, other))
            ):
                return True
        return False

    def _within(self, unit: _Unit, other: _Unit, reach: float) -> bool:
        """Whether a level is between those that lie ``reach`` from a unit's, as they are
        rounded."""
        sign = 1.0 if unit.position not in self._keep else -1.0
        level = sign * unit.level
        return level - reach <= sign * other.level <= level + reach

    def _pair(self, unit: _Unit, other: _Unit) -> tuple[_Unit, _Unit]:
        """The kept one of two units, then the removed one."""
        return (unit, other) if unit.position in self._keep else (other, unit)

    def _price(self, unit: _Unit) -> int | None:
        """What the cost of its site gains when a unit changes places with one of another site; None
        where no rule allows that."""
        site, kept = unit.position[0], unit.position in self._keep
        heads = self._heads[site] + (-unit.heads if kept else unit.heads)
        if heads not in self._problem.counts[site]:
            return None
        if self._problem.steps is None:
            return -unit.cost if kept else unit.cost
        steps = self._problem.steps[site]
        return (steps[heads] or 0) - (steps[self._heads[site]] or 0)

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
        return (
            sum((steps[s][n] or 0) - (steps[s][self._heads[s]] or 0) for s, n in heads.items())
            <= self._left
        )


def _leaf(unit: _Unit, price: int | None) -> _Node:
    return _Node(unit.level, unit.level, unit.error, price or 0, unit.position[0], unit=unit)


def _names(problem: Problem, units: list[_Unit]) -> str:
    """The first few by name, the rest by number."""
    sites = problem.scores.sites
    named = [
        f"{sites[s].name}{list(sites[s].units[u])}"
        for s, u in (unit.position for unit in units[:_NAMED])
    ]
    more = len(units) - _NAMED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")
