"""Close calls: units on either side of the cut whose scores do not decide which to keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headprune.selection._base import Position, Problem, Selector

#: The most units that are named on each side.
_NAMED = 1

#: Bounds of tree nodes are widened by this factor: single units decide about the last digit.
_ROUNDING = 1 + 1e-12


@dataclass(frozen=True)
class _Unit:
    """A unit that might change sides.

    Args:
        position: Its place.
        level: Its score as the selector compares it.
        error: The standard error of the level.
        heads: The number of its heads.
        cost: Its cost.
    """

    position: Position
    level: float
    error: float
    heads: int
    cost: int


def close_calls(problem: Problem, selector: Selector, keep: frozenset[Position]) -> tuple[str, ...]:
    """A note on units that other examples might have ordered otherwise; empty without any.

    A kept and a removed unit are a close call if they could change sides (the budget and every rule
    hold afterwards, too) and their scores differ by at most the standard error of the difference,
    the root of the sum of both squares. Without standard errors only equal scores are a close call:
    their place decided. A selector that needs more than scores has none.
    """
    if selector.needs:
        return ()
    kept, removed = _sides(problem, selector, keep)
    swaps = _Swaps(problem, selector, keep)
    close_kept = swaps.close(kept, removed)
    close_removed = swaps.close(removed, kept)
    if not close_kept:
        return ()  # then the other side has none either
    # The note in words.
    verb = "are" if len(close_kept) > 1 else "is"
    if any(unit.error for unit in (*close_kept, *close_removed)):
        why = "their scores differ by no more than their standard error"
    else:
        why = "their scores are equal, so place decides"
    return (
        f"Close call: {_names(problem, close_kept)} {verb} kept,"
        f" {_names(problem, close_removed)} removed; {why}.",
    )


def _sides(
    problem: Problem, selector: Selector, keep: frozenset[Position]
) -> tuple[list[_Unit], list[_Unit]]:
    """Kept units, lowest first, and removed ones, highest first, without those a rule decided."""
    scales = list(map(selector.scale, problem.scores.values))
    settled = problem.must_keep | problem.must_remove
    kept: list[_Unit] = []
    removed: list[_Unit] = []
    for scored in problem.scores.ranked():
        position = (scored.site, scored.unit)
        if position in settled:
            continue
        shift, divisor = scales[scored.site]
        unit = _Unit(
            position=position,
            level=(scored.value - shift) / divisor,
            error=(scored.standard_error or 0.0) / divisor,
            heads=len(scored.heads),
            cost=problem.costs[scored.site][scored.unit],
        )
        side = kept if position in keep else removed
        side.append(unit)
    # Stable: units of equal level stay in the order of their scores.
    kept.sort(key=lambda unit: unit.level)
    removed.sort(key=lambda unit: unit.level)
    return kept, removed[::-1]


@dataclass(frozen=True)
class _Node:
    """Units that are neighbours in the order of their levels, with bounds for all of them.

    Args:
        low, high: The lowest and the highest level.
        error: The largest error.
        price: The least that one of them adds to the cost when it changes sides with a unit of
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

    def distance(self, level: float) -> float:
        """How far a level lies outside the levels of the node; negative inside."""
        return max(self.low - level, level - self.high)


def _leaf(unit: _Unit, price: int | None) -> _Node:
    return _Node(unit.level, unit.level, unit.error, price or 0, unit.position[0], unit=unit)


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
    """One node over all, of logarithmic depth; None over none."""
    while len(nodes) > 1:
        pairs = [_joined(nodes[i], nodes[i + 1]) for i in range(0, len(nodes) - 1, 2)]
        nodes = pairs + nodes[2 * len(pairs) :]
    return nodes[0] if nodes else None


@dataclass(frozen=True)
class _Alike:
    """Units of one site and one side with as many heads and of equal cost, as a tree."""

    example: _Unit
    tree: _Node | None


@dataclass(frozen=True)
class _Side:
    """The units of one side, as trees that are searched for a close call.

    Args:
        widest: The largest error.
        everywhere: Units that a rule allows to change sides with a unit of another site.
        by_site: Units of one site, which change sides under another rule, in groups of like ones.
    """

    widest: float
    everywhere: _Node | None
    by_site: dict[int, list[_Alike]]


class _Swaps:
    """Units that could change sides, without a look at every pair.

    Units of the other side lie in a tree. A part of the tree is skipped where its bounds show that
    none of its units can be a close call.
    """

    def __init__(self, problem: Problem, selector: Selector, keep: frozenset[Position]) -> None:
        self._problem = problem
        self._across = selector.across
        rows = problem.by_site(keep)
        # The number of kept heads of every site.
        self._heads = [problem.heads(site, units) for site, units in enumerate(rows)]
        self._room = problem.limit - problem.cost(keep)  # budget that the plan does not use
        self._keep = keep

    def close(self, units: list[_Unit], others: list[_Unit]) -> list[_Unit]:
        """The units that are a close call with one of the others, which are on the other side."""
        side = self._side(others)
        return [unit for unit in units if self._is_close(unit, side)]

    def _side(self, units: list[_Unit]) -> _Side:
        leaves = []
        # Site, number of heads and cost: units that are alike in these obey the same rule.
        kinds: dict[tuple[int, int, int], list[_Unit]] = {}
        for unit in units:
            price = self._price(unit)
            if self._across and price is not None:
                leaves.append(_leaf(unit, price))
            kind = (unit.position[0], unit.heads, unit.cost)
            kinds.setdefault(kind, []).append(unit)
        by_site: dict[int, list[_Alike]] = {}
        for (site, _, _), alike in kinds.items():
            # Within a site the price is checked once, for the whole group.
            tree = _tree([_leaf(unit, 0) for unit in alike])
            by_site.setdefault(site, []).append(_Alike(alike[0], tree))
        widest = max((unit.error for unit in units), default=0.0)
        return _Side(widest, _tree(leaves), by_site)

    def _is_close(self, unit: _Unit, side: _Side) -> bool:
        """Whether a unit is a close call with one of the other side."""
        site = unit.position[0]
        # 1. With a unit of another site.
        price = self._price(unit)
        if price is not None:
            room = self._room - price
            if self._any_close(unit, side.everywhere, side.widest, room, site):
                return True
        # 2. With a unit of its own site: the rule depends on heads and cost alone.
        for alike in side.by_site.get(site, ()):
            possible = self._possible(*self._pair(unit, alike.example))
            if possible and self._any_close(unit, alike.tree, side.widest):
                return True
        return False

    def _any_close(
        self,
        unit: _Unit,
        tree: _Node | None,
        widest: float,
        room: int | None = None,
        site: int | None = None,
    ) -> bool:
        """Whether a unit is a close call with one in a tree.

        Args:
            unit: The unit.
            tree: Units of the other side.
            widest: The largest error of that side.
            room: The most that the other unit may add to the cost, if given.
            site: A site whose units do not count, if given.
        """
        level = unit.level
        reach = math.hypot(unit.error, widest)
        waiting = [tree] if tree is not None else []
        while waiting:
            node = waiting.pop()
            # 1. Skip what cannot hold a close call.
            if site is not None and node.site == site:
                continue
            if room is not None and node.price > room:
                continue
            if node.distance(level) > math.hypot(unit.error, node.error) * _ROUNDING:
                continue
            # 2. The nearer part goes last onto the stack, so it is searched first.
            if node.unit is None:
                near = sorted(node.parts, key=lambda part: -part.distance(level))
                waiting.extend(near)
            elif self._is_close_call(unit, node.unit, reach):
                return True
        return False

    def _is_close_call(self, unit: _Unit, other: _Unit, reach: float) -> bool:
        if abs(other.level - unit.level) > math.hypot(unit.error, other.error):
            return False
        # Both sums are rounded: a pair at the very edge of the reach is no close call.
        if not unit.level - reach <= other.level <= unit.level + reach:
            return False
        return self._possible(*self._pair(unit, other))

    def _pair(self, unit: _Unit, other: _Unit) -> tuple[_Unit, _Unit]:
        """The kept one of two units, then the removed one."""
        return (unit, other) if unit.position in self._keep else (other, unit)

    def _price(self, unit: _Unit) -> int | None:
        """What a unit adds to the cost of its site when it changes sides alone.

        None where no rule allows that.
        """
        site = unit.position[0]
        sign = -1 if unit.position in self._keep else 1
        heads = self._heads[site] + sign * unit.heads
        if heads not in self._problem.counts[site]:
            return None
        if self._problem.steps is None:
            return sign * unit.cost
        return self._step(site, heads)

    def _step(self, site: int, heads: int) -> int:
        """What another number of heads adds to the cost of a site, by ``Problem.steps``."""
        assert self._problem.steps is not None
        steps = self._problem.steps[site]
        return (steps[heads] or 0) - (steps[self._heads[site]] or 0)

    def _possible(self, kept: _Unit, removed: _Unit) -> bool:
        """Whether budget and rules allow a kept and a removed unit to change sides."""
        old, new = kept.position[0], removed.position[0]
        if old != new and not self._across:
            return False
        # The heads of the sites afterwards: one site, or two.
        heads = {old: self._heads[old] - kept.heads}
        heads[new] = heads.get(new, self._heads[new]) + removed.heads
        for site, count in heads.items():
            if count not in self._problem.counts[site]:
                return False
        if self._problem.steps is None:
            return removed.cost - kept.cost <= self._room
        return sum(self._step(site, count) for site, count in heads.items()) <= self._room


def _names(problem: Problem, units: Sequence[_Unit]) -> str:
    """The first few by name, the rest by number."""
    names = []
    for unit in units[:_NAMED]:
        place, number = unit.position
        site = problem.scores.sites[place]
        names.append(site.words(site.units[number]))
    text = ", ".join(names)
    more = len(units) - _NAMED
    if more > 0:
        text += f" and {more} more"
    return text
