"""Budgets in whole numbers: a Problem out of scores and a Budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from headprune.core.errors import InfeasibleBudget, InvalidValue
from headprune.core.heads import AttentionSite
from headprune.core.latency import LatencyTable
from headprune.core.plan import Budget, allowance
from headprune.core.scores import Cost, HeadScores
from headprune.selection._base import Position, Problem, positions_of
from headprune.selection._policies import check_cache_budget

_NANO = 10**9  # nanoseconds per second: latencies become whole numbers
_MILLION = 10**6  # the nearest budgets are named with six decimals


def problem_of(scores: HeadScores, budget: Budget, latency: LatencyTable | None = None) -> Problem:
    """The budget in whole numbers.

    Raises:
        InvalidValue: the budget needs costs that the scores do not carry, or is over something the
            model has none of. Or a latency table is missing, or not for these sites.
        UnknownName: the latency table lacks a site.
    """
    check_cache_budget(scores.sites, budget)
    if budget.kind == "speedup":
        return _speed_problem(scores, budget, latency)
    if budget.kind == "keep_heads":
        costs = tuple(map(_head_counts, scores.sites))
        total = sum(map(sum, costs))
    else:
        costs, total = _prices(scores, budget)
    # Feed-forwards keep all of their 0 heads, so keep_heads=1.0 is met there.
    asks_for_all = isinstance(budget.keep_heads, float) and budget.keep_heads == 1
    if total == 0 and not asks_for_all:
        raise _nothing_to_keep(budget)
    if budget.kind == "keep_kv" and not any(map(any, costs)):
        raise _nothing_to_keep(budget)
    # The parts that no selector can remove: their cost is taken off the limit.
    fixed = total - sum(map(sum, costs))
    return Problem(scores, budget, costs, fixed, allowance(budget.amount, total) - fixed)


def _head_counts(site: AttentionSite) -> tuple[int, ...]:
    """Heads of each unit; a budget of heads does not count neurons."""
    if site.is_feed_forward:
        return (0,) * len(site.units)
    return tuple(map(len, site.units))


def _prices(scores: HeadScores, budget: Budget) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The costs of the units of every site, and that of the whole model, in a budget's currency."""
    if scores.costs is None:
        hint = (
            "Give batches to hp.score: the model's cost is measured on one of them. Or budget"
            " by keep_heads."
        )
        raise InvalidValue(
            f"Budget.{budget.kind}", "used with scores that carry costs", "scores without", hint
        )
    # Attention's MACs depend on the number of tokens: by default that of the measured batch.
    length = budget.length or scores.costs.length

    def price(cost: Cost) -> int:
        if budget.kind == "keep_params":
            return cost.params
        if budget.kind == "keep_macs":
            return cost.macs(length)
        return cost.kv_bytes

    costs = tuple(tuple(map(price, row)) for row in scores.costs.units)
    return costs, price(scores.costs.total)


def _nothing_to_keep(budget: Budget) -> InvalidValue:
    """The error of a budget over something that the model has none of."""
    lacks, hint = "no such cost", ""
    if budget.kind == "keep_heads":
        lacks = "no attention heads at the sites of the budget"
        hint = "For feed-forwards use keep_params, keep_macs or speedup."
    if budget.kind == "keep_kv":
        lacks = "no KV cache that shrinks with its heads"
        hint = "Budget by keep_heads, keep_params or keep_macs."
    return InvalidValue(
        f"Budget.{budget.kind}", "of something that the model has", f"a model with {lacks}", hint
    )


def _speed_problem(scores: HeadScores, budget: Budget, latency: LatencyTable | None) -> Problem:
    """A budget of time, in nanoseconds: a site's cost depends on how many heads it keeps."""
    if latency is None:
        hint = (
            "Measure one: hp.bench.latency_table(model, batch). In a recipe, select.speedup does"
            " that."
        )
        raise InvalidValue(
            "select(latency=)", "a LatencyTable, with Budget(speedup=)", "none", hint
        )
    latency.check(scores.sites)
    whole = round(latency.whole * _NANO)
    fixed = whole
    steps = []
    for site in scores.sites:
        row = tuple(map(_nanoseconds, latency.row(site.name)))
        steps.append(row)
        fixed -= row[-1] or 0
    # No unit has a cost of its own here: `steps` has the costs.
    costs = tuple((0,) * len(site.units) for site in scores.sites)
    limit = allowance(1 / budget.amount, whole) - fixed
    return Problem(scores, budget, costs, fixed, limit, tuple(steps), caveat=latency.caveat)


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * _NANO)


def check_keeps_a_head(problem: Problem) -> None:
    """Refuse a budget under which no head at all could be kept.

    Nothing is refused where all heads must be removed, where a rule asks for heads anyway, or for a
    group of sites: the rest of the model has heads.

    Raises:
        InfeasibleBudget: with the nearest budget that keeps one.
    """
    # Where a rule asks for heads, every selector names what that costs.
    if problem.kept_elsewhere is not None or any(0 not in counts for counts in problem.counts):
        return

    def price(position: Position) -> tuple[int, Position]:
        site, unit = position
        return problem.costs[site][unit], position

    # 1. The cheapest answer of every site, and the cheapest head on top of it.
    cheap = sorted(problem.positions(), key=price)
    least = 0
    extra: list[int] = []  # what keeping some heads of one site adds to the least cost
    for site, states in enumerate(problem.states(cheap)):
        costs = {count: problem.site_cost(site, units) for count, units in states.items()}
        lowest = min(costs.values())
        if costs[0] > lowest:
            return  # by this latency table the site is faster with heads, so it keeps them
        least += lowest
        extra.extend(cost - lowest for count, cost in costs.items() if count)
    # 2. Whether the budget allows it.
    if extra and problem.limit < least + min(extra):
        tighter = "With a tighter budget no head or neuron is kept. "
        raise infeasible(problem, least + min(extra), tighter)


def infeasible(problem: Problem, least: int, why: str = "") -> InfeasibleBudget:
    """The error of a budget that cannot be met, naming the nearest that can.

    Args:
        problem: The problem without an answer.
        least: The least that the selector's choices cost, without `Problem.fixed`.
        why: The reason, where it is not the rules of the problem.
    """
    budget = problem.budget
    needed = problem.fixed + least
    where = f"Budget.{budget.kind}"
    hint = why or f"That is what {_rules(problem)}. "
    lower = " or lower min_heads." if problem.min_heads else "."
    # Rounded to the safe side, so that the number in the message can be used as a budget.
    if budget.kind == "speedup":
        speedup = problem.whole * _MILLION // needed / _MILLION
        if speedup > 1:
            hint += f"Ask for less{lower}"
        else:
            hint += "By this table no cut that is allowed makes the model faster."
        hint += _doubt(problem)
        return InfeasibleBudget(where, f"at most {speedup}", budget.amount, hint)
    nearest: int | float = needed
    if isinstance(budget.amount, float):
        nearest = -(-needed * _MILLION // problem.whole) / _MILLION
    return InfeasibleBudget(
        where, f"at least {nearest}", budget.amount, f"{hint}Raise the budget{lower}"
    )


def _doubt(problem: Problem) -> str:
    """What an error about the limit adds where costs may be wrong."""
    return f" This limit may be wrong: {problem.caveat}" if problem.caveat else ""


def _rules(problem: Problem) -> str:
    """The rules that ask for heads, and where."""
    sites = problem.scores.sites
    rules = [f"min_heads={problem.min_heads}"]
    if problem.multiple_of > 1:
        rules.append(f"multiple_of={problem.multiple_of}")
    if problem.budget.tensor_parallel:
        rules.append(f"tensor_parallel={problem.budget.tensor_parallel}")
    if problem.must_keep:
        rules.append("the heads that must be kept")
    verb = "take" if len(rules) > 1 else "takes"
    plural = "s" if len(sites) > 1 else ""
    text = f"{' and '.join(rules)} {verb} at {len(sites)} site{plural}"
    needy = sum(site.least > problem.min_heads for site in sites)
    if needy:
        text += f", {needy} of which cannot run without a head"
    if problem.fixed:
        text += ", with the parts that cannot be removed"
    return text


def best_first(scores: HeadScores) -> list[Position]:
    """Units from most to least important; of equals the earlier site, then the earlier head."""
    return [(unit.site, unit.unit) for unit in reversed(scores.ranked())]


def minimum(problem: Problem, ranking: Sequence[Position]) -> frozenset[Position]:
    """The cheapest lawful state of every site: its fewest heads, the best ones.

    A measured latency may fall where a head is added, so the fewest heads need not be the cheapest.

    Raises:
        InfeasibleBudget: they cost more than the budget allows, or it allows no head at all; names
            the nearest budget.
    """
    check_keeps_a_head(problem)
    rows: list[tuple[int, ...]] = []
    for site, states in enumerate(problem.states(ranking)):
        # States come with the fewest heads first, so of equal costs `min` takes the fewest.
        rows.append(min(states.values(), key=partial(problem.site_cost, site)))
    keep = positions_of(rows)
    if problem.fits(keep):
        return keep
    raise infeasible(problem, problem.cost(keep))
