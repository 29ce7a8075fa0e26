"""What every selector keeps to, under every budget: heads that must stay or go, multiples, minima,
groups, latency."""

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
from headprune.selection import Problem, Selector, registry
from headprune.selection._base import Position
from headprune.selection._budget import best_first, minimum, pose
from headprune.selection._groups import part
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
BY_SCORES = [name for name in SELECTORS if not registry.get(name).needs]


def spent(
    scores: HeadScores, mask: HeadMask, budget: Budget, table: LatencyTable | None
) -> tuple[float, float]:
    """What the plan costs and what it may cost, counted without any of the selectors'
    arithmetic."""
    if budget.kind == "speedup":
        assert table is not None
        return table.predict(mask), table.whole / budget.amount
    if budget.kind == "keep_heads":
        whole, after = scores.n_heads, mask.n_kept
    else:
        assert scores.costs is not None
        price = {"keep_params": "params", "keep_kv": "kv_bytes"}.get(budget.kind)
        gone = whole = 0
        for cost in [scores.costs.total]:
            whole = getattr(cost, price) if price else cost.macs(scores.costs.length)
        for s, row in zip(scores.sites, scores.costs.units, strict=True):
            for unit, cost in zip(s.units, row, strict=True):
                if unit[0] not in mask.kept(s.name):
                    gone += getattr(cost, price) if price else cost.macs(scores.costs.length)
        after = whole - gone
    return after, budget.amount if isinstance(budget.amount, int) else budget.amount * whole


def drawn_rules(
    scores: HeadScores, rng: random.Random
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Heads that must stay and heads that must go, of different units."""
    stay: dict[str, list[int]] = {}
    go: dict[str, list[int]] = {}
    for s in scores.sites:
        for unit in s.units:
            draw = rng.random()
            chosen = stay if draw < 0.15 else go if draw > 0.85 else None
            if chosen is not None:
                chosen.setdefault(s.name, []).append(rng.choice(unit))
    return stay, go


def check_rules(
    scores: HeadScores, mask: HeadMask, stay: Any, go: Any, min_heads: int, multiple_of: int
) -> None:
    for s in scores.sites:
        kept = set(mask.kept(s.name))
        s.check(kept)
        gone = {h for unit in s.units for h in unit if set(unit) & set(go.get(s.name, ()))}
        assert set(stay.get(s.name, ())) <= kept
        assert not kept & gone
        assert len(kept) % multiple_of == 0 or len(kept) == len(s.heads)
        assert len(kept) >= min(min_heads, len(s.heads) - len(gone))


@pytest.mark.parametrize("kind", CURRENCIES)
@pytest.mark.parametrize("name", SELECTORS)
def test_no_selector_ever_exceeds_a_budget_or_breaks_a_rule(name: str, kind: str) -> None:
    met = refused = 0
    for seed in range(24):
        rng = random.Random(seed)
        scores, extra = fitted(
            name, random_scores(seed, dear=seed % 2 == 1, lowest=-1 if seed % 3 else 0)
        )
        table = random_table(scores, seed, noise=seed % 4) if kind == "speedup" else None
        stay, go = drawn_rules(scores, rng) if seed % 3 else ({}, {})
        rules = {"min_heads": rng.randint(0, 2), "multiple_of": rng.choice([1, 1, 2, 3])}
        budget = asked(kind, rng.uniform(0.6, 0.95))
        arguments = {**extra, "must_keep": stay, "must_remove": go, "latency": table}
        try:
            plan = hp.select(scores, budget, configured(name, **rules), **arguments)
        except InfeasibleBudget:
            refused += 1
            continue
        except InvalidValue as error:
            if "what stays of" not in error.where:
                raise
            refused += 1
            continue
        met += 1
        cost, allowed = spent(scores, plan.mask, budget, table)
        assert cost <= allowed * (1 + 1e-9) + 1e-8
        check_rules(scores, plan.mask, stay, go, **rules)
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
    sites = [
        site("e0", 6, kind="self"),
        site("e1", 6, kind="self"),
        site("d0", 6),
        site("x0", 6, kind="cross"),
    ]
    rng = random.Random(1)
    scores, extra = fitted(
        name, make(sites, [[rng.randint(1, 9) for _ in range(6)] for _ in sites])
    )
    table = random_table(scores, 3)
    budgets = {"self": HALF, "d?": Budget(speedup=1.3)}
    stay, go = {"e0": [5], "d0": [2]}, {"e1": [0], "x0": [1, 2]}
    plan = hp.select(
        scores,
        budgets,
        configured(name, multiple_of=2),
        must_keep=stay,
        must_remove=go,
        latency=table,
        **extra,
    )
    check_rules(scores, plan.mask, stay, go, 1, 2)
    assert len(plan.mask.kept("e0")) + len(plan.mask.kept("e1")) <= 6
    assert plan.mask.kept("x0") == (0, 3, 4, 5), (
        "no budget is for it, so it loses only what must go"
    )
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
    assert "Told to stay: a[0, 1]." in plan.notes
    assert "Told to go: b[2, 3]." in plan.notes


def test_named_heads_may_come_from_numpy() -> None:
    scores = make([site("a", 4), site("b", 4)], [[0, 9, 9, 9], [9, 9, 9, 9]])
    plan = hp.select(
        scores, HALF, must_keep={"a": np.array([0])}, must_remove={"b": np.array([2, 3])}
    )
    assert plan == hp.select(scores, HALF, must_keep={"a": [0]}, must_remove={"b": [2, 3]})
    assert 0 in plan.mask.kept("a")


def test_under_balanced_the_named_heads_of_several_groups_share_a_unit() -> None:
    scores = make([site("a", 8, 2, policy="balanced")], [[9, 8, 7, 1, 9, 8, 7, 1]])
    plan = hp.select(scores, HALF, must_keep={"a": [3, 7]}, must_remove={"a": [0, 4]})
    assert plan.mask.kept("a") == (1, 3, 5, 7)
    one = hp.select(scores, Budget(keep_heads=2), must_keep={"a": [3]})
    assert one.mask.kept("a") == (3, 4), "beside head 3 the best of the other group"
    table = LatencyTable(
        2.0, (SiteLatency("a", (0.1, None, 0.4, None, 0.6, None, 0.8, None, 1.0)),), 1, 1, "x", "y"
    )
    fast = hp.select(scores, Budget(speedup=1.25), "knapsack", latency=table)
    assert fast.mask.kept("a") == (0, 1, 4, 5)


def test_multiples_keep_whole_blocks_the_most_important_first() -> None:
    scores = make([site("a", 6), site("b", 6)], [[9, 1, 1, 1, 1, 0], [5, 5, 5, 5, 2, 2]])
    plan = hp.select(scores, Budget(keep_heads=7), hp.selection.GlobalTopk(multiple_of=2))
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1), (0, 1, 2, 3))
    plan = hp.select(
        scores, Budget(keep_heads=4), hp.selection.GlobalTopk(min_heads=0, multiple_of=4)
    )
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((), (0, 1, 2, 3))
    plan = hp.select(scores, Budget(keep_heads=11), hp.selection.Uniform(multiple_of=4))
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert (
        hp.select(scores, Budget(keep_heads=12), hp.selection.Uniform(multiple_of=4)).mask.n_kept
        == 12
    )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"must_keep": {"c": [0]}},
            UnknownName,
            r"select\(must_keep=\): must be by names of scored sites, got 'c'",
        ),
        (
            {"must_keep": {"a": [4]}},
            UnknownName,
            r"select\(must_keep=\)\['a'\]: .*present heads \[0, 1, 2, 3\], got 4",
        ),
        (
            {"must_remove": {"a": 1}},
            InvalidValue,
            r"must_remove=\)\['a'\]: .* collection of head indices, got 1",
        ),
        (
            {"must_keep": {"a": [True]}},
            InvalidValue,
            r"select\(must_keep=\)\['a'\]: .* head indices, got True",
        ),
        ({"must_keep": {"a": [1, 1, 0, 0]}}, InvalidValue, r"got \[1, 1, 0, 0\], a row of 0 and 1"),
        ({"must_remove": [("a", 1)]}, InvalidValue, r"a mapping from sites' names"),
        (
            {"must_keep": {"a": [0]}, "must_remove": {"a": [0]}},
            InvalidValue,
            r"about different heads, got a\[0\] in both",
        ),
        (
            {"must_keep": {"g": [0]}, "must_remove": {"g": [1]}},
            InvalidValue,
            r"Heads \[0, 1\] stay or go together",
        ),
        (
            {"loss": len},
            InvalidValue,
            r"select\(loss=\): must be left out: selector 'global_topk' does not use it",
        ),
        ({"rescore": len}, InvalidValue, r"select\(rescore=\): must be left out"),
        ({"latency": 3}, InvalidValue, r"select\(latency=\): must be a LatencyTable, got int"),
    ],
)
def test_arguments_that_cannot_be_are_refused_in_words(
    arguments: Any, error: type[Exception], words: str
) -> None:
    scores = make([site("a", 4), site("g", 4, 2)], [[1, 2, 3, 4], [1, 2]])
    with pytest.raises(error, match=words):
        hp.select(scores, HALF, **arguments)


def test_latency_goes_with_a_speedup_and_with_its_sites() -> None:
    scores = make([site("a", 4)], [[1, 2, 3, 4]])
    table = LatencyTable(
        2.0, (SiteLatency("a", (0.1, 0.3, 0.5, 0.7, 0.9)),), 1, 8, "cpu", "float32"
    )
    with pytest.raises(
        InvalidValue, match=r"select\(latency=\): must be given with Budget\(speedup=\) only"
    ):
        hp.select(scores, HALF, latency=table)
    with pytest.raises(
        InvalidValue, match=r"a LatencyTable, with Budget\(speedup=\), got none.*latency_table"
    ):
        hp.select(scores, Budget(speedup=1.1))
    with pytest.raises(UnknownName, match="measured at this site, got 'b'"):
        hp.select(make([site("b", 4)], [[1] * 4]), Budget(speedup=1.1), latency=table)
    with pytest.raises(InvalidValue, match="with the 3 heads of a, got a row for 4 heads"):
        hp.select(
            make([site("a", 4, heads=(0, 1, 2))], [[1] * 3]), Budget(speedup=1.1), latency=table
        )
    plan = hp.select(scores, Budget(speedup=1.25), latency=table)
    assert plan.mask.kept("a") == (2, 3)
    assert "1600 ms in place of 2000 ms, 1.250 times as fast" in plan.notes[-1]
    for budget in (Budget(speedup=1.1), {"a": Budget(speedup=1.1)}):
        with pytest.raises(
            InvalidValue, match=r"a model that takes longer than its attention, got 900 ms"
        ):
            hp.select(scores, budget, latency=replace(table, whole=0.8))
    two = make([site("a", 4), site("b", 4)], [[1, 2, 3, 4]] * 2)
    with pytest.raises(
        UnknownName, match="measured at this site, got 'b'"
    ):  # a plan's prediction is for all sites
        hp.select(two, {"a": Budget(speedup=1.1)}, latency=table)
    flat = replace(table, sites=(SiteLatency("a", (0.9,) * 5),))
    with pytest.raises(InfeasibleBudget, match="no cut makes the model faster"):
        hp.select(scores, Budget(speedup=1.1), latency=flat)


def test_a_speedup_is_chosen_by_the_knapsack_unless_another_is_named() -> None:
    scores = make([site("a", 2), site("b", 2)], [[5, 5], [4, 4]])
    # The dear site's heads are worth more one by one, but the cheap site's give more for the time.
    rows = SiteLatency("a", (0.0, 1.0, 2.0)), SiteLatency("b", (0.0, 0.5, 1.0))
    table = LatencyTable(3.0, rows, 1, 8, "cpu", "float32")
    third = Budget(speedup=3.0)
    greedy = hp.select(scores, third, hp.selection.GlobalTopk(min_heads=0), latency=table)
    best = hp.select(scores, third, hp.selection.Knapsack(min_heads=0), latency=table)
    assert (greedy.mask.n_kept, best.mask.n_kept) == (1, 2)
    assert hp.select(scores, Budget(speedup=1.1), latency=table).selector == "knapsack"
    assert hp.select(scores, {"a": Budget(speedup=1.1)}, latency=table).selector == "knapsack"
    assert hp.select(scores, HALF).selector == "global_topk"


def test_heads_that_leave_no_lawful_number_are_refused() -> None:
    scores = make([site("a", 4)], [[1, 2, 3, 4]])
    with pytest.raises(InvalidValue, match=r"what stays of a: .*multiple_of=3, got 0 to 2 heads"):
        hp.select(scores, HALF, hp.selection.GlobalTopk(multiple_of=3), must_remove={"a": [0, 1]})
    with pytest.raises(InfeasibleBudget, match=r"at least 3, got 2.*the heads that must stay"):
        hp.select(scores, Budget(keep_heads=2), must_keep={"a": [0, 1, 2]})


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
    with pytest.raises(InvalidValue, match=r"select\(loss=\): must be given.*got none"):
        hp.select(scores, HALF, Asking())
    hp.select(scores, {"a": HALF, "b": HALF}, Asking(), loss=seen.extend)
    assert [mask.kept("a") + mask.kept("b") for mask in seen] == [(0, 0, 1, 2), (0, 0)]


@dataclass(frozen=True)
class Lawless(Selector):
    """Keeps what it is told to."""

    answer: tuple[Position, ...] = ()

    def keep(self, problem: Problem) -> frozenset[Position]:
        return frozenset(self.answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (((0, 1),), r"a without heads \[0\], which must stay"),
        (((0, 0), (0, 2)), r"a with heads \[2\], which must go"),
        (((0, 0),), "1 head at a, which may have 2"),
    ],
)
def test_an_outside_selector_that_breaks_a_rule_is_stopped(
    answer: tuple[Position, ...], words: str
) -> None:
    scores = make([site("a", 4)], [[1, 2, 3, 4]])
    with pytest.raises(InvalidValue, match=f"lawful, got {words}"):
        hp.select(
            scores,
            HALF,
            Lawless(answer, multiple_of=2),
            must_keep={"a": [0]},
            must_remove={"a": [2]},
        )


def test_what_no_budget_names_keeps_to_multiples_too() -> None:
    scores = make(
        [site("a", 5, kind="self"), site("b", 4, kind="cross")], [[5, 1, 2, 3, 4], [1, 2, 3, 4]]
    )
    twos = configured("global_topk", multiple_of=2)
    kept = [
        hp.select(scores, {"cross": HALF}, twos, must_remove={"a": gone}).mask.kept("a")
        for gone in ([0], [0, 1])
    ]
    assert kept == [(1, 2, 3, 4), (3, 4)]


def test_where_fewer_heads_are_slower_the_least_are_not_the_cheapest() -> None:
    """Of a, one head takes longer than two; b takes a second without any; what is fixed takes
    another."""
    scores = make([site("a", 3), site("b", 2)], [[1, 2, 3], [1, 2]])
    rows = (SiteLatency("a", (2.0, 3.0, 1.0, 4.0)), SiteLatency("b", (1.0, 2.0, 3.0)))
    table = LatencyTable(8.0, rows, 8, 16, "a clock of ours", "float32")
    problem = replace(pose(scores, Budget(speedup=8 / 3), table), min_heads=0)
    assert minimum(problem, best_first(scores)) == {(0, 1), (0, 2)}
    for row, nearest in ((2.5, "1.6"), (0.0, "2.285714")):
        rows = (SiteLatency("a", (row, 3.0, 3.5, 4.0)), SiteLatency("b", (1.0, 2.5, 3.0)))
        table = LatencyTable(8.0, rows, 8, 16, "a clock of ours", "float32")
        with pytest.raises(
            InfeasibleBudget, match=f"at most {nearest}.*Less would not leave one head"
        ):
            hp.select(
                scores, Budget(speedup=3.9), configured("global_topk", min_heads=0), latency=table
            )


def test_heads_are_bundled_by_rank_those_that_must_stay_first_and_those_that_must_go_last() -> None:
    sites = [site("a", 6, 2, policy="balanced")]
    scores = make(sites, [[1, 2, 3, 6, 5, 4]])
    assert bundled(scores).sites[0].bundles == ((2, 3), (1, 4), (0, 5))
    stay, go = frozenset({HeadId("a", 0)}), frozenset({HeadId("a", 3)})
    assert bundled(scores, stay, go).sites[0].bundles == ((0, 4), (2, 5), (1, 3))


def test_scores_of_a_part_say_what_those_of_all_did() -> None:
    whole = make([site("a", 2), site("b", 3)], [[1, 2], [3, 4, 5]])
    whole = replace(whole, notes=("noted",), samples=Samples.of([[1.0, 2, 3, 4, 5]] * 2))
    found = part(whole, [1])
    assert (found.sites, found.values, found.notes, found.samples) == (
        whole.sites[1:],
        ((3, 4, 5),),
        ("noted",),
        None,
    )
    assert found.costs is not None
    assert found.costs.total == Cost.sum(found.costs.units[0])


@pytest.mark.parametrize("value", [0, -2, 1.5, True])
@pytest.mark.parametrize("name", BY_SCORES)
def test_multiples_are_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"\.multiple_of: must be a count of heads >= 1"):
        configured(name, multiple_of=value)


@pytest.mark.parametrize("value", [1, 1.0, 0.5, True, float("inf"), float("nan"), "2"])
def test_a_speedup_is_above_one(value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"Budget\.speedup: must be a number above 1"):
        Budget(speedup=value)


def test_a_speedup_survives_json_and_reads_well() -> None:
    budget = Budget(speedup=2)
    assert Budget.from_json(budget.to_json()) == budget == Budget(speedup=2.0)
    assert (budget.kind, budget.amount, str(budget)) == ("speedup", 2.0, "at least 2 times as fast")
    with pytest.raises(InvalidValue, match=r"exactly one of keep_heads.*speedup"):
        Budget(speedup=2, keep_heads=3)
    with pytest.raises(InvalidValue, match=r"Budget\.length"):
        Budget(speedup=2, length=3)
