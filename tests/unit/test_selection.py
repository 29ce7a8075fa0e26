"""Selectors against brute force on small problems, and law 7 over the registry."""

import itertools
import math
import random
import re
from dataclasses import dataclass, replace

import pytest

import headprune as hp
from headprune.core.errors import HeadPruneError, InfeasibleBudget, InvalidValue
from headprune.core.ladders import SiteLadder
from headprune.core.levels import level_widths
from headprune.core.plan import Budget, PruningPlan
from headprune.core.scores import Cost
from headprune.selection import Selector
from headprune.selection._api import select
from headprune.selection._budget import problem_of
from headprune.selection.global_topk import GlobalTopk
from headprune.selection.uniform import Uniform
from tests.selection_problems import KINDS, SELECTORS, configured, fitted, make, random_scores, site


def kept_positions(scores, plan):
    """(site, unit) of what is kept; fails where a unit is torn."""
    found = set()
    for s, here in enumerate(scores.sites):
        kept = set(plan.mask.kept(here.name))
        for u, heads in enumerate(here.units):
            assert kept.isdisjoint(heads) or kept.issuperset(heads), f"unit {heads} is torn"
            if kept.issuperset(heads):
                found.add((s, u))
        assert kept <= set(here.heads)
    return found


def has_minimum(scores, keep, min_heads):
    """Whether every site keeps its minimum, said the slow way: or else nothing of it is removed."""
    for s, here in enumerate(scores.sites):
        mine = [len(h) for u, h in enumerate(here.units) if (s, u) in keep]
        if sum(mine) < min_heads and len(mine) < len(here.units):
            return False
    return True


def chosen(name, scores, budget, selector=None, **more):
    """A plan, with whatever the selector asks for beside scores."""
    scores, extra = fitted(name, scores)
    return select(scores, budget, selector or name, **extra, **more)


# --- law 7: budgets, units and minima are in test_selection_rules.py


@pytest.mark.parametrize("kind", ["keep_heads", "keep_macs"])
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
    for _ in range(30):
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


@pytest.mark.parametrize("name", SELECTORS)
def test_law_7_a_budget_of_everything_removes_nothing(name):
    for seed in range(4):
        scores = random_scores(seed, dear=seed % 2 == 1)
        for kind in KINDS:
            plan = chosen(name, scores, Budget(**{kind: 1.0}))
            assert plan.mask == hp.HeadMask.full(scores.sites)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SELECTORS)
def test_law_7_the_budget_named_by_an_error_can_be_met_and_is_the_nearest(name, kind):
    """With a minimum of one head, as a share and as a count; and without one, with multiples and
    heads that must be removed, where one head of the model is kept."""
    for seed in range(8):
        scores, min_heads = random_scores(seed, dear=seed % 2 == 1), seed // 4
        rules, told = {"min_heads": min_heads}, {}
        if not min_heads:
            rules["multiple_of"] = 1 + seed % 3 // 2
            if seed % 3 == 0:
                told = {"must_remove": {scores.sites[0].name: scores.sites[0].heads}}
        selector = configured(name, **rules)
        small = 1 if kind == "keep_heads" and seed == 6 else 1e-6
        with pytest.raises(InfeasibleBudget, match=rf"Budget\.{kind}") as caught:
            chosen(name, scores, Budget(**{kind: small}), selector, **told)
        number = re.search(r"must be at least ([0-9.e-]+), got", str(caught.value))[1]
        least = type(small)(number)
        plan = chosen(name, scores, Budget(**{kind: least}), selector, **told)
        assert plan.mask.n_kept >= 1
        if not told:
            assert has_minimum(scores, kept_positions(scores, plan), min_heads)
        less = least - (1 if isinstance(least, int) else 3e-6)
        with pytest.raises(InfeasibleBudget):
            chosen(name, scores, Budget(**{kind: less}), selector, **told)


# --- brute force


@pytest.mark.parametrize("min_heads", [0, 1, 2])
def test_global_topk_is_the_best_set_of_all(min_heads):
    """Every subset, at one price a head: the most heads, then the highest sum, then the earliest
    places."""
    sites = [site("a", 4), site("b", 3, heads=(0, 2)), site("c", 3)]
    places = [(s, u) for s, here in enumerate(sites) for u in range(len(here.units))]
    subsets = [set(keep) for n in range(1, 10) for keep in itertools.combinations(places, n)]
    for seed in range(6):
        rng = random.Random(seed)
        values = [[rng.randint(0, 2) for _ in s.units] for s in sites]
        scores = make(sites, values)

        def key(keep, values=values):
            early = sum(2.0 ** -places.index(p) for p in keep)
            return len(keep), sum(values[s][u] for s, u in keep), early

        lawful = [keep for keep in subsets if has_minimum(scores, keep, min_heads)]
        for count in range(1, 10):
            budget, selector = Budget(keep_heads=count), GlobalTopk(min_heads=min_heads)
            best = max((k for k in lawful if len(k) <= count), key=key, default=None)
            if best is None:
                with pytest.raises(InfeasibleBudget):
                    select(scores, budget, selector)
            else:
                assert kept_positions(scores, select(scores, budget, selector)) == best


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
            rest = [len(heads[s][u]) for s, u in keep - {place} if s == place[0]]
            if sum(rest) >= self.min_heads:
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


@pytest.mark.parametrize("kind", KINDS)
def test_global_topk_is_removal_and_adding_back_at_unlike_prices(kind):
    added_back = 0
    for seed in range(60):
        scores, min_heads = random_scores(seed, dear=True), (0, 1, 3)[seed % 3]
        budget = Budget(**{kind: random.Random(seed).uniform(0.5, 1.0)})
        try:
            expected = select(scores, budget, Transcribed(min_heads=min_heads))
        except InfeasibleBudget:
            with pytest.raises(InfeasibleBudget):
                select(scores, budget, GlobalTopk(min_heads=min_heads))
            continue
        plan = select(scores, budget, GlobalTopk(min_heads=min_heads))
        assert plan.mask == expected.mask
        keep, problem = kept_positions(scores, plan), problem_of(scores, budget)
        ranked = [(u.site, u.unit) for u in scores.ranked()]
        removed = [p for p in ranked if p not in keep]
        assert not any(problem.fits({*keep, p}) for p in removed), "one more could be kept"
        added_back += any(ranked.index(p) < ranked.index(q) for p in keep for q in removed)
    assert added_back > 5


@pytest.mark.parametrize("kind", KINDS)
def test_uniform_is_the_largest_share_that_fits(kind):
    for seed in range(42):
        scores, min_heads = random_scores(seed, dear=seed % 2 == 1), seed % 3
        budget = Budget(**{kind: random.Random(seed).uniform(0.3, 1.0)})
        sizes = [len(s.units) for s in scores.sites]
        grid, problem, best = math.lcm(*sizes), problem_of(scores, budget), None
        for step in range(grid + 1):
            keep = set()
            for s, here in enumerate(scores.sites):
                count = step * sizes[s] // grid
                while count < sizes[s] and count * len(here.units[0]) < min_heads:
                    count += 1
                values = scores.values[s]
                ranked = sorted(range(sizes[s]), key=lambda u, v=values: (-v[u], u))
                keep |= {(s, u) for u in ranked[:count]}
            if keep and problem.fits(keep):
                best = keep
        if best is None:
            with pytest.raises(InfeasibleBudget):
                select(scores, budget, Uniform(min_heads=min_heads))
        else:
            plan = select(scores, budget, Uniform(min_heads=min_heads))
            assert kept_positions(scores, plan) == best


# --- examples a person can follow


def test_global_topk_by_hand():
    scores = make([site("a", 4), site("b", 4)], [[9, 8, 7, 6], [1, 2, 3, 4]])
    plan = select(scores, Budget(keep_heads=4))
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1, 2), (3,))
    assert select(scores, Budget(keep_heads=4), GlobalTopk(min_heads=0)).mask.kept("b") == ()
    assert select(scores, Budget(keep_heads=4), GlobalTopk(min_heads=2)).mask.kept("b") == (2, 3)
    assert select(scores, Budget(keep_heads=4), "uniform").mask.kept("a") == (0, 1)


@pytest.mark.parametrize("name", SELECTORS)
def test_sites_that_cannot_run_without_a_head_keep_one(name):
    values, free = [[9, 8, 7, 6], [1, 2, 3, 4]], configured(name, min_heads=0)
    scores = make([site("a", 4), site("b", 4, least=1)], values)
    assert chosen(name, scores, Budget(keep_heads=2), free).mask.kept("b")
    with pytest.raises(
        InvalidValue, match="the kept heads of b: must be possible with min_heads=0"
    ):
        chosen(name, scores, Budget(keep_heads=2), free, must_remove={"b": [0, 1, 2, 3]})
    both = make([site("a", 4, least=1), site("b", 4, least=1)], values)
    with pytest.raises(InfeasibleBudget, match=r"at least 2.*2 of which cannot run without a head"):
        chosen(name, both, Budget(keep_heads=1), free)


@pytest.mark.parametrize("name", SELECTORS)
def test_all_heads_may_be_named_as_removed(name):
    scores = make([site("a", 2), site("b", 3)], [[1, 2], [3, 4, 5]])
    plan = chosen(name, scores, Budget(keep_heads=1.0), must_remove={"a": [0, 1], "b": [0, 1, 2]})
    assert plan.mask.n_kept == 0
    assert "Without a head: a, b." in plan.notes


@pytest.mark.parametrize(
    ("count", "settings", "big", "small"),
    [
        (4, {}, (0, 1, 2), (0,)),
        (4, {"normalise": "l2"}, (0, 1, 2), (0,)),  # .64 .57 .51 | .97 .11 .22
        (3, {"normalise": "l2"}, (0, 1), (0,)),
        (1, {"normalise": "l2", "min_heads": 0}, (), (0,)),
        (3, {"normalise": "zscore"}, (0, 1), (0,)),  # 1.2 0 -1.2 | 1.4 -.84 -.56
        (4, {"normalise": "zscore"}, (0, 1), (0, 2)),
    ],
)
def test_normalisation_changes_which_site_loses_heads(count, settings, big, small):
    scores = make([site("big", 3), site("small", 3)], [[100, 90, 80], [0.9, 0.1, 0.2]])
    mask = select(scores, Budget(keep_heads=count), GlobalTopk(**settings)).mask
    assert (mask.kept("big"), mask.kept("small")) == (big, small)


@pytest.mark.parametrize("normalise", ["l2", "zscore"])
def test_normalisation_of_a_site_without_spread_and_of_zeros(normalise):
    selector = GlobalTopk(min_heads=0, normalise=normalise)
    sites = [site("flat", 3), site("zero", 2), site("none", 2, heads=())]
    plan = select(make(sites, [[0.1] * 3, [0, 0], []]), Budget(keep_heads=3), selector)
    assert (plan.mask.kept("flat"), plan.mask.kept("zero")) == ((0, 1, 2), ())
    spread = make([site("spread", 2), site("flat", 3)], [[1, 2], [0.1] * 3])
    plan = select(spread, Budget(keep_heads=1), selector)
    assert plan.mask.kept("spread") == (1,), "rounding of a flat site's mean is no spread"


def test_removed_heads_do_not_come_back_and_a_site_below_the_minimum_keeps_what_it_has():
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


# --- budgets in other currencies


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (Budget(keep_params=0.99), (1, 2, 3)),
        (Budget(keep_kv=0.7), (0, 1, 2)),
        # MACs 0, 100, length², 10 length: at 10 tokens 100 100 100, at 1 token 100 1 10
        (Budget(keep_macs=0.7), (0, 1, 2)),
        (Budget(keep_macs=0.7, length=10), (0, 1, 2)),
        (Budget(keep_macs=0.3, length=1), (0, 2, 3)),
    ],
    ids=str,
)
def test_each_budget_counts_its_own_currency(budget, kept):
    """Heads 0 and 1 are equally good; each is the cheap one in some currencies only."""
    costs = [(100, 0, 0, 0, 4), (0, 100, 0, 0, 4), (0, 0, 0, 1, 0), (0, 0, 10, 0, 4)]
    fixed = Cost(0, 0, 0, 0, 0)
    scores = make([site("a", 4)], [[4, 3, 2, 1]], [[Cost(*row) for row in costs]], fixed)
    assert select(scores, budget, GlobalTopk(min_heads=0)).mask.kept("a") == kept


def test_a_share_is_of_the_whole_model_not_of_its_heads():
    costs = [[Cost(10, 0, 0, 0, 0)] * 4]
    scores = make([site("a", 4)], [[1, 2, 3, 4]], costs, fixed=Cost(60, 0, 0, 0, 0))
    assert select(scores, Budget(keep_params=0.8)).mask.kept("a") == (2, 3)
    with pytest.raises(InfeasibleBudget, match=r"keep_params: must be at least 0\.7, got 0\.5"):
        select(scores, Budget(keep_params=0.5))


def test_budgets_of_heads_need_no_costs():
    """What others say without costs: ``tests/selection_answers.json``."""
    bare = replace(make([site("a", 2)], [[1, 2]]), costs=None)
    assert select(bare, Budget(keep_heads=1)).mask.kept("a") == (1,)
    for kind in KINDS[1:]:
        with pytest.raises(InvalidValue, match=rf"Budget\.{kind}: .* scores that carry costs"):
            select(bare, Budget(**{kind: 0.9}))


def test_a_count_above_what_is_there_removes_nothing_and_says_so():
    scores = make([site("a", 2), site("b", 3, heads=(2,))], [[1, 2], [1]])
    plan = select(scores, Budget(keep_heads=99))
    assert (plan.mask.kept("a"), plan.mask.kept("b")) == ((0, 1), (2,))
    assert "Nothing is removed" in plan.notes[0]
    assert plan.notes[0].endswith(
        "It keeps 99 heads, and 3 are present. For 99 % of the heads, write 0.99."
    )
    whole = select(scores, Budget(keep_heads=3)).notes[0]
    assert "present." in whole
    assert "write" not in whole, "a count that fits is not a slip"
    assert select(scores, Budget(keep_heads=2)).notes == ()
    without, close = select(scores, Budget(keep_heads=2), GlobalTopk(min_heads=0)).notes
    assert without == "Without a head: b."
    assert "scores are equal" in close


# --- the plan and the arguments


def test_the_plan_says_where_it_comes_from_and_survives_json():
    scores = make([site("a", 4)], [[1, 2, 3, 4]])
    budget = Budget(keep_heads=2)
    plan = select(scores, budget, GlobalTopk(min_heads=2, normalise="l2"))
    assert (plan.selector, plan.scorer, plan.scores) == ("global_topk", "fake", scores.digest)
    assert (plan.budget, plan.model) == (budget, scores.model)
    assert dict(plan.settings) == {"min_heads": 2, "multiple_of": 1, "normalise": "l2"}
    assert PruningPlan.from_json(plan.to_json()) == plan
    for selector in ("global_topk", GlobalTopk()):
        assert select(scores, budget, selector) == select(scores, budget)
    assert select(scores, budget, Uniform()).selector == "uniform"


@pytest.mark.parametrize(
    ("selector", "message"),
    [("_base", "registered selector"), (GlobalTopk, "got the class GlobalTopk. Call it")],
)
def test_what_is_no_selector_is_refused(selector, message):
    """Other arguments that cannot be: ``tests/selection_answers.json``."""
    with pytest.raises(HeadPruneError, match=message):
        select(make([site("a", 2)], [[1, 2]]), Budget(keep_heads=1), selector)


@pytest.mark.parametrize("cls", [GlobalTopk, Uniform])
@pytest.mark.parametrize(
    "settings", [{"min_heads": 1.0}, {"min_heads": True}, {"multiple_of": 1.5}]
)
def test_settings_are_counts(cls, settings):
    with pytest.raises(InvalidValue, match="must be a count of heads"):
        cls(**settings)


def test_neurons_are_taken_in_levels_by_their_rank():
    """100 neurons in steps of 8: the budget of parameters buys the best levels."""
    values = [float((37 * i) % 100) for i in range(100)]
    neurons = site("f", 100, kind="feed_forward")
    scores = make([site("a", 2), neurons], [[1000.0, 1000.0], values])
    units = sum(cost.params for row in scores.costs.units for cost in row)
    fixed = scores.costs.total.params - units
    each = scores.costs.units[1][0].params
    for n_kept, level in ((100, 100), (99, 88), (50, 48), (9, 8)):
        # Both heads, and so many neurons, may stay.
        params = fixed + units - (100 - n_kept) * each
        plan = select(scores, Budget(keep_params=params / scores.costs.total.params))
        best = sorted(range(100), key=values.__getitem__, reverse=True)[:level]
        assert plan.mask.kept("f") == tuple(sorted(best))
        assert plan.mask.kept("a") == (0, 1)


@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize("name", ["global_topk", "uniform", "knapsack"])
def test_no_neuron_is_kept_in_place_of_a_better_one(name, priced):
    """128 neurons have levels of unlike size: 8, 24, 32, 40, 56 and so on."""
    sites = [site("a", 4), site("f", 128, kind="feed_forward"), site("g", 128, kind="feed_forward")]
    falling = [float(200 - i) for i in range(128)]
    scores = make(sites, [[900.0, 800.0, 700.0, 600.0], falling, falling])
    if priced:
        widths = level_widths(128)
        rises = [100.0 * 0.5**level for level in range(len(widths))]
        ladders = [SiteLadder("a", (0, 1, 2, 3, 4), (9.0, 5.0, 3.0, 1.0, 0.0))]
        ladders += [SiteLadder(one, widths, (*rises[:-1], 0.0)) for one in ("f", "g")]
        scores = replace(scores, ladders=tuple(ladders))
    for percent in range(50, 100):
        try:
            plan = select(scores, Budget(keep_params=percent / 100), name)
        except InfeasibleBudget:
            continue
        for one in ("f", "g"):
            kept = plan.mask.kept(one)
            assert kept == tuple(range(len(kept)))
            assert len(kept) in level_widths(128)


def test_other_sites_may_be_feed_forwards_alone():
    """A budget for one site of attention, and neurons that must go."""
    scores = make([site("a", 4), site("f", 8, kind="feed_forward")], [[1.0] * 4, [1.0] * 8])
    plan = select(scores, {"a": Budget(keep_heads=0.5)}, must_remove={"f": [0, 1]})
    assert plan.mask.n_kept == 2 + 6
    assert plan.mask.kept("f") == (2, 3, 4, 5, 6, 7)
    with pytest.raises(InvalidValue, match="no attention heads"):
        select(make([site("f", 8, kind="feed_forward")], [[1.0] * 8]), Budget(keep_heads=1))


def test_a_count_of_heads_is_compared_with_heads_not_with_neurons():
    scores = make([site("a", 4), site("f", 24, kind="feed_forward")], [[1.0] * 4, [1.0] * 24])
    note = select(scores, Budget(keep_heads=40)).notes[0]
    assert "It keeps 40 heads, and 4 are present." in note
