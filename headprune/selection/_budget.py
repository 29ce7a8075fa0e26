"""Budgets in numbers: a Problem out of scores and a Budget, and the units that must stay whatever the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headprune.core.errors import InfeasibleBudget, InvalidValue
from headprune.core.plan import Budget
from headprune.core.scores import Cost, HeadScores, ScoredUnit
from headprune.selection._base import Position, Problem
from headprune.selection._policies import check_cache_budget


def allowance(amount: int | float, whole: int) -> int:
    """What ``amount`` of ``whole`` comes to, rounded down, forgiving what a float loses in spelling a ratio.

    >>> allowance(0.29, 100), allowance(0.5, 7), allowance(4, 7)
    (29, 3, 4)
    """
    return amount if isinstance(amount, int) else math.floor(amount * whole * (1 + 1e-12) + 1e-9)


def pose(scores: HeadScores, budget: Budget) -> Problem:
    """The budget in whole numbers.

    Raises:
        InvalidValue: the budget needs costs that the scores do not carry, or is over something the model has none of.
    """
    check_cache_budget(scores.sites, budget)
    if budget.kind == "keep_heads":
        costs = tuple(tuple(len(heads) for heads in site.units) for site in scores.sites)
        total = scores.n_heads
    else:
        if scores.costs is None:
            hint = "Give batches to hp.score: the model's cost is measured on one of them. Or budget by keep_heads."
            raise InvalidValue(f"Budget.{budget.kind}", "used with scores that carry costs", "scores without", hint)
        length = budget.length or scores.costs.length
        costs = tuple(tuple(_price(c, budget.kind, length) for c in row) for row in scores.costs.units)
        total = _price(scores.costs.total, budget.kind, length)
    if total == 0 or (budget.kind == "keep_kv" and not any(map(any, costs))):
        lacks = {"keep_heads": "no attention heads left", "keep_kv": "no KV cache that shrinks with its heads"}
        hint = "Budget by keep_heads, keep_params or keep_macs." if budget.kind == "keep_kv" else ""
        raise InvalidValue(
            f"Budget.{budget.kind}",
            "over what the model has",
            f"a model with {lacks.get(budget.kind, 'no such cost')}",
            hint,
        )
    fixed = total - sum(map(sum, costs))
    return Problem(scores, budget, costs, fixed, allowance(budget.amount, total) - fixed)


def _price(cost: Cost, kind: str, length: int) -> int:
    return {"keep_params": cost.params, "keep_macs": cost.macs(length), "keep_kv": cost.kv_bytes}[kind]


def best_first(scores: HeadScores) -> list[ScoredUnit]:
    """Units from most to least important; of equals the earlier site, then the earlier head."""
    return scores.ranked()[::-1]


def check_min_heads(min_heads: int, where: str) -> None:
    """Refuses what is not a count."""
    if not isinstance(min_heads, int) or isinstance(min_heads, bool) or min_heads < 0:
        raise InvalidValue(where, "a count of heads >= 0", repr(min_heads))


def minimum(problem: Problem, ranking: Sequence[ScoredUnit], min_heads: int) -> frozenset[Position]:
    """The best units of every site, just enough of them to hold ``min_heads`` heads, or all that are left there.

    Raises:
        InfeasibleBudget: they cost more than the budget allows; names the smallest budget that allows them.
    """
    held = [0] * len(problem.scores.sites)
    keep: list[Position] = []
    for unit in ranking:
        if held[unit.site] < min_heads:
            held[unit.site] += len(unit.heads)
            keep.append((unit.site, unit.unit))
    if problem.fits(keep):
        return frozenset(keep)
    budget, needed = problem.budget, problem.fixed + problem.cost(keep)
    least: int | float = needed
    if isinstance(budget.amount, float):  # six decimals, rounded up, so that the number in the message can be used
        least = -(-needed * 10**6 // problem.whole) / 10**6
    rest = " beside the parts that have no heads" if problem.fixed else ""
    hint = f"That is what min_heads={min_heads} takes at {len(held)} sites{rest}. Raise the budget or lower min_heads."
    raise InfeasibleBudget(f"Budget.{budget.kind}", f"at least {least}", budget.amount, hint)
