"""Selectors against brute force on small problems, and law 7 over the registry."""

import itertools
import math
import random
import re
from dataclasses import dataclass, replace

import pytest

import headprune as hp
from headprune.core.errors import InfeasibleBudget, InvalidValue, UnknownName
from headprune.core.plan import Budget, PruningPlan, allowance
from headprune.core.scores import Cost
from headprune.selection import Problem, Selector, registry
from headprune.selection._api import select
from headprune.selection._budget import pose
from headprune.selection.global_topk import GlobalTopk
from headprune.selection.uniform import Uniform
from tests.selection_problems import KINDS, LENGTH, SELECTORS, fitted, make, random_scores, site


def test_the_registry_holds_the_selectors_that_are_tested_here():
    assert set(SELECTORS) >= {"global_topk", "knapsack", "uniform"}
    assert registry.names() == SELECTORS


def amount_of(scores, plan, kind):
    """What the kept units and the rest of the model cost, and what the whole does, counted from the
    plan's mask."""
    if kind == "keep_heads":
        return plan.mask.n_kept, scores.n_heads

    def price(cost):
        macs = cost.macs_fixed + LENGTH * cost.macs_per_token + LENGTH * LENGTH * cost.macs_per_pair
        return {"keep_params": cost.params, "keep_macs": macs, "keep_kv": cost.kv_bytes}[kind]

    gone = 0
    for s, row in zip(scores.sites, scores.costs.units, strict=True):
        gone += sum(
            price(c)
            for heads, c in zip(s.units, row, strict=True)
            if heads[0] not in plan.mask.kept(s.name)
        )
    return price(scores.costs.total) - gone, price(scores.costs.total)


def kept_positions(scores, plan):
    """(site, unit) of what stays; fails where a unit is torn."""
    found = set()
    for s, here in enumerate(scores.sites):
        kept = set(plan.mask.kept(here.name))
        for u, heads in enumerate(here.units):
            assert kept.isdisjoint(heads) or kept.issuperset(heads), f"unit {heads} is torn"
            if kept.issuperset(heads):
                found.add((s, u))
        assert kept <= set(here.heads)
    return found


def stays(scores, keep, min_heads):
    """Whether every site keeps its minimum, said the slow way: or else nothing of it is gone."""
    for s, here in enumerate(scores.sites):
        mine = [len(h) for u, h in enumerate(here.units) if (s, u) in keep]
        if sum(mine) < min_heads and len(mine) < len(here.units):
            return False
    return True


def chosen(name, scores, budget, selector=None, **more):
    """A plan, with whatever the selector asks for beside scores."""
    scores, extra = fitted(name, scores)
    return select(scores, budget, selector or name, **extra, **more)


# --- law 7
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_heads", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SELECTORS)
def test_law_7_budget_units_and_minimum_heads(name, kind, min_heads):
    selector = getattr(hp.selection, registry.attribute(name))(min_heads=min_heads)
    met = refused = 0
    for seed in range(8):
        scores = random_scores(seed, dear=seed % 2 == 1)
        for fraction in (0.05, 0.5, 0.65, 0.8, 0.95, 1.0):
            try:
                plan = chosen(name, scores, Budget(**{kind: fraction}), selector)
            except InfeasibleBudget:
                refused += 1
                continue
            met += 1
            kept, whole = amount_of(scores, plan, kind)
            assert kept <= fraction * whole + 1e-6
            assert stays(scores, kept_positions(scores, plan), min_heads)
            if fraction == 0.8:
                assert plan == chosen(name, scores, Budget(**{kind: fraction}), selector)
            if fraction == 1.0:
                assert plan.mask == hp.HeadMask.full(scores.sites)
    assert met > 12
    assert refused > 0 or (min_heads == 0 and kind == "keep_heads")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SELECTORS)
def test_law_7_selectors_follow_a_permutation(name, kind):
    rng = random.Random(7)
    for _ in range(6):
        values = [[rng.random() for _ in range(5)] for _ in range(3)]
        order = rng.sample(range(5), 5)
        sites = [site(n, 5) for n in "abc"]
        budget = Budget(**{kind: rng.uniform(0.75, 0.95)})
        plain = chosen(name, make(sites, values), budget)
        moved = chosen(name, make(sites, [[row[i] for i in order] for row in values]), budget)
        turned = chosen(name, make(sites[::-1], values[::-1]), budget)
        for s in "abc":
            assert {order[h] for h in moved.mask.kept(s)} == set(plain.mask.kept(s))
            assert turned.mask.kept(s) == plain.mask.kept(s)


@pytest.mark.parametrize("normalise", ["l2", "zscore"])
def test_normalised_selection_follows_a_permutation(normalise):
    rng = random.Random(3)
    for _ in range(50):
        values = [[rng.random() for _ in range(5)] for _ in range(3)]
        values[1] = [v * 3 for v in values[0]]  # the same after normalisation but for rounding
        order = rng.sample(range(5), 5)
        sites = [site(n, 5) for n in "abc"]
        selector, budget = GlobalTopk(normalise=normalise), Budget(keep_heads=rng.randint(3, 14))
        plain = select(make(sites, values), budget, selector)
        moved = select(make(sites, [[row[i] for i in order] for row in values]), budget, selector)
        for s in "abc":
            assert {order[h] for h in moved.mask.kept(s)} == set(plain.mask.kept(s))


@pytest.mark.parametrize("name", SELECTORS)
def test_law_7_equal_scores_keep_the_earlier_heads(name):
    scores = make([site("z", 4), site("a", 4)], [[1, 1, 1, 1], [1, 1, 1, 1]])
    plan = chosen(name, scores, Budget(keep_heads=4))
    if name == "uniform":
        assert (plan.mask.kept("z"), plan.mask.kept("a")) == ((0, 1), (0, 1))
    else:  # the later site loses first, down to its minimum
        assert (plan.mask.kept("z"), plan.mask.kept("a")) == ((0, 1, 2), (0,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SELECTORS)
def test_law_7_the_budget_named_by_an_error_can_be_met_and_is_the_nearest(name, kind):
    fed_back = 0
    for seed in range(8):
        scores = random_scores(seed, dear=seed % 2 == 1)
        small = 1e-4 if kind != "keep_heads" or seed % 3 else 1
        with pytest.raises(InfeasibleBudget) as caught:
            chosen(name, scores, Budget(**{kind: small}))
        number = re.search(r"must be at least ([0-9.e-]+), got", str(caught.value))[1]
        least = int(number) if isinstance(small, int) else float(number)
        plan = chosen(name, scores, Budget(**{kind: least}))
        assert stays(scores, kept_positions(scores, plan), 1)
        with pytest.raises(InfeasibleBudget):
            chosen(name, scores, Budget(**{kind: least - (1 if isinstance(least, int) else 3e-6)}))
        fed_back += 1
    assert fed_back == 8


# --- brute force
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_heads", [0, 1, 2])
@pytest.mark.parametrize("count", range(1, 10))
def test_global_topk_is_the_best_set_of_all(count, min_heads):
    """Every subset, at one price a head: the most heads, then the highest sum, then the earliest
    places."""
    for seed in range(12):
        rng = random.Random(1000 * seed + count)
        sites = [site("a", 4), site("b", 3, heads=(0, 2)), site("c", 3)]
        values = [[rng.randint(0, 2) for _ in s.units] for s in sites]
        scores = make(sites, values)
        places = [(s, u) for s, here in enumerate(sites) for u in range(len(here.units))]

        def key(keep, values=values, places=places):
            early = sum(2.0 ** -places.index(p) for p in keep)
            return len(keep), sum(values[s][u] for s, u in keep), early

        subsets = (set(c) for n in range(count + 1) for c in itertools.combinations(places, n))
        best = max((c for c in subsets if stays(scores, c, min_heads)), key=key, default=None)
        if best is None:
            with pytest.raises(InfeasibleBudget):
                select(scores, Budget(keep_heads=count), GlobalTopk(min_heads=min_heads))
        else:
            plan = select(scores, Budget(keep_heads=count), GlobalTopk(min_heads=min_heads))
            assert kept_positions(scores, plan) == best


@dataclass(frozen=True)
class Transcribed(Selector):
    """The words of the docstring, literally: remove from the bottom, skip a site at its minimum,
    then add back."""

    def keep(self, problem):
        ranked = [(u.site, u.unit) for u in problem.scores.ranked()]
        heads = [s.units for s in problem.scores.sites]
        keep, removed = set(ranked), []
        for place in ranked:
            if problem.fits(keep):
                break
            left = sum(len(heads[s][u]) for s, u in keep if s == place[0]) - len(
                heads[place[0]][place[1]]
            )
            if left >= self.min_heads:
                keep.remove(place)
                removed.append(place)
        if not problem.fits(keep):
            raise InfeasibleBudget("transcription", "feasible", "nothing")
        for place in reversed(removed):
            if problem.fits({*keep, place}):
                keep.add(place)
        if not keep:
            raise InfeasibleBudget("transcription", "a budget for a head", "none")
        return frozenset(keep)


@pytest.mark.parametrize("min_heads", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_global_topk_is_removal_and_adding_back_at_unlike_prices(kind, min_heads):
    added_back = 0
    for seed in range(60):
        scores = random_scores(seed, dear=True)
        budget = Budget(**{kind: random.Random(seed).uniform(0.5, 1.0)})
        try:
            expected = select(scores, budget, Transcribed(min_heads=min_heads))
        except InfeasibleBudget:
            with pytest.raises(InfeasibleBudget):
                select(scores, budget, GlobalTopk(min_heads=min_heads))
            continue
        plan = select(scores, budget, GlobalTopk(min_heads=min_heads))
        assert plan.mask == expected.mask
        keep, problem = kept_positions(scores, plan), pose(scores, budget)
        ranked = [(u.site, u.unit) for u in scores.ranked()]
        gone = [p for p in ranked if p not in keep]
        assert not any(problem.fits({*keep, p}) for p in gone), (
            "something removed could have stayed"
        )
        added_back += any(ranked.index(p) < ranked.index(q) for p in keep for q in gone)
    assert added_back > 5


@pytest.mark.parametrize("min_heads", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_uniform_is_the_largest_share_that_fits(kind, min_heads):
    for seed in range(40):
        scores = random_scores(seed, dear=seed % 2 == 1)
        budget, sizes = (
            Budget(**{kind: random.Random(seed).uniform(0.3, 1.0)}),
            [len(s.units) for s in scores.sites],
        )
        grid, problem, best = math.lcm(*sizes), pose(scores, budget), None
        for step in range(grid + 1):
            keep = set()
            for s, here in enumerate(scores.sites):
                count = step * sizes[s] // grid
                while count < sizes[s] and count * len(here.units[0]) < min_heads:
                    count += 1
                best_units = sorted(range(sizes[s]), key=lambda u, s=s: (-scores.values[s][u], u))[
                    :count
                ]
                keep |= {(s, u) for u in best_units}
            if keep and problem.fits(keep):
                best = keep
        if best is None:
            with pytest.raises(InfeasibleBudget):
                select(scores, budget, Uniform(min_heads=min_heads))
        else:
            assert (
                kept_positions(scores, select(scores, budget, Uniform(min_heads=min_heads))) == best
            )


# --- examples a person can follow
# -----------------------------------------------------------------------------------


def test_global_topk_by_hand():
    scores = make([site("a", 4), site("b", 4)], [[9, 8, 7, 6], [1, 2, 3, 4]])
    plan = select(scores, Budget(keep_heads=4))
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1, 2), (3,))
    assert select(scores, Budget(keep_heads=4), GlobalTopk(min_heads=0)).mask.kept("b") == ()
    assert select(scores, Budget(keep_heads=4), GlobalTopk(min_heads=2)).mask.kept("b") == (2, 3)
    assert select(scores, Budget(keep_heads=4), "uniform").mask.kept("a") == (0, 1)


def without_rules(name, **rules):
    """The selector that may take a site's last head."""
    return registry.get(name)(min_heads=0, **rules)


@pytest.mark.parametrize("name", SELECTORS)
def test_sites_that_cannot_run_without_a_head_keep_one(name):
    scores, free = (
        make([site("a", 4), site("b", 4, least=1)], [[9, 8, 7, 6], [1, 2, 3, 4]]),
        without_rules(name),
    )
    assert chosen(name, scores, Budget(keep_heads=2), free).mask.kept("b")
    with pytest.raises(InvalidValue, match="what stays of b: must be lawful with min_heads=0"):
        chosen(name, scores, Budget(keep_heads=2), free, must_remove={"b": [0, 1, 2, 3]})
    both = make([site("a", 4, least=1), site("b", 4, least=1)], [[9, 8, 7, 6], [1, 2, 3, 4]])
    with pytest.raises(
        InfeasibleBudget, match=r"at least 2, got 1.*2 sites, 2 of which cannot run without a head"
    ):
        chosen(name, both, Budget(keep_heads=1), free)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_that_leaves_not_one_head_is_refused_and_the_nearest_leaves_one(name, kind):
    for seed in range(8):
        scores = random_scores(seed, dear=seed % 2 == 1)
        selector = without_rules(name, multiple_of=1 + seed % 3 // 2)
        go = {scores.sites[0].name: scores.sites[0].heads} if seed % 3 == 0 else None
        with pytest.raises(InfeasibleBudget, match=rf"Budget\.{kind}: must be at least ") as caught:
            chosen(name, scores, Budget(**{kind: 1e-6}), selector, must_remove=go)
        least = float(re.search(r"must be at least ([0-9.e-]+), got", str(caught.value))[1])
        plan = chosen(name, scores, Budget(**{kind: least}), selector, must_remove=go)
        assert plan.mask.n_kept >= 1
        with pytest.raises(InfeasibleBudget):
            chosen(name, scores, Budget(**{kind: least - 3e-6}), selector, must_remove=go)


@pytest.mark.parametrize("name", SELECTORS)
def test_all_heads_may_be_told_to_go(name):
    scores = make([site("a", 2), site("b", 3)], [[1, 2], [3, 4, 5]])
    plan = chosen(name, scores, Budget(keep_heads=1.0), must_remove={"a": [0, 1], "b": [0, 1, 2]})
    assert plan.mask.n_kept == 0
    assert "Without a head: a, b." in plan.notes


def test_a_selector_that_keeps_nothing_is_told_so():
    @dataclass(frozen=True)
    class Nothing(Selector):
        def keep(self, problem):
            return frozenset()

    with pytest.raises(
        InvalidValue, match=r"keeps: must be a head at least, got none\. .*min_heads=1"
    ):
        select(make([site("a", 2)], [[1, 2]]), Budget(keep_heads=1), Nothing(min_heads=0))


def test_uniform_leaves_what_does_not_divide():
    scores = make([site("a", 4), site("b", 4)], [[9, 8, 7, 6], [1, 2, 3, 4]])
    plan = select(scores, Budget(keep_heads=7), "uniform")
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1, 2), (1, 2, 3))


def test_uniform_is_proportional_between_sites_of_unlike_size():
    scores = make([site("a", 8), site("b", 4), site("c", 2)], [range(8), range(4), range(2)])
    plan = select(scores, Budget(keep_heads=0.5), "uniform")
    assert [len(plan.mask.kept(s)) for s in "abc"] == [4, 2, 1]


def test_normalisation_changes_which_site_loses_heads():
    scores = make([site("big", 3), site("small", 3)], [[100, 90, 80], [0.9, 0.1, 0.2]])
    assert select(scores, Budget(keep_heads=4)).mask.kept("big") == (0, 1, 2)
    l2 = select(
        scores, Budget(keep_heads=4), GlobalTopk(normalise="l2")
    )  # .64 .57 .51 | .97 .11 .22
    assert (l2.mask.kept("big"), l2.mask.kept("small")) == ((0, 1, 2), (0,))
    l2 = select(scores, Budget(keep_heads=3), GlobalTopk(normalise="l2"))
    assert (l2.mask.kept("big"), l2.mask.kept("small")) == ((0, 1), (0,))
    l2 = select(scores, Budget(keep_heads=1), GlobalTopk(min_heads=0, normalise="l2"))
    assert (l2.mask.kept("big"), l2.mask.kept("small")) == ((), (0,))
    zscore = select(
        scores, Budget(keep_heads=3), GlobalTopk(normalise="zscore")
    )  # 1.2 0 -1.2 | 1.4 -.84 -.56
    assert (zscore.mask.kept("big"), zscore.mask.kept("small")) == ((0, 1), (0,))
    zscore = select(scores, Budget(keep_heads=4), GlobalTopk(normalise="zscore"))
    assert (zscore.mask.kept("big"), zscore.mask.kept("small")) == ((0, 1), (0, 2))


def test_normalisation_of_a_site_without_spread_and_of_zeros():
    scores = make(
        [site("flat", 3), site("zero", 2), site("none", 2, heads=())], [[0.1] * 3, [0, 0], []]
    )
    for normalise, expected in (("zscore", ((0, 1, 2), ())), ("l2", ((0, 1, 2), ()))):
        plan = select(scores, Budget(keep_heads=3), GlobalTopk(min_heads=0, normalise=normalise))
        assert (plan.mask.kept("flat"), plan.mask.kept("zero")) == expected
    zeroed = make([site("spread", 2), site("flat", 3)], [[1, 2], [0.1] * 3])
    plan = select(zeroed, Budget(keep_heads=1), GlobalTopk(min_heads=0, normalise="zscore"))
    assert plan.mask.kept("spread") == (1,), (
        "rounding of a flat site's mean must not count as spread"
    )


def test_grouped_units_stay_or_go_whole_and_min_heads_rounds_up():
    scores = make([site("a", 8, 2), site("b", 8, 4)], [[5, 1], [4, 3, 2, 0]])
    plan = select(
        scores, Budget(keep_heads=11)
    )  # 4 + 2 + 2 + 2, and no unit has only the one head that is left
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5))
    plan = select(scores, Budget(keep_heads=8), GlobalTopk(min_heads=3))
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1, 2, 3), (0, 1, 2, 3))
    with pytest.raises(InfeasibleBudget, match="at least 8, got 7"):
        select(scores, Budget(keep_heads=7), GlobalTopk(min_heads=3))


def test_what_is_gone_stays_gone_and_a_site_below_the_minimum_keeps_what_it_has():
    scores = make(
        [site("a", 6, heads=(1, 4)), site("b", 6), site("c", 6, heads=())],
        [[0, 0.5], range(1, 7), []],
    )
    plan = select(scores, Budget(keep_heads=5), GlobalTopk(min_heads=3))
    assert [plan.mask.kept(s) for s in "abc"] == [(1, 4), (3, 4, 5), ()]
    plan = select(scores, Budget(keep_heads=5), GlobalTopk(min_heads=1))
    assert [plan.mask.kept(s) for s in "abc"] == [(4,), (2, 3, 4, 5), ()]
    assert plan.mask.n_heads == 18
    with pytest.raises(InfeasibleBudget, match=r"at least 0\.625, got 0\.5"):
        select(scores, Budget(keep_heads=0.5), GlobalTopk(min_heads=3))


def test_a_fraction_is_of_the_present_heads_and_rounds_down():
    scores = make([site("a", 12, heads=range(7))], [range(7)])
    assert select(scores, Budget(keep_heads=0.5)).mask.kept("a") == (4, 5, 6)
    assert select(make([site("a", 100)], [range(100)]), Budget(keep_heads=0.29)).mask.n_kept == 29


def test_a_ratio_that_a_plan_has_can_be_asked_for_again():
    """The share of a kept set, computed in floating point at the size of a large model, must not
    lose one head."""
    for kept in range(1, 97):
        whole, unit = 13_000_000_000_037, 13_000_000_000_037 // 96
        assert allowance(kept * unit / whole, whole) // unit == kept
        assert allowance(kept / 96, 96) == kept


# --- budgets in other currencies
# ------------------------------------------------------------------------------------


def test_each_budget_counts_its_own_currency():
    """Heads 0 and 1 are equally good; each is the cheap one in some currencies only."""
    costs = [
        [Cost(100, 0, 0, 0, 4), Cost(0, 100, 0, 0, 4), Cost(0, 0, 0, 1, 0), Cost(0, 0, 10, 0, 4)]
    ]
    scores = make([site("a", 4)], [[4, 3, 2, 1]], costs, fixed=Cost(0, 0, 0, 0, 0))
    none = GlobalTopk(min_heads=0)
    assert select(scores, Budget(keep_params=0.99), none).mask.kept("a") == (1, 2, 3)
    assert select(scores, Budget(keep_kv=0.7), none).mask.kept("a") == (0, 1, 2)
    # MACs 0, 100, length², 10 length: at 10 tokens 100 100 100, at 1 token 100 1 10
    assert select(scores, Budget(keep_macs=0.7), none).mask.kept("a") == (0, 1, 2)
    assert select(scores, Budget(keep_macs=0.7, length=10), none).mask.kept("a") == (0, 1, 2)
    assert select(scores, Budget(keep_macs=0.3, length=1), none).mask.kept("a") == (0, 2, 3)


def test_a_share_is_of_the_whole_model_not_of_its_heads():
    costs = [[Cost(10, 0, 0, 0, 0)] * 4]
    scores = make([site("a", 4)], [[1, 2, 3, 4]], costs, fixed=Cost(60, 0, 0, 0, 0))
    assert select(scores, Budget(keep_params=0.8)).mask.kept("a") == (2, 3)
    with pytest.raises(
        InfeasibleBudget, match=r"keep_params: must be at least 0\.7, got 0\.5\..*no heads"
    ):
        select(scores, Budget(keep_params=0.5))


def test_units_that_cost_nothing_stay():
    costs = [[Cost(1, 1, 1, 1, 0)] * 2, [Cost(1, 1, 1, 1, 8)] * 2]
    scores = make(
        [site("encoder", 2), site("decoder", 2)], [[0, 0], [5, 6]], costs, fixed=Cost(1, 1, 1, 1, 0)
    )
    plan = select(scores, Budget(keep_kv=0.5))
    assert (plan.mask.kept("encoder"), plan.mask.kept("decoder")) == ((0, 1), (1,))


def test_budgets_without_costs_or_without_the_thing():
    scores = make([site("a", 2)], [[1, 2]])
    bare = replace(scores, costs=None)
    assert select(bare, Budget(keep_heads=1)).mask.kept("a") == (1,)
    for kind in KINDS[1:]:
        with pytest.raises(
            InvalidValue,
            match=rf"Budget\.{kind}: must be used with scores that carry costs.*batches",
        ):
            select(bare, Budget(**{kind: 0.9}))
    uncached = make(
        [site("a", 2)], [[1, 2]], [[Cost(1, 1, 1, 1, 0)] * 2], fixed=Cost(1, 1, 1, 1, 0)
    )
    with pytest.raises(
        InvalidValue, match=r"Budget\.keep_kv: .*a model with no KV cache.*keep_heads"
    ):
        select(uncached, Budget(keep_kv=0.5))
    with pytest.raises(InvalidValue, match="no attention heads left"):
        select(make([site("a", 2, heads=())], [[]]), Budget(keep_heads=0.5))


def test_a_count_above_what_is_there_removes_nothing_and_says_so():
    scores = make([site("a", 2), site("b", 3, heads=(2,))], [[1, 2], [1]])
    plan = select(scores, Budget(keep_heads=99))
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1), (2,))
    assert "Nothing is removed" in plan.notes[0]
    assert select(scores, Budget(keep_heads=2)).notes == ()
    without, close = select(scores, Budget(keep_heads=2), GlobalTopk(min_heads=0)).notes
    assert without == "Without a head: b."
    assert "scores are equal" in close


# --- the plan and the arguments
# -------------------------------------------------------------------------------------


def test_the_plan_says_where_it_comes_from_and_survives_json():
    scores = make([site("a", 4)], [[1, 2, 3, 4]])
    budget = Budget(keep_heads=2)
    plan = select(scores, budget, GlobalTopk(min_heads=2, normalise="l2"))
    assert (plan.selector, plan.scorer, plan.scores) == ("global_topk", "fake", scores.digest)
    assert (plan.budget, plan.model) == (budget, scores.model)
    assert dict(plan.settings) == {"min_heads": 2, "multiple_of": 1, "normalise": "l2"}
    assert PruningPlan.from_json(plan.to_json()) == plan
    assert (
        select(scores, budget, "global_topk")
        == select(scores, budget, GlobalTopk())
        == select(scores, budget)
    )
    assert select(scores, budget, Uniform()).selector == "uniform"


def test_classes_are_found_under_the_package():
    assert hp.select is select
    assert hp.selection.GlobalTopk is GlobalTopk
    assert hp.selection.Uniform is Uniform
    assert {"GlobalTopk", "Uniform", "registry"} <= set(dir(hp.selection))
    with pytest.raises(AttributeError, match="Did you mean 'GlobalTopk'"):
        hp.selection.GlobalTopK  # noqa: B018
    assert not hasattr(hp.selection, "no_such_module")


@pytest.mark.parametrize(
    ("scores", "budget", "selector", "error", "message"),
    [
        (
            {"a": 1},
            Budget(keep_heads=1),
            "uniform",
            InvalidValue,
            r"select\(scores=\): must be HeadScores.*got dict",
        ),
        (
            None,
            0.5,
            "uniform",
            InvalidValue,
            r"select\(budget=\): must be a Budget.* got 0\.5.*keep_heads=0\.5",
        ),
        (None, Budget(keep_heads=1), "global_topq", UnknownName, "Did you mean 'global_topk'"),
        (None, Budget(keep_heads=1), "_base", UnknownName, "registered selector"),
        (None, Budget(keep_heads=1), GlobalTopk, InvalidValue, "got the class GlobalTopk. Call it"),
        (None, Budget(keep_heads=1), 3, InvalidValue, "global_topk, .*uniform, got int"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_words(scores, budget, selector, error, message):
    scores = make([site("a", 2)], [[1, 2]]) if scores is None else scores
    with pytest.raises(error, match=message):
        select(scores, budget, selector)


@pytest.mark.parametrize("cls", [GlobalTopk, Uniform])
@pytest.mark.parametrize("min_heads", [-1, 1.0, True, "1"])
def test_settings_are_checked(cls, min_heads):
    with pytest.raises(
        InvalidValue, match=rf"{cls.__name__}\.min_heads: must be a count of heads >= 0"
    ):
        cls(min_heads=min_heads)


def test_normalise_is_checked():
    with pytest.raises(
        InvalidValue, match=r"GlobalTopk\.normalise: must be 'none', 'l2' or 'zscore', got 'L2'"
    ):
        GlobalTopk(normalise="L2")


@dataclass(frozen=True)
class Greedy(Selector):
    """An outside selector with an answer of our choice."""

    answer: tuple = ()

    def keep(self, problem: Problem):
        return frozenset(self.answer)


def test_an_outside_selector_works_and_cannot_overspend_or_invent_units():
    scores = make([site("a", 4, 2)], [[1, 2]])
    plan = select(scores, Budget(keep_heads=2), Greedy(((0, 1),)))
    assert plan.mask.kept("a") == (2, 3)
    assert plan.selector.endswith(".Greedy")
    assert plan.settings["answer"] == ((0, 1),)
    with pytest.raises(InvalidValue, match=r"within the budget's limit of 2, got a cost of 4"):
        select(scores, Budget(keep_heads=2), Greedy(((0, 0), (0, 1))))
    with pytest.raises(InvalidValue, match=r"units of the problem, got \[\(0, 2\)\]"):
        select(scores, Budget(keep_heads=2), Greedy(((0, 2),)))
