"""One option from every class, the most valuable that fits a budget: the multiple-choice knapsack,
solved exactly.

A dynamic programme over the classes, whose states are (cost, value) of what was chosen so far. A
state goes when another one costs no more and is worth no less, or when even the linear relaxation
of the classes that are left cannot lift it to what is known to be possible (Dyer, Kayal, Walsh
1984; Pisinger 1995, "A minimal algorithm for the multiple-choice knapsack problem", section 3). So
the size of the costs does not matter, as it would for a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headprune.core.errors import InvalidValue

Integers = NDArray[np.int64]
_SLACK = 64.0  # of values up to 2^53: more than the rounding of the bound


@dataclass(frozen=True)
class Option:
    """What one choice of a class costs and is worth; the second value decides where the first is
    equal."""

    cost: int
    value: int
    second: int = 0


def best_choice(classes: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """The place of the chosen option in every class; None where no choice fits.

    The sum of the values is the highest that fits, then that of the second values, then the cost is
    the lowest; what is left equal is decided for the option that stands first in its class, in the
    first class that differs.

    Args:
        classes: Options to choose one of, in whole numbers; the values of all classes sum to less
            than 2^53, their second values to less than 2^62.
        limit: The most that the chosen options may cost together.

    Raises:
        InvalidValue: costs beyond 64 bits.

    >>> best_choice([[Option(0, 0), Option(5, 9)], [Option(0, 0), Option(4, 5), Option(6, 8)]], 9)
    [1, 1]
    """
    least = [min(option.cost for option in row) for row in classes]
    rows = [[option.cost - low for option in row] for row, low in zip(classes, least, strict=True)]
    room = limit - sum(least)
    if room < 0:
        return None
    unit = (
        math.gcd(*(cost for row in rows for cost in row)) or 1
    )  # also keeps the sums within 64 bits
    span = sum(max(row) for row in rows) // unit
    if span >= 2**62:
        raise InvalidValue(
            "the costs of a knapsack", "below 2^62 together", span, "Use a budget in a larger unit."
        )
    room = min(room // unit, span)
    arrays = [
        (
            np.array([cost // unit for cost in costs], np.int64),
            np.array([option.value for option in row], np.int64),
            np.array([option.second for option in row], np.int64),
        )
        for costs, row in zip(rows, classes, strict=True)
    ]
    return _solve(arrays, room)


def _solve(classes: list[tuple[Integers, Integers, Integers]], room: int) -> list[int]:
    """The last class first, so that ties are decided by the first."""
    cost, value, second = (np.zeros(1, np.int64) for _ in range(3))
    steps: list[tuple[Integers, Integers]] = []
    for place in reversed(range(len(classes))):
        costs, values, seconds = classes[place]
        came, chose = (
            grid.ravel() for grid in np.divmod(np.arange(len(cost) * len(costs)), len(costs))
        )
        cost, value, second = (
            cost[came] + costs[chose],
            value[came] + values[chose],
            second[came] + seconds[chose],
        )
        live = np.flatnonzero(cost <= room)
        live = live[_hopeful(cost[live], value[live], classes[:place], room)]
        live = live[undominated(cost[live], value[live], second[live], chose[live])]
        cost, value, second = cost[live], value[live], second[live]
        steps.append((came[live], chose[live]))
    state, chosen = (
        len(cost) - 1,
        [],
    )  # states rise in cost and in worth, so the last one is the best
    for came, chose in reversed(steps):
        chosen.append(int(chose[state]))
        state = int(came[state])
    return chosen


def undominated(cost: Integers, value: Integers, second: Integers, place: Integers) -> Integers:
    """Indices of the states that no other beats at no higher cost, by rising cost; of equals the
    lowest ``place``."""
    worth = np.empty(len(cost), np.int64)  # ranks of (value, second), equals alike
    order = np.lexsort((second, value))
    rises = np.diff(value[order], prepend=-1) != 0
    rises |= np.diff(second[order], prepend=0) != 0
    worth[order] = np.cumsum(rises)
    order = np.lexsort((place, -worth, cost))
    worth = worth[order]
    before = np.concatenate([[-1], np.maximum.accumulate(worth)[:-1]]) if len(worth) else worth
    return order[worth > before]


def _hopeful(
    cost: Integers, value: Integers, rest: list[tuple[Integers, Integers, Integers]], room: int
) -> NDArray[np.bool_]:
    """Which states may still become the best: their bound reaches what some state is known to
    reach."""
    costs, values = _relaxed(rest)
    left = room - cost
    known = value + values[np.searchsorted(costs, left, side="right") - 1]
    bound = value + np.interp(
        left * (1 + 1e-12), costs, values
    )  # costs beyond 2^53 are rounded, so a bit further on
    hopeful: NDArray[np.bool_] = bound + _SLACK >= known.max(initial=0)
    return hopeful


def _relaxed(classes: list[tuple[Integers, Integers, Integers]]) -> tuple[Integers, Integers]:
    """What the classes are worth at most by what they cost together, at the corners of that concave
    function.

    Every corner is a real choice, one option a class; between two of them only the relaxation gets.
    """
    corners = [_hull(costs, values) for costs, values, _ in classes]
    start = sum(int(values[0]) for _, values in corners)
    gains = [
        pair
        for costs, values in corners
        for pair in zip(np.diff(costs), np.diff(values), strict=True)
    ]
    gains.sort(key=lambda gain: -gain[1] / gain[0])
    steps = np.array(gains, np.int64).reshape(-1, 2)
    return np.concatenate([[0], np.cumsum(steps[:, 0])]), start + np.concatenate(
        [[0], np.cumsum(steps[:, 1])]
    )


def _hull(costs: Integers, values: Integers) -> tuple[Integers, Integers]:
    """The corners of the least concave function above one class's options, from the cheapest, as
    far as it rises."""
    corners: list[tuple[int, int]] = []
    for cost, value in sorted(
        zip(costs.tolist(), values.tolist(), strict=True), key=lambda o: (o[0], -o[1])
    ):
        if corners and value <= corners[-1][1]:
            continue
        while len(corners) > 1 and _below(corners[-2], corners[-1], (cost, value)):
            corners.pop()
        corners.append((cost, value))
    found = np.array(corners, np.int64)
    return found[:, 0], found[:, 1]


def _below(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether b lies on or below the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])
