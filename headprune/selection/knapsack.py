"""Keeps the heads of the highest total score that the budget can hold, exactly, in whatever
currency it counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headprune.core.scores import HeadScores
from headprune.selection._base import Position, Problem, Selector
from headprune.selection._budget import best_first, check_leaves_a_head, infeasible, places
from headprune.selection._choice import Option, best_choice, undominated

_VALUE_BITS, _DEFICIT_BITS = 52, 40


@dataclass(frozen=True)
class Knapsack(Selector):
    """Keeps the heads of the highest total score that the budget can hold, exactly, in whatever
    currency it counts.

    Maximises the sum of the kept units' scores subject to the budget: a multiple-choice knapsack,
    whose classes are the sites and whose options are how many heads stay there, the best ones. A
    site's cost may be any function of that number, so this is the selector for measured latency
    (``Budget(speedup=)``), where heads have no price of their own (ZipLM does the same for whole
    layers' speed: Kurtic, Frantar, Alistarh 2023, section 3.2). Where the units of one site cost
    differently, its options are all sets of units that no other set beats.

    A sum of scores is what removal costs only as far as heads do not depend on one another. A
    negative score counts as
    nothing: such a head is never kept at another's expense, but stays where there is room, because
    a budget says what may stay. Of choices of equal score that which keeps more heads wins, then
    that which keeps less negative scores, then the cheaper one, then that which keeps more at
    earlier sites. Scores are exact to 2^-52 of their sum.

    When: heads cost differently, or the budget is one of speed, where it is the default.
    Cost: no pass over data; below a second for a thousand heads.
    """

    def keep(self, problem: Problem) -> frozenset[Position]:
        check_leaves_a_head(problem)
        worth = _worth(problem.scores)
        best = problem.states(places(best_first(problem.scores)))
        sites = [_options(problem, site, states, worth) for site, states in enumerate(best)]
        classes = [[option for option, _ in site] for site in sites]
        chosen = best_choice(classes, problem.limit)
        if chosen is None:
            raise infeasible(problem, sum(min(option.cost for option in row) for row in classes))
        return frozenset(
            (s, u)
            for s, (row, place) in enumerate(zip(sites, chosen, strict=True))
            for u in row[place][1]
        )


#: A unit's worth in whole numbers: its score, and what decides between choices of equal score.
_Worth = dict[Position, tuple[int, int]]


def _worth(scores: HeadScores) -> _Worth:
    units = list(scores.units())
    values = _whole([max(unit.value, 0.0) for unit in units], _VALUE_BITS)
    deficits = _whole([max(-unit.value, 0.0) for unit in units], _DEFICIT_BITS)
    return {
        (unit.site, unit.unit): (value, (len(unit.heads) << _DEFICIT_BITS) - deficit)
        for unit, value, deficit in zip(units, values, deficits, strict=True)
    }


def _whole(values: list[float], bits: int) -> list[int]:
    """Values as whole numbers that sum to less than 2^bits, scaled by a power of two: equal sums
    stay equal."""
    exponent = math.frexp(max(values, default=0.0))[1] + len(values).bit_length()
    return [round(math.ldexp(value, bits - exponent)) for value in values]


def _options(
    problem: Problem, site: int, states: dict[int, tuple[int, ...]], worth: _Worth
) -> list[tuple[Option, tuple[int, ...]]]:
    """What may stay of one site, most heads first, without what another set of its units beats."""
    free = [
        u
        for u in range(len(problem.costs[site]))
        if (site, u) not in problem.must_keep | problem.must_remove
    ]
    alike = {(problem.costs[site][u], problem.heads(site, [u])) for u in free}
    if len(alike) < 2:
        sets: Iterable[tuple[int, ...]] = states.values()
    else:
        sets = _sets(problem, site, free, worth)
    found = []
    for units in sets:
        value, second = map(sum, zip((0, 0), *(worth[site, u] for u in units), strict=True))
        found.append((Option(problem.site_cost(site, units), value, second), units))
    found.sort(key=lambda o: -problem.heads(site, o[1]))  # stable
    live = _undominated([option for option, _ in found])
    return [found[i] for i in sorted(live)]


def _sets(problem: Problem, site: int, free: list[int], worth: _Worth) -> list[tuple[int, ...]]:
    """Sets of unlike units, at every number of heads those that no other set of as many heads
    beats."""
    forced = tuple(u for s, u in sorted(problem.must_keep) if s == site)
    fronts = {
        problem.heads(site, forced): [
            (Option(sum(problem.costs[site][u] for u in forced), 0), forced)
        ]
    }
    for unit in reversed(free):  # the earlier unit wins a tie, so it is asked last and put first
        size, cost, (value, second) = (
            problem.heads(site, [unit]),
            problem.costs[site][unit],
            worth[site, unit],
        )
        grown: dict[int, list[tuple[Option, tuple[int, ...]]]] = {}
        for held, front in fronts.items():
            more = [
                (Option(o.cost + cost, o.value + value, o.second + second), (unit, *units))
                for o, units in front
            ]
            grown.setdefault(held + size, [])[:0] = more
            grown.setdefault(held, []).extend(front)
        fronts = {
            n: [row[i] for i in _undominated([o for o, _ in row])] for n, row in grown.items()
        }
    return [units for n, front in fronts.items() if n in problem.counts[site] for _, units in front]


def _undominated(options: list[Option]) -> list[int]:
    order = {cost: rank for rank, cost in enumerate(sorted({option.cost for option in options}))}
    rows = [
        (order[option.cost], option.value, option.second, place)
        for place, option in enumerate(options)
    ]
    return [int(i) for i in undominated(*np.array(rows, np.int64).T)]
