"""The multiple-choice knapsack, solved exactly: one option of every class within a budget.

A dynamic programme over the classes. A state is (cost, value) of the options chosen so far. A state
is dropped when another one costs no more and is worth no less. It is also dropped when the linear
relaxation of the remaining classes cannot lift it to a value that is known to be possible (Dyer,
Kayal, Walsh 1984; Pisinger 1995, "A minimal algorithm for the multiple-choice knapsack problem",
section 3). So the size of the costs does not matter, as it would for a table over costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from headprune.core.errors import InvalidValue

Integers = NDArray[np.int64]
_Corners = tuple[Integers, Integers]  # costs and values at the corners of a concave function
_SLACK = 64.0  # of values up to 2^53: more than the rounding of the bound
_WIDER = 1 + 1e-12  # costs beyond 2^53 are rounded, so bounds are read a little further on


@dataclass(frozen=True)
class Option:
    """Cost and value of one option; the second value decides between equal values."""

    cost: int
    value: int
    second: int = 0


@dataclass(frozen=True)
class _Options:
    """The options of one class as arrays, [options] each, or the states of some classes."""

    cost: Integers  # whole multiples of a common divisor, from 0
    value: Integers
    second: Integers  # decides between equal values

    def __getitem__(self, index: Integers) -> _Options:
        return _Options(self.cost[index], self.value[index], self.second[index])


def best_choice(classes: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """The index of the chosen option in every class; None where no choice fits.

    The chosen options have the highest sum of values that fits, then the highest sum of second
    values, then the lowest cost. Ties go to the option that comes first in its class, in the first
    class that differs.

    Args:
        classes: Options to choose one of, in whole numbers; the values of all classes sum to less
            than 2^53, their second values to less than 2^62.
        limit: The most that the chosen options may cost together.

    Raises:
        InvalidValue: costs beyond 64 bits.

    >>> best_choice([[Option(0, 0), Option(5, 9)], [Option(0, 0), Option(4, 5), Option(6, 8)]], 9)
    [1, 1]
    """
    # 1. Count costs above the cheapest option of each class.
    extras: list[list[int]] = []
    room = limit
    for options in classes:
        lowest = min(option.cost for option in options)
        extras.append([option.cost - lowest for option in options])
        room -= lowest
    if room < 0:
        return None
    # 2. Count them in their greatest common divisor, which keeps the sums within 64 bits.
    unit = math.gcd(*chain.from_iterable(extras)) or 1
    span = sum(map(max, extras)) // unit
    if span >= 2**62:
        raise InvalidValue(
            "the costs of a knapsack", "below 2^62 together", span, "Use a budget in a larger unit."
        )
    arrays = []
    for options, costs in zip(classes, extras, strict=True):
        arrays.append(
            _Options(
                _integers(cost // unit for cost in costs),
                _integers(option.value for option in options),
                _integers(option.second for option in options),
            )
        )
    return _solve(arrays, min(room // unit, span))


def _integers(numbers: Iterable[int]) -> Integers:
    return np.array(list(numbers), np.int64)


def _solve(classes: list[_Options], room: int) -> list[int]:
    """Extend the states by one class at a time: the last class first, so that the first decides."""
    hulls = list(map(_hull, classes))
    nothing = np.zeros(1, np.int64)
    states = _Options(nothing, nothing, nothing)
    steps: list[tuple[Integers, Integers]] = []
    for place in reversed(range(len(classes))):
        options = classes[place]
        n_options = len(options.cost)
        # Every state with every option: the indices of both, [states * options].
        before, chosen = np.divmod(np.arange(len(states.cost) * n_options), n_options)
        states = _Options(
            states.cost[before] + options.cost[chosen],
            states.value[before] + options.value[chosen],
            states.second[before] + options.second[chosen],
        )
        # Drop states that do not fit, that cannot become the best, or that another one beats.
        live = np.flatnonzero(states.cost <= room)
        live = live[_hopeful(states[live], hulls[:place], room)]
        rest = states[live]
        live = live[undominated(rest.cost, rest.value, rest.second, chosen[live])]
        states = states[live]
        steps.append((before[live], chosen[live]))  # to follow the best state back
    # Costs and values of the states rise, so the last one is the best. Follow it back.
    state = len(states.cost) - 1
    answer = []
    for before, chosen in reversed(steps):
        answer.append(int(chosen[state]))
        state = int(before[state])
    return answer


def undominated(cost: Integers, value: Integers, second: Integers, place: Integers) -> Integers:
    """Indices of the states that no other beats at no higher cost, by rising cost.

    Of equal states the one with the lowest ``place``.
    """
    # 1. Ranks of (value, second), the same for equal pairs.
    worth = np.empty(len(cost), np.int64)
    order = np.lexsort((second, value))
    rises = np.diff(value[order], prepend=-1) != 0
    rises |= np.diff(second[order], prepend=0) != 0
    worth[order] = np.cumsum(rises)
    # 2. By rising cost, a state counts only if it is worth more than all before it.
    order = np.lexsort((place, -worth, cost))
    worth = worth[order]
    if not len(worth):
        return order
    before = np.concatenate([[-1], np.maximum.accumulate(worth)[:-1]])
    return order[worth > before]


def _hopeful(states: _Options, rest: list[_Corners], room: int) -> NDArray[np.bool_]:
    """Which states may become the best: their bound reaches a value that is known to be possible.

    Args:
        states: Of the classes so far.
        rest: The hulls of the classes that follow.
        room: The most that a state may cost.
    """
    costs, values = _relaxed(rest)
    remaining = room - states.cost
    # The best corner that fits is a real choice; the line to the next corner is a bound.
    known = states.value + values[np.searchsorted(costs, remaining, side="right") - 1]
    bound = states.value + np.interp(remaining * _WIDER, costs, values)
    hopeful: NDArray[np.bool_] = bound + _SLACK >= known.max(initial=0)
    return hopeful


def _relaxed(hulls: list[_Corners]) -> _Corners:
    """The highest value of classes by their cost, at the corners of that concave function.

    Every corner is a real choice of one option per class; between two corners the value is that of
    the linear relaxation.
    """
    gains: list[tuple[int, int]] = []
    start = 0
    for costs, values in hulls:
        start += int(values[0])
        gains.extend(zip(np.diff(costs), np.diff(values), strict=True))
    # The steepest gains come first: this order makes the sum concave.
    gains.sort(key=lambda gain: -gain[1] / gain[0])
    steps = np.array([(0, 0), *gains], np.int64)
    costs, values = np.cumsum(steps, axis=0).T
    return costs, start + values


def _hull(options: _Options) -> _Corners:
    """The corners of the least concave function above one class's options, as far as it rises."""
    # By rising cost, of equal costs the highest value first: `lexsort` sorts by its last key.
    order = np.lexsort((-options.value, options.cost))
    corners: list[tuple[int, int]] = []
    for cost, value in zip(
        options.cost[order].tolist(), options.value[order].tolist(), strict=True
    ):
        if corners and value <= corners[-1][1]:
            continue  # costs more for no more value
        while len(corners) > 1 and _below(corners[-2], corners[-1], (cost, value)):
            corners.pop()
        corners.append((cost, value))
    costs, values = np.array(corners, np.int64).T
    return costs, values


def _below(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether b lies on or below the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])
