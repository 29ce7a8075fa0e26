"""What every selector keeps to, under every budget: heads that must be kept or removed, multiples,
minima, groups, latency."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

import headprune as hp
from headprune.core.errors import InfeasibleBudget, InvalidValue, UnknownName
from headprune.core.heads import HeadId, HeadMask
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.core.plan import Budget, PruningPlan, SiteBudget
from headprune.core.samples import Samples
from headprune.core.scores import Cost, HeadScores
from headprune.selection import GlobalTopk, Knapsack, Problem, Selector
from headprune.selection._base import Position
from headprune.selection._budget import best_first, minimum, problem_of
from headprune.selection._groups import scores_of_sites
from headprune.selection._units import bundled
from tests.selection_problems import (
    CURRENCIES,
    SELECTORS,
    asked,
    configured,
    fitted,
    make,
    random_scores,
    random_table,
    site,
)

HALF = Budget(keep_heads=0.5)


def table_of(whole: float, **rows: tuple[float | None, ...]) -> LatencyTable:
    """Seconds by site and number of heads."""
    sites = tuple(SiteLatency(name, row) for name, row in rows.items())
    return LatencyTable(whole, sites, 1, 8, "cpu", "float32")


def spent(
    scores: HeadScores, mask: HeadMask, budget: Budget, table: LatencyTable | None
) -> tuple[float, float]:
    """What the plan costs and what it may cost, counted without any of the selectors'
    arithmetic."""
    if budget.kind == "speedup":
        assert table is not None
        return table.predict(mask), table.whole / budget.amount
    if budget.kind == "keep_heads":
        return mask.n_kept, budget.amount * scores.n_heads
    assert scores.costs is not None
    length = scores.costs.length

    def price(cost: Cost) -> float:
        macs = cost.macs_fixed + length * cost.macs_per_token + length**2 * cost.macs_per_pair
        prices = {"keep_params": cost.params, "keep_macs": macs, "keep_kv": cost.kv_bytes}
        return prices[budget.kind]

    removed = 0.0
    for s, row in zip(scores.sites, scores.costs.units, strict=True):
        for unit, cost in zip(s.units, row, strict=True):
            if unit[0] not in mask.kept(s.name):
                removed += price(cost)
    whole = price(scores.costs.total)
    return whole - removed, budget.amount * whole


def drawn_rules(
    scores: HeadScores, rng: random.Random
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Heads that must be kept and heads that must be removed, of different units."""
    keep: dict[str, list[int]] = {}
    remove: dict[str, list[int]] = {}
    for s in scores.sites:
        for unit in s.units:
            draw = rng.random()
            chosen = keep if draw < 0.15 else remove if draw > 0.85 else None
            if chosen is not None:
                chosen.setdefault(s.name, []).append(rng.choice(unit))
    return keep, remove


def check_rules(
    scores: HeadScores, mask: HeadMask, keep: Any, remove: Any, min_heads: int, multiple_of: int
) -> None:
    for s in scores.sites:
        kept = set(mask.kept(s.name))
        s.check(kept)
        removed = {h for unit in s.units for h in unit if set(unit) & set(remove.get(s.name, ()))}
        assert set(keep.get(s.name, ())) <= kept
        assert not kept & removed
        assert len(kept) % multiple_of == 0 or len(kept) == len(s.heads)
        assert len(kept) >= min(min_heads, len(s.heads) - len(removed))


@pytest.mark.parametrize("kind", CURRENCIES)
@pytest.mark.parametrize("name", SELECTORS)
def test_no_selector_ever_exceeds_a_budget_or_breaks_a_rule(name: str, kind: str) -> None:
    met = refused = 0
    for seed in range(24):
        rng = random.Random(seed)
        scores = random_scores(seed, dear=seed % 2 == 1, lowest=-1 if seed % 3 else 0)
        scores, extra = fitted(name, scores)
        table = random_table(scores, seed, noise=seed % 4) if kind == "speedup" else None
        keep, remove = drawn_rules(scores, rng) if seed % 3 else ({}, {})
        rules = {"min_heads": rng.randint(0, 3), "multiple_of": rng.choice([1, 1, 2, 3])}
        budget = asked(kind, rng.uniform(0.6, 0.95))
        arguments = {**extra, "must_keep": keep, "must_remove": remove, "latency": table}
        try:
            plan = hp.select(scores, budget, configured(name, **rules), **arguments)
        except (InfeasibleBudget, InvalidValue) as error:
            if not isinstance(error, InfeasibleBudget) and "the kept heads of" not in error.where:
                raise
            refused += 1
            continue
        met += 1
        cost, allowed = spent(scores, plan.mask, budget, table)
        assert cost <= allowed * (1 + 1e-9) + 1e-8
        check_rules(scores, plan.mask, keep, remove, **rules)
        if seed < 8:
            assert plan == hp.select(scores, budget, configured(name, **rules), **arguments)
    assert met >= 8
    assert refused


@pytest.mark.parametrize("name", SELECTORS)
def test_a_speedup_is_met_by_the_table_and_the_nearest_is_named(name: str) -> None:
    for seed in range(6):
        scores, extra = fitted(name, random_scores(seed))
        table = random_table(scores, seed, noise=2.0 * (seed % 2))
        with pytest.raises(InfeasibleBudget, match="at most") as caught:
            hp.select(scores, Budget(speedup=1000), name, latency=table, **extra)
        nearest = float(caught.value.must.removeprefix("at most "))
        plan = hp.select(scores, Budget(speedup=nearest), name, latency=table, **extra)
        assert table.predict(plan.mask) <= table.whole / nearest * (1 + 1e-9)
        assert any("Predicted" in note for note in plan.notes)
        with pytest.raises(InfeasibleBudget):
            hp.select(scores, Budget(speedup=nearest + 3e-6), name, latency=table, **extra)


@pytest.mark.parametrize("name", SELECTORS)
def test_groups_of_sites_keep_to_the_rules_by_themselves(name: str) -> None:
    kinds = {"e0": "self", "e1": "self", "d0": "causal", "x0": "cross"}
    sites = [site(n, 6, kind=kind) for n, kind in kinds.items()]
    rng = random.Random(1)
    values = [[rng.randint(1, 9) for _ in range(6)] for _ in sites]
    scores, extra = fitted(name, make(sites, values))
    table = random_table(scores, 3)
    budgets = {"self": HALF, "d?": Budget(speedup=1.3)}
    keep, remove = {"e0": [5], "d0": [2]}, {"e1": [0], "x0": [1, 2]}
    told = {"must_keep": keep, "must_remove": remove, "latency": table}
    plan = hp.select(scores, budgets, configured(name, multiple_of=2), **told, **extra)
    check_rules(scores, plan.mask, keep, remove, 1, 2)
    assert len(plan.mask.kept("e0")) + len(plan.mask.kept("e1")) <= 6
    assert plan.mask.kept("x0") == (0, 3, 4, 5), "without a budget it loses what it is told to"
    row = table.row("d0")
    assert (row[-1] or 0) / (row[len(plan.mask.kept("d0"))] or 0) >= 1.3
    assert plan.budgets == (SiteBudget("self", HALF), SiteBudget("d?", Budget(speedup=1.3)))
    assert PruningPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", SELECTORS)
def test_naming_one_head_of_a_unit_names_the_unit(name: str) -> None:
    scores, extra = fitted(
        name, make([site("a", 8, 4), site("b", 8, 4)], [[0, 9, 9, 9], [9, 9, 9, 9]])
    )
    plan = hp.select(scores, HALF, name, must_keep={"a": [1]}, must_remove={"b": [2]}, **extra)
    assert {0, 1} <= set(plan.mask.kept("a"))
    assert not {2, 3} & set(plan.mask.kept("b"))
    assert "Kept on request: a[0, 1]." in plan.notes
    assert "Removed on request: b[2, 3]." in plan.notes


def test_named_heads_may_come_from_numpy() -> None:
    scores = make([site("a", 4), site("b", 4)], [[0, 9, 9, 9], [9, 9, 9, 9]])
    plain, arrays = (
        hp.select(scores, HALF, must_keep={"a": kind([0])}, must_remove={"b": kind([2, 3])})
        for kind in (list, np.array)
    )
    assert plain == arrays
    assert 0 in plain.mask.kept("a")


def test_under_balanced_the_named_heads_of_several_groups_share_a_unit() -> None:
    scores = make([site("a", 8, 2, policy="balanced")], [[9, 8, 7, 1, 9, 8, 7, 1]])
    plan = hp.select(scores, HALF, must_keep={"a": [3, 7]}, must_remove={"a": [0, 4]})
    assert plan.mask.kept("a") == (1, 3, 5, 7)
    one = hp.select(scores, Budget(keep_heads=2), must_keep={"a": [3]})
    assert one.mask.kept("a") == (3, 4), "beside head 3 the best of the other group"
    table = table_of(2.0, a=(0.1, None, 0.4, None, 0.6, None, 0.8, None, 1.0))
    fast = hp.select(scores, Budget(speedup=1.25), "knapsack", latency=table)
    assert fast.mask.kept("a") == (0, 1, 4, 5)


@pytest.mark.parametrize(
    ("count", "name", "rules", "kept"),
    [
        (7, "global_topk", {"multiple_of": 2}, [(0, 1), (0, 1, 2, 3)]),
        (4, "global_topk", {"min_heads": 0, "multiple_of": 4}, [(), (0, 1, 2, 3)]),
        (11, "uniform", {"multiple_of": 4}, [(0, 1, 2, 3), (0, 1, 2, 3)]),
        (12, "uniform", {"multiple_of": 4}, [(0, 1, 2, 3, 4, 5)] * 2),
    ],
)
def test_multiples_keep_whole_blocks_the_most_important_first(
    count: int, name: str, rules: Any, kept: Any
) -> None:
    scores = make([site("a", 6), site("b", 6)], [[9, 1, 1, 1, 1, 0], [5, 5, 5, 5, 2, 2]])
    plan = hp.select(scores, Budget(keep_heads=count), configured(name, **rules))
    assert [plan.mask.kept(s) for s in "ab"] == kept


def test_a_plan_says_the_speed_that_the_table_predicts() -> None:
    scores = make([site("a", 4)], [[1, 2, 3, 4]])
    table = table_of(2.0, a=(0.1, 0.3, 0.5, 0.7, 0.9))
    plan = hp.select(scores, Budget(speedup=1.25), latency=table)
    assert plan.mask.kept("a") == (2, 3)
    assert "1600 ms in place of 2000 ms, 1.250 times as fast" in plan.notes[-1]


def test_a_table_must_be_longer_than_its_attention_and_of_every_site() -> None:
    """Also where one site alone has a budget: a plan's prediction is for all sites."""
    scores = make([site("a", 4)], [[1, 2, 3, 4]])
    two = make([site("a", 4), site("b", 4)], [[1, 2, 3, 4]] * 2)
    table = table_of(2.0, a=(0.1, 0.3, 0.5, 0.7, 0.9))
    fast: Any = Budget(speedup=1.1)
    for budget in (fast, {"a": fast}):
        with pytest.raises(InvalidValue, match="take no longer than the whole model, got 900 ms"):
            hp.select(scores, budget, latency=replace(table, whole=0.8))
        with pytest.raises(UnknownName, match="measured at this site, got 'b'"):
            hp.select(two, budget, latency=table)


def test_a_speedup_is_chosen_by_the_knapsack_unless_another_is_named() -> None:
    scores = make([site("a", 2), site("b", 2)], [[5, 5], [4, 4]])
    # The dear site's heads are worth more one by one, but the cheap site's give more for the time.
    table = table_of(3.0, a=(0.0, 1.0, 2.0), b=(0.0, 0.5, 1.0))
    third = Budget(speedup=3.0)
    greedy = hp.select(scores, third, GlobalTopk(min_heads=0), latency=table)
    best = hp.select(scores, third, Knapsack(min_heads=0), latency=table)
    assert (greedy.mask.n_kept, best.mask.n_kept) == (1, 2)
    assert hp.select(scores, Budget(speedup=1.1), latency=table).selector == "knapsack"
    assert hp.select(scores, {"a": Budget(speedup=1.1)}, latency=table).selector == "knapsack"
    assert hp.select(scores, HALF).selector == "global_topk"


@dataclass(frozen=True)
class Asking(Selector):
    """Wants a loss, and looks at the masks of a group beside what other groups keep."""

    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def keep(self, problem: Problem) -> frozenset[Position]:
        keep = frozenset((s, 0) for s in range(len(problem.scores.sites)))
        assert problem.loss is not None
        problem.loss([problem.mask(keep)])
        return keep


def test_a_selector_gets_what_it_needs_and_masks_of_the_whole_model() -> None:
    scores, seen = make([site("a", 3), site("b", 3)], [[1, 2, 3], [1, 2, 3]]), []
    hp.select(scores, {"a": HALF, "b": HALF}, Asking(), loss=seen.extend)
    assert [mask.kept("a") + mask.kept("b") for mask in seen] == [(0, 0, 1, 2), (0, 0)]


def test_what_no_budget_names_keeps_to_multiples_too() -> None:
    sites = [site("a", 5, kind="self"), site("b", 4, kind="cross")]
    scores, twos = make(sites, [[5, 1, 2, 3, 4], [1, 2, 3, 4]]), GlobalTopk(multiple_of=2)
    for removed, kept in (([0], (1, 2, 3, 4)), ([0, 1], (3, 4))):
        plan = hp.select(scores, {"cross": HALF}, twos, must_remove={"a": removed})
        assert plan.mask.kept("a") == kept


def test_where_fewer_heads_are_slower_the_least_are_not_the_cheapest() -> None:
    """Of a, one head takes longer than two; b takes a second without any; what is fixed takes
    another."""
    scores = make([site("a", 3), site("b", 2)], [[1, 2, 3], [1, 2]])
    table = table_of(8.0, a=(2.0, 3.0, 1.0, 4.0), b=(1.0, 2.0, 3.0))
    problem = replace(problem_of(scores, Budget(speedup=8 / 3), table), min_heads=0)
    assert minimum(problem, best_first(scores)) == {(0, 1), (0, 2)}
    for first, nearest in ((2.5, "1.6"), (0.0, "2.285714")):
        table = table_of(8.0, a=(first, 3.0, 3.5, 4.0), b=(1.0, 2.5, 3.0))
        with pytest.raises(
            InfeasibleBudget,
            match=f"at most {nearest}.* With a tighter budget no head or neuron is kept",
        ):
            hp.select(scores, Budget(speedup=3.9), GlobalTopk(min_heads=0), latency=table)


def test_heads_are_bundled_by_rank_first_what_must_be_kept_and_last_what_must_be_removed() -> None:
    sites = [site("a", 6, 2, policy="balanced")]
    scores = make(sites, [[1, 2, 3, 6, 5, 4]])
    assert bundled(scores).sites[0].bundles == ((2, 3), (1, 4), (0, 5))
    keep, remove = frozenset({HeadId("a", 0)}), frozenset({HeadId("a", 3)})
    assert bundled(scores, keep, remove).sites[0].bundles == ((0, 4), (2, 5), (1, 3))


def test_scores_of_a_part_say_what_those_of_all_did() -> None:
    whole = make([site("a", 2), site("b", 3)], [[1, 2], [3, 4, 5]])
    whole = replace(whole, notes=("noted",), samples=Samples.of([[1.0, 2, 3, 4, 5]] * 2))
    found = scores_of_sites(whole, [1])
    assert (found.sites, found.values) == (whole.sites[1:], ((3, 4, 5),))
    assert (found.notes, found.samples) == (("noted",), None)
    assert found.costs is not None
    assert found.costs.total == Cost.sum(found.costs.units[0])
