"""The knapsack against every subset, in every currency; its ties, its negative scores, its
speed."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest

import headprune as hp
from headprune.core.errors import InfeasibleBudget, InvalidValue
from headprune.core.ladders import SiteLadder
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.core.plan import Budget
from headprune.core.scores import Cost, HeadScores
from headprune.selection import Knapsack
from headprune.selection._base import Problem
from headprune.selection._choice import Option, best_choice
from headprune.selection._task import SelectionTask
from tests.selection_problems import (
    CURRENCIES,
    asked,
    make,
    random_scores,
    random_table,
    site,
    unit_cost,
)


def positions(scores: HeadScores, plan: hp.PruningPlan) -> frozenset[tuple[int, int]]:
    units = scores.units()
    return frozenset((u.site, u.unit) for u in units if u.heads[0] in plan.mask.kept(u.name))


def worth(problem: Problem, keep: frozenset[tuple[int, int]]) -> tuple[float, int, float, int]:
    """What decides, in its order: positive scores, heads, negative scores, cost."""
    units = [u for u in problem.scores.units() if (u.site, u.unit) in keep]
    positive, negative = sum(max(u.value, 0) for u in units), sum(min(u.value, 0) for u in units)
    return positive, sum(len(u.heads) for u in units), negative, -problem.cost(keep)


def test_costs_beyond_64_bits_are_refused_and_large_units_are_none() -> None:
    wide = [[Option(0, 0), Option(2**61, 5), Option(2**61 + 1, 6)]] * 2
    with pytest.raises(InvalidValue, match=r"costs of a knapsack: must be below 2\^62 together"):
        best_choice(wide, 2**62)
    assert best_choice([[Option(0, 0), Option(2**70, 5), Option(2**71, 6)]] * 2, 2**71) == [1, 1]


def test_a_head_is_kept_where_none_would_be_slower() -> None:
    """By a table that says so, and the nearest budget is not one that would leave a head more."""
    scores, row = make([site("a", 2)], [[1.0, 2.0]]), SiteLatency("a", (0.5, 0.1, 0.4))
    table = LatencyTable(1.0, (row,), 8, 4, "a clock of ours", "float32")
    plan = hp.select(scores, Budget(speedup=1 / 0.7), "knapsack", latency=table)
    assert plan.mask.kept("a") == (1,)
    with pytest.raises(InfeasibleBudget) as caught:
        hp.select(scores, Budget(speedup=2.0), "knapsack", latency=table)
    assert caught.value.must == "at most 1.428571"
    assert "nothing is kept" not in str(caught.value)


@pytest.mark.parametrize("kind", CURRENCIES)
def test_it_is_the_best_of_all_subsets(kind: str) -> None:
    met = 0
    for seed in range(24):
        rng = random.Random(seed)
        scores = random_scores(seed, dear=seed % 2 == 1, lowest=-2)
        if len(list(scores.units())) > 12:
            continue
        table = random_table(scores, seed, noise=2.0 * (seed % 2)) if kind == "speedup" else None
        selector = Knapsack(min_heads=rng.randint(0, 2), multiple_of=rng.choice([1, 1, 2]))
        budget = asked(kind, rng.uniform(0.5, 0.95))
        told = {scores.sites[0].name: scores.sites[0].units[-1][:1]} if seed % 3 == 0 else None
        problem = SelectionTask.of(scores, told, None, None, None, table).problem(budget, selector)
        places = list(problem.positions())
        subsets = (
            frozenset(c)
            for n in range(1, len(places) + 1)
            for c in itertools.combinations(places, n)
        )
        allowed = [keep for keep in subsets if problem.lawful(keep) and problem.fits(keep)]
        if not allowed:
            with pytest.raises(InfeasibleBudget):
                hp.select(scores, budget, selector, must_keep=told, latency=table)
            continue
        met += 1
        keep = positions(scores, hp.select(scores, budget, selector, must_keep=told, latency=table))
        assert keep in allowed
        assert worth(problem, keep) == max(worth(problem, other) for other in allowed)
    assert met >= 8


def test_choices_are_the_best_of_all_choices() -> None:
    """Any costs and values, also such as no site has, against every combination; ties go to what
    stands first."""
    found = 0
    for seed in range(150):
        rng = random.Random(seed)
        top = rng.choice([3, 8, 10**6])

        def option(rng: random.Random = rng, top: int = top) -> Option:
            return Option(rng.randint(0, top), rng.randint(0, 9), rng.randint(-2, 2))

        classes = [[option() for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 5))]
        limit = rng.randint(0, top * len(classes))
        sums = {}
        for choice in itertools.product(*(range(len(row)) for row in classes)):
            chosen = [row[i] for row, i in zip(classes, choice, strict=True)]
            cost = sum(o.cost for o in chosen)
            if cost <= limit:
                sums[choice] = (sum(o.value for o in chosen), sum(o.second for o in chosen), -cost)
        answer = best_choice(classes, limit)
        if not sums:
            assert answer is None
            continue
        best = max(sums.values())
        assert answer is not None
        assert tuple(answer) == min(choice for choice, key in sums.items() if key == best)
        found += 1
    assert found > 75


def test_greedy_by_score_misses_what_two_cheap_heads_are_worth() -> None:
    costs = [[unit_cost(1), unit_cost(1), unit_cost(2)]]
    scores = make([site("a", 3)], [[3, 3, 4]], costs, fixed=Cost(0, 0, 0, 0, 0))
    budget = Budget(keep_params=0.5)
    assert hp.select(scores, budget, "global_topk").mask.kept("a") == (2,)
    assert hp.select(scores, budget, "knapsack").mask.kept("a") == (0, 1)


def test_a_negative_score_counts_as_nothing_and_is_kept_where_there_is_room() -> None:
    scores = make([site("a", 3), site("b", 3)], [[-5, 1, -1], [0, -2, 2]])
    assert hp.select(scores, Budget(keep_heads=5), "knapsack").mask.kept("a") == (1, 2)
    two = hp.select(scores, Budget(keep_heads=2), Knapsack(min_heads=0)).mask
    assert (two.kept("a"), two.kept("b")) == ((1,), (2,))
    three = hp.select(scores, Budget(keep_heads=3), "knapsack").mask
    assert (three.kept("a"), three.kept("b")) == ((1,), (0, 2))
    all_bad = make([site("a", 4)], [[-3, -1, -2, -4]])
    assert hp.select(all_bad, Budget(keep_heads=2), "knapsack").mask.kept("a") == (1, 2)


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300, 7.3e-12])
def test_equal_sums_are_ties_at_every_scale(scale: float) -> None:
    """1 + 2 at one site against 3 at another: more heads win, whatever the scores are multiplied
    with."""
    costs = [[unit_cost(1)] * 2, [unit_cost(2)]]
    scores = make([site("a", 2), site("b", 1)], [[scale, 2 * scale], [3 * scale]], costs)
    plan = hp.select(scores, Budget(keep_params=0.8), Knapsack(min_heads=0))
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1), ())


@pytest.mark.parametrize("kind", CURRENCIES)
def test_24_layers_of_16_heads_take_no_time(kind: str) -> None:
    rng = random.Random(0)
    sites = [site(f"{i:02}", 16) for i in range(24)]
    values = [[rng.expovariate(1.0) for _ in range(16)] for _ in sites]
    prices = [rng.randint(1_000_000, 4_000_000) for _ in sites]
    costs = [[Cost(p, 3, p // 7, p // 900, p // 11)] * 16 for p in prices]
    scores = make(sites, values, costs)
    table = random_table(scores, 0, noise=0.5)
    began = time.process_time()
    given = {"latency": table} if kind == "speedup" else {}
    for share in (0.3, 0.9):
        plan = hp.select(scores, asked(kind, share), Knapsack(min_heads=0), **given)
        assert 0 < plan.mask.n_kept < 384
    assert time.process_time() - began < 2.5


@pytest.mark.parametrize("seed", range(8))
def test_measured_prices_of_levels_are_weighed_against_every_other_choice(seed: int) -> None:
    """Sites of 3 and 4 heads whose rises are measured, against every pair of levels."""
    rng = random.Random(seed)
    counts = (3, 4)
    sites = [site(name, n) for name, n in zip("ab", counts, strict=True)]
    values = [[rng.random() for _ in range(n)] for n in counts]
    ladders = []
    for one, n in zip(sites, counts, strict=True):
        rises = sorted((rng.random() for _ in range(n)), reverse=True)
        ladders.append(SiteLadder(one.name, tuple(range(n + 1)), (*rises, 0.0)))
    scores = replace(make(sites, values), ladders=tuple(ladders))
    for budget in range(1, 7):
        plan = hp.select(scores, Budget(keep_heads=budget), Knapsack(min_heads=0))
        found = [len(row.kept) for row in plan.mask.rows]
        assert sum(found) <= budget
        # The best heads of each site are kept.
        for row, n_kept, worths in zip(plan.mask.rows, found, values, strict=True):
            best = sorted(range(len(worths)), key=worths.__getitem__, reverse=True)[:n_kept]
            assert row.kept == tuple(sorted(best))
        pairs = itertools.product(*(range(n + 1) for n in counts))
        lowest = min(
            ladders[0].rises[a] + ladders[1].rises[b] for a, b in pairs if 0 < a + b <= budget
        )
        rise = sum(ladder.at(n) for ladder, n in zip(ladders, found, strict=True))
        assert rise == pytest.approx(lowest, abs=1e-9)
