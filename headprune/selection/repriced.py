"""Improve a knapsack plan: measure nearby sizes of each site with the other sites cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from headprune.core.errors import check_count
from headprune.selection._base import Position, Problem, positions_of
from headprune.selection._choice import Option, best_choice
from headprune.selection._measured import are_lower, check_margin, measured_losses
from headprune.selection.knapsack import Knapsack, ranking

#: Bits of the whole numbers that gains are rounded to.
_BITS = 40
#: Where the best plan is not better, the choice is made again: each change is charged so many
#: times the mean gain of the best plan's changes, so that fewer sites change.
_CHARGES = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Repriced(Knapsack):
    """Price levels again around the plan, as long as the measured loss falls.

    A ladder's prices are measured with one site cut at a time; with other sites cut, they differ.
    Each round measures the present plan with one site at a nearby level, and the knapsack chooses
    among these levels. The new plan is taken if its measured loss is lower by ``margin`` standard
    errors; if not, plans that change fewer sites are measured.

    The plan's notes give the loss before and after on the rows that decided.

    When: heads and neurons share one budget, and many sites are cut deeply.
    Cost: about ``2 * reach`` measurements per site and round.

    Args:
        rounds: The most rounds.
        reach: How many levels above and below the present one are measured.
        margin: How much lower the loss must be, in standard errors of the differences.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    rounds: int = 3
    reach: int = 1
    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rounds", "reach"):
            check_count(f"Repriced.{name}", getattr(self, name))
        check_margin("Repriced.margin", self.margin)

    def most_plans(self, n_sites: int) -> int:
        """How many plans are measured at most, for so many sites."""
        near = 2 * self.reach * n_sites
        # Of each round: the present plan, nearby levels, the best ones, and those of fewer changes.
        return self.rounds * (2 + near + len(_CHARGES))

    def keep(self, problem: Problem) -> frozenset[Position]:
        chosen = super().keep(problem)
        levels = _Levels(problem, chosen)
        present = levels.present
        n_measured = 0
        first: float | None = None  # the loss of the knapsack's plan
        now = 0.0
        for _ in range(self.rounds):
            # 1. Measure the present plan, and it with one site at a nearby level.
            moves = list(levels.moves(present, self.reach))
            plans = [levels.plan(_moved(present, *move)) for move in moves]
            losses = measured_losses(problem, [levels.plan(present), *plans])
            n_measured += len(losses)
            means = losses.mean(1)
            now = float(means[0])
            if first is None:
                first = now
            gains = dict(zip(moves, (means[0] - means[1:]).tolist(), strict=True))
            # 2. Take the best plan of these levels, if it is measured to be better.
            better = None
            for candidate in _candidates(problem, levels, present, gains):
                plan = levels.plan(candidate)
                # Without any unit it is no plan; of a group of sites, others keep some.
                if not plan and problem.kept_elsewhere is None:
                    continue
                (its_losses,) = measured_losses(problem, [plan])
                n_measured += 1
                pair = np.stack([losses[0], its_losses])  # [present and new plan, examples]
                (is_lower,) = are_lower(pair, self.margin)
                if is_lower:
                    better, now = candidate, float(its_losses.mean())
                    break
            if better is None:
                break
            present = better
        chosen_by = "scores" if problem.scores.ladders is None else "prices of single sites"
        problem.notes.append(
            f"Measured rise above the whole model: {first:.4g} by {chosen_by},"
            f" {now:.4g} after pricing again; {n_measured} plans measured."
        )
        return levels.plan(present)


class _Levels:
    """The units that each site may keep, from the fewest to the most.

    Args:
        problem: With scores and rules.
        chosen: A plan; its units are levels of their sites.
    """

    def __init__(self, problem: Problem, chosen: frozenset[Position]) -> None:
        kept = problem.by_site(chosen)
        self.units: list[list[tuple[int, ...]]] = []
        present = []
        for site, states in enumerate(problem.states(ranking(problem.scores))):
            own = tuple(sorted(kept[site]))
            levels = {**states, problem.heads(site, own): own}
            self.units.append([levels[count] for count in sorted(levels)])
            present.append(self.units[-1].index(own))
        #: Level of each site in the plan that was given.
        self.present = tuple(present)

    def moves(self, present: Sequence[int], reach: int) -> Iterator[tuple[int, int]]:
        """Pairs of a site and a level near its present one."""
        for site, level in enumerate(present):
            for other in range(level - reach, level + reach + 1):
                if other != level and 0 <= other < len(self.units[site]):
                    yield site, other

    def plan(self, chosen: Sequence[int]) -> frozenset[Position]:
        """The units of a level at each site."""
        return positions_of(self.units[site][level] for site, level in enumerate(chosen))


def _moved(present: Sequence[int], site: int, level: int) -> tuple[int, ...]:
    """Levels with one site at another level."""
    return (*present[:site], level, *present[site + 1 :])


def _candidates(
    problem: Problem,
    levels: _Levels,
    present: tuple[int, ...],
    gains: dict[tuple[int, int], float],
) -> Iterator[tuple[int, ...]]:
    """The best levels within the budget by these gains, then those that change fewer sites."""
    # 1. The best levels, whatever the number of changes.
    best = _best(problem, levels, present, gains, 0.0)
    moves = [(site, level) for site, level in enumerate(best) if level != present[site]]
    mean_gain = sum(gains[move] for move in moves) / max(1, len(moves))
    if mean_gain <= 0:
        return
    yield best

    # 2. Charge every change, so that fewer sites change.
    seen = {present, best}
    for charge in _CHARGES:
        found = _best(problem, levels, present, gains, charge * mean_gain)
        if found not in seen:
            seen.add(found)
            yield found


def _best(
    problem: Problem,
    levels: _Levels,
    present: tuple[int, ...],
    gains: dict[tuple[int, int], float],
    charge: float,
) -> tuple[int, ...]:
    """The levels with the highest sum of gains, less a charge per change, within the budget."""
    # The exponent of a bound on the sum of all values, which then has at most `_BITS` bits.
    bound = sum(map(abs, gains.values())) + len(present) * charge
    scale = math.frexp(bound)[1]
    classes, choices = [], []
    for site, level in enumerate(present):
        of_site = [level, *(other for place, other in gains if place == site)]
        values = [0.0, *(gains[site, other] - charge for other in of_site[1:])]
        options = []
        for other, value in zip(of_site, values, strict=True):
            units = levels.units[site][other]
            # Less the site's lowest value: that changes no comparison and keeps values >= 0.
            whole = round(math.ldexp(value - min(values), _BITS - scale))
            distance = abs(other - level)  # of equal plans, the nearer one
            options.append(Option(problem.site_cost(site, units), whole, second=-distance))
        classes.append(options)
        choices.append(of_site)
    chosen = best_choice(classes, problem.limit)
    assert chosen is not None, "the present plan fits"
    return tuple(of_site[number] for of_site, number in zip(choices, chosen, strict=True))
