"""Budgets in numbers: a Problem out of scores and a Budget, and the units that must stay whatever
the budget."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.core.errors import InfeasibleBudget, InvalidValue
from headprune.core.latency import LatencyTable
from headprune.core.plan import Budget, allowance
from headprune.core.scores import Cost, HeadScores, ScoredUnit
from headprune.selection._base import Position, Problem
from headprune.selection._policies import check_cache_budget

_NANO = 10**9


def pose(scores: HeadScores, budget: Budget, latency: LatencyTable | None = None) -> Problem:
    """The budget in whole numbers.

    Raises:
        InvalidValue: the budget needs costs that the scores do not carry, or is over something the
            model has none of. Or a latency table is missing, or not for these sites.
        UnknownName: the latency table lacks a site.
    """
    check_cache_budget(scores.sites, budget)
    if budget.kind == "speedup":
        return _timed(scores, budget, latency)
    if budget.kind == "keep_heads":
        costs = tuple(tuple(len(heads) for heads in site.units) for site in scores.sites)
        total = scores.n_heads
    else:
        if scores.costs is None:
            hint = (
                "Give batches to hp.score: the model's cost is measured on one of them. Or budget"
                " by keep_heads."
            )
            raise InvalidValue(
                f"Budget.{budget.kind}", "used with scores that carry costs", "scores without", hint
            )
        length = budget.length or scores.costs.length
        costs = tuple(
            tuple(_price(c, budget.kind, length) for c in row) for row in scores.costs.units
        )
        total = _price(scores.costs.total, budget.kind, length)
    if total == 0 or (budget.kind == "keep_kv" and not any(map(any, costs))):
        lacks = {
            "keep_heads": "no attention heads left",
            "keep_kv": "no KV cache that shrinks with its heads",
        }
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
    return {"keep_params": cost.params, "keep_macs": cost.macs(length), "keep_kv": cost.kv_bytes}[
        kind
    ]


def _timed(scores: HeadScores, budget: Budget, latency: LatencyTable | None) -> Problem:
    """A budget of time, in nanoseconds: a site costs what it takes with as many heads as it
    keeps."""
    if latency is None:
        hint = (
            "Measure one: hp.bench.latency_table(model, batch). In a recipe, select.speedup does"
            " that."
        )
        raise InvalidValue(
            "select(latency=)", "a LatencyTable, with Budget(speedup=)", "none", hint
        )
    latency.check(scores.sites)
    rows = [latency.row(site.name) for site in scores.sites]
    steps = tuple(tuple(None if s is None else round(s * _NANO) for s in row) for row in rows)
    whole = round(latency.whole * _NANO)
    fixed = whole - sum(row[-1] or 0 for row in steps)
    costs = tuple((0,) * len(site.units) for site in scores.sites)
    return Problem(scores, budget, costs, fixed, allowance(1 / budget.amount, whole) - fixed, steps)


def check_leaves_a_head(problem: Problem) -> None:
    """Refuses a budget under which not one head could stay, though some need not go and no rule
    asks for any.

    Of a group of sites nothing is refused: the rest of the model has heads.

    Raises:
        InfeasibleBudget: with the nearest budget that leaves one.
    """
    if problem.beside is not None or any(0 not in counts for counts in problem.counts):
        return  # and where a rule keeps heads, every selector says what that takes
    cheap = sorted(problem.positions(), key=lambda p: (problem.costs[p[0]][p[1]], p))
    least, more = 0, []
    for site, states in enumerate(problem.states(cheap)):
        prices = {n: problem.site_cost(site, units) for n, units in states.items()}
        cheapest = min(prices, key=lambda n: (prices[n], n))
        if cheapest:
            return  # by this latency table, heads stay because that is faster
        least += prices[cheapest]
        more += [price - prices[cheapest] for n, price in prices.items() if n]
    if more and problem.limit < least + min(more):
        raise infeasible(problem, least + min(more), "Less would not leave one head. ")


def infeasible(problem: Problem, least: int, why: str = "") -> InfeasibleBudget:
    """The error of a budget that cannot be met, naming the nearest that can.

    Args:
        problem: What was asked.
        least: The least that the selector's choices cost, without what is fixed.
        why: What asks for so much, where it is not the rules of the problem.
    """
    budget, needed = problem.budget, problem.fixed + least
    nearest: int | float = needed
    if (
        budget.kind == "speedup"
    ):  # six decimals, rounded so that the number in the message can be used
        nearest = problem.whole * 10**6 // needed / 10**6
    elif isinstance(budget.amount, float):
        nearest = -(-needed * 10**6 // problem.whole) / 10**6
    where, hint = f"Budget.{budget.kind}", why or f"That is what {_rules(problem)}. "
    lower = " or lower min_heads." if problem.min_heads else "."
    if budget.kind != "speedup":
        return InfeasibleBudget(
            where, f"at least {nearest}", budget.amount, f"{hint}Raise the budget{lower}"
        )
    hint += (
        f"Ask for less{lower}" if nearest > 1 else "By this table no cut makes the model faster."
    )
    return InfeasibleBudget(where, f"at most {nearest}", budget.amount, hint)


def _rules(problem: Problem) -> str:
    sites = problem.scores.sites
    rules = [f"min_heads={problem.min_heads}"]
    rules += [f"multiple_of={problem.multiple_of}"] if problem.multiple_of > 1 else []
    rules += ["the heads that must stay"] if problem.stay else []
    said = (
        f"{' and '.join(rules)} {'take' if len(rules) > 1 else 'takes'} at {len(sites)}"
        f" site{'s' * (len(sites) > 1)}"
    )
    lonely = sum(site.least > problem.min_heads for site in sites)
    said += f", {lonely} of which cannot run without a head" if lonely else ""
    return said + (" beside the parts that have no heads" if problem.fixed else "")


def best_first(scores: HeadScores) -> list[ScoredUnit]:
    """Units from most to least important; of equals the earlier site, then the earlier head."""
    return scores.ranked()[::-1]


def places(ranking: Sequence[ScoredUnit]) -> list[Position]:
    """Units as positions."""
    return [(unit.site, unit.unit) for unit in ranking]


def minimum(problem: Problem, ranking: Sequence[ScoredUnit]) -> frozenset[Position]:
    """The cheapest of the lawful states of every site that ``Problem.states`` finds: its least
    heads, the best ones.

    (A measured latency may fall where a head is added, so the least heads need not be the
    cheapest.)

    Raises:
        InfeasibleBudget: they cost more than the budget allows, or it leaves not one head; names
            the nearest budget.
    """
    check_leaves_a_head(problem)
    keep: set[Position] = set()
    for site, states in enumerate(problem.states(places(ranking))):
        cheapest = min(states, key=lambda n: (problem.site_cost(site, states[n]), n))
        keep.update((site, unit) for unit in states[cheapest])
    if problem.fits(keep):
        return frozenset(keep)
    raise infeasible(problem, problem.cost(keep))
