"""Keep the heads of the highest total score, or the levels of the lowest price, exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import ClassVar

import numpy as np

from headprune.core.ladders import SiteLadder
from headprune.core.scores import HeadScores
from headprune.selection._base import Position, Problem, Selector, positions_of
from headprune.selection._budget import best_first, check_keeps_a_head, infeasible
from headprune.selection._choice import Option, best_choice, undominated
from headprune.selection._units import in_rank

#: Scores become whole numbers, which add up exactly. All of them sum to less than 2^52; negative
#: ones, which only break ties, sum to less than 2^40, the second value of one head.
_VALUE_BITS, _DEFICIT_BITS = 52, 40


@dataclass(frozen=True)
class Knapsack(Selector):
    """Keep the heads of the highest total score that the budget allows, exactly.

    A multiple-choice knapsack: the classes are the sites, the options are how many heads or neurons
    a site keeps, the best ones. A site's cost may be any function of that number, as measured
    latency is (``Budget(speedup=)``), where a single head has no cost of its own (so does ZipLM:
    Kurtic, Frantar, Alistarh 2023, section 3.2). Where units of one site differ in cost, its
    options are all sets of units that no other set beats.

    With measured prices of levels (``scores.ladders``) the sum of prices is lowest, and scores only
    rank the units of a site. Without them, sums of scores decide. A negative score counts as zero:
    such a head never replaces another, but is kept where there is room. Of equal scores the choice
    with more heads wins, then that with less negative scores, then the cheaper one, then that with
    more heads at earlier sites. Scores are exact to 2^-52 of their sum.

    When: heads cost differently, or the budget is one of speed, where it is the default.
    Cost: no pass over data; below a second for a thousand heads.
    """

    reads_prices: ClassVar[bool] = True

    def keep(self, problem: Problem) -> frozenset[Position]:
        check_keeps_a_head(problem)
        ladders = problem.scores.ladders
        if ladders is None:
            sets_of = partial(_possible_sets, problem, _worth(problem.scores))
        else:
            sets_of = partial(_priced_sets, problem, ladders)
        # 1. One class per site, one option for each set of units that it may keep.
        sets: list[list[_Set]] = []
        for site, states in enumerate(problem.states(ranking(problem.scores))):
            sets.append(sets_of(site, states))
        classes = list(map(_options, sets))
        # 2. One option of every class.
        chosen = best_choice(classes, problem.limit)
        if chosen is None:
            least = 0
            for options in classes:
                least += min(option.cost for option in options)
            raise infeasible(problem, least)
        # 3. Its units.
        pairs = zip(sets, chosen, strict=True)
        return positions_of(site_sets[number].units for site_sets, number in pairs)


#: A unit's worth in whole numbers: its score, and a second value for choices of equal score.
_Worth = dict[Position, tuple[int, int]]


@dataclass(frozen=True)
class _Set:
    """Units of one site that may be kept together, with their cost and value."""

    option: Option
    units: tuple[int, ...]


def _options(sets: Sequence[_Set]) -> list[Option]:
    return [one.option for one in sets]


def _worth(scores: HeadScores) -> _Worth:
    units = list(scores.units())
    scored = np.array([unit.value for unit in units], np.float64)
    values = _integers(np.maximum(scored, 0).tolist(), _VALUE_BITS)
    deficits = _integers(np.maximum(-scored, 0).tolist(), _DEFICIT_BITS)
    worth = {}
    for unit, value, deficit in zip(units, values, deficits, strict=True):
        # More heads first, then less negative scores: a deficit stays below one head.
        second = (len(unit.heads) << _DEFICIT_BITS) - deficit
        worth[unit.site, unit.unit] = value, second
    return worth


def ranking(scores: HeadScores) -> list[Position]:
    """Every unit, the best of a site first; levels keep the order in which they were measured."""
    if scores.ladders is None:
        return best_first(scores)
    ranking = []
    for place, (site, values) in enumerate(zip(scores.sites, scores.values, strict=True)):
        ranking += [(place, unit) for unit in in_rank(site, values)]
    return ranking


def _priced_sets(
    problem: Problem, ladders: Sequence[SiteLadder], site: int, states: dict[int, tuple[int, ...]]
) -> list[_Set]:
    """What one site may keep, by the measured price of each level; see ``_possible_sets``."""
    # All sites have one scale: what the loss rises by where every site keeps nothing.
    most = math.fsum(ladder.rises[0] for ladder in ladders)
    exponent = math.frexp(most)[1]
    sets = []
    for n_kept, units in states.items():
        saved = ladders[site].rises[0] - ladders[site].at(n_kept)
        value = round(math.ldexp(saved, _VALUE_BITS - exponent))
        option = Option(problem.site_cost(site, units), value, n_kept)
        sets.append(_Set(option, units))
    sets.sort(key=lambda one: -problem.heads(site, one.units))
    return [sets[i] for i in sorted(_undominated(sets))]


def _integers(values: list[float], bits: int) -> list[int]:
    """Values as integers that sum to less than 2^bits.

    Their scale is a power of two, so that equal sums stay equal.
    """
    exponent = math.frexp(max(values, default=0.0))[1] + len(values).bit_length()
    return [round(math.ldexp(value, bits - exponent)) for value in values]


def _possible_sets(
    problem: Problem, worth: _Worth, site: int, states: dict[int, tuple[int, ...]]
) -> list[_Set]:
    """What one site may keep, most heads first, without sets that another one beats."""
    settled = problem.must_keep | problem.must_remove
    free = [unit for unit in range(len(problem.costs[site])) if (site, unit) not in settled]
    alike = {(problem.costs[site][unit], problem.heads(site, [unit])) for unit in free}
    if len(alike) < 2 or problem.has_neuron_bundles(site):
        # Of each number of heads, the best ones.
        candidates = list(states.values())
    else:
        candidates = _unlike_sets(problem, site, free, worth)
    sets = []
    for units in candidates:
        value = second = 0
        for unit in units:
            value += worth[site, unit][0]
            second += worth[site, unit][1]
        sets.append(_Set(Option(problem.site_cost(site, units), value, second), units))
    # Ties go to what comes first; the sort is stable.
    sets.sort(key=lambda one: -problem.heads(site, one.units))
    return [sets[i] for i in sorted(_undominated(sets))]


def _unlike_sets(
    problem: Problem, site: int, free: list[int], worth: _Worth
) -> list[tuple[int, ...]]:
    """Sets of units of unlike cost that no other set of as many heads beats."""
    costs = problem.costs[site]
    # The value of forced units is the same in every set, so it decides nothing.
    forced = tuple(sorted(problem.by_site(problem.must_keep)[site]))
    start = _Set(Option(sum(costs[unit] for unit in forced), 0), forced)
    fronts = {problem.heads(site, forced): [start]}  # by number of heads
    # The earlier unit wins a tie, so it is added last and comes first.
    for unit in reversed(free):
        size = problem.heads(site, [unit])
        value, second = worth[site, unit]
        grown: dict[int, list[_Set]] = {}
        for heads, front in fronts.items():
            larger = []
            for one in front:
                option = Option(
                    one.option.cost + costs[unit],
                    one.option.value + value,
                    one.option.second + second,
                )
                larger.append(_Set(option, (unit, *one.units)))
            # Sets with the unit before sets without it.
            grown[heads + size] = larger + grown.get(heads + size, [])
            grown[heads] = grown.get(heads, []) + front
        # Of each number of heads, only sets that none beats can end in the best choice.
        fronts = {}
        for heads, sets in grown.items():
            fronts[heads] = [sets[i] for i in _undominated(sets)]
    lawful: list[tuple[int, ...]] = []
    for heads, front in fronts.items():
        if heads in problem.counts[site]:
            lawful.extend(one.units for one in front)
    return lawful


def _undominated(sets: Sequence[_Set]) -> list[int]:
    """Indices of the sets that no other beats; of equals the first."""
    options = _options(sets)
    # Ranks in place of costs, which may exceed 64 bits.
    costs = sorted({option.cost for option in options})
    rank = dict(zip(costs, count(), strict=False))
    table = np.array([(rank[o.cost], o.value, o.second) for o in options], np.int64)  # [sets, 3]
    ranks, values, seconds = table.T
    live: list[int] = undominated(ranks, values, seconds, np.arange(len(options))).tolist()
    return live
