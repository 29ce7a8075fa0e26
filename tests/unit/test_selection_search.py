"""Selectors that ask a model while they choose: steps with scores anew, and swaps on the measured
loss."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import headprune as hp
from headprune.core.errors import InfeasibleBudget, InvalidValue
from headprune.core.heads import HeadMask
from headprune.core.samples import Curvature
from headprune.core.scores import HeadScores
from headprune.selection import GlobalTopk, Iterative, LocalSearch
from headprune.selection._api import select
from tests.laws.support import subject_of
from tests.selection_problems import make, site, unit_cost

SITES = [site("a", 4), site("b", 4), site("c", 4)]


def scores_of(seed: int = 0, sites: Sequence[Any] = SITES) -> HeadScores:
    rng = np.random.default_rng(seed)
    return make(sites, [rng.uniform(0.1, 1, len(s.units)) for s in sites])


class Rescore:
    """Scores that depend on which heads are kept; remembers what it was asked."""

    def __init__(self, scores: HeadScores, seed: int = 1) -> None:
        self.scores, self.seed, self.masks = scores, seed, list[HeadMask]()

    def __call__(self, mask: HeadMask) -> HeadScores:
        self.masks.append(mask)
        rng = np.random.default_rng([self.seed, *(h for row in mask.rows for h in (99, *row.kept))])
        return replace(
            self.scores,
            values=tuple(tuple(map(float, rng.uniform(size=len(r)))) for r in self.scores.values),
        )


def removed(masks: Sequence[HeadMask]) -> Any:
    """1 for every head that a mask removes: [masks, 12]."""
    rows = [[h not in row.kept for row in m.rows for h in range(row.n_heads)] for m in masks]
    return np.array(rows, float)


def pairwise(seed: int) -> Callable[[Sequence[HeadMask]], Any]:
    """A loss with ties between heads, so that scores one by one mislead."""
    rng = np.random.default_rng(seed)
    own, tie = rng.uniform(0.1, 1, 12), np.triu(rng.uniform(-0.6, 0.6, (12, 12)), 1)

    def loss(masks: Sequence[HeadMask]) -> Any:
        gone = removed(masks)
        one = gone @ own + np.einsum("ij,jk,ik->i", gone, tie, gone)
        return np.repeat(one[:, None], 40, axis=1)

    return loss


# ---------------------------------------------------------------- iterative


@pytest.mark.parametrize("inner", ["global_topk", "uniform", "quadratic", "knapsack"])
def test_one_step_is_the_inner_selector(inner: str) -> None:
    rescore = Rescore(scores_of())
    scores = replace(
        scores_of(), curvature=Curvature.of(np.diag(2 * np.concatenate(scores_of().values)))
    )
    for keep in (0.3, 0.55, 0.8, 1.0):
        budget, once = hp.Budget(keep_heads=keep), Iterative(steps=1, inner=inner)
        plan = select(scores, budget, once, rescore=rescore)
        assert plan.mask == select(scores, budget, inner).mask
    assert rescore.masks == []


def test_settings_of_the_inner_selector() -> None:
    scores, five = scores_of(), hp.Budget(keep_heads=5)
    once = Iterative(steps=1, inner="global_topk", inner_settings={"normalise": "l2"})
    plain = select(scores, five, GlobalTopk(normalise="l2"))
    assert select(scores, five, once, rescore=Rescore(scores)).mask == plain.mask
    for kind in (Iterative, LocalSearch):
        one, two = (kind(inner_settings={"normalise": "l2"}) for _ in range(2))
        assert hash(one) == hash(two)
        assert one.settings["inner_settings"] == {"normalise": "l2"}


@pytest.mark.parametrize(
    ("schedule", "counts"), [("linear", [10, 8, 6, 4]), ("geometric", [9, 7, 5, 4])]
)
def test_steps_follow_the_schedule_and_nothing_comes_back(schedule: Any, counts: list[int]) -> None:
    for seed in range(5):
        rescore, selector = Rescore(scores_of(), seed), Iterative(steps=4, schedule=schedule)
        plan = select(scores_of(), hp.Budget(keep_heads=4), selector, rescore=rescore)
        masks = [*rescore.masks, plan.mask]
        assert [mask.n_kept for mask in masks] == counts
        for before, after in itertools.pairwise(masks):
            assert (before & after) == after
        assert plan.notes[-1] == "global_topk in 4 steps; scored anew 3 times."


def test_each_step_goes_by_the_scores_of_what_is_kept() -> None:
    """Written out: the lowest remaining scores are removed, three at a time."""
    scores, rescore = scores_of(), Rescore(scores_of())
    plan = select(scores, hp.Budget(keep_heads=3), Iterative(steps=3, min_heads=0), rescore=rescore)
    asked_for, kept = Rescore(scores_of()), {(s.name, h) for s in SITES for h in range(4)}
    now = scores
    for _ in range(3):
        value = {(u.name, u.heads[0]): u.value for u in now.units()}
        for _ in range(3):
            kept.discard(min(kept, key=lambda head: value[head]))
        keep = {s.name: [h for name, h in kept if name == s.name] for s in SITES}
        now = asked_for(HeadMask.from_keep(keep, {s.name: 4 for s in SITES}))
    assert {(h.site, h.head) for h in plan.mask} == kept
    at_once = select(scores, hp.Budget(keep_heads=3), GlobalTopk(min_heads=0))
    assert plan.mask != at_once.mask


def test_a_budget_that_cannot_be_met_is_refused_before_any_work() -> None:
    rescore = Rescore(scores_of())
    with pytest.raises(InfeasibleBudget, match="at least 6"):
        select(scores_of(), hp.Budget(keep_heads=4), Iterative(min_heads=2), rescore=rescore)
    assert rescore.masks == []


def test_steps_that_lead_into_a_corner_are_taken_back() -> None:
    """Of two heads of unlike cost the cheap one is removed first; then the budget cannot be met."""
    costs = [[unit_cost(4), unit_cost(1)], [unit_cost(1)] * 2]
    scores = make([site("a", 2), site("b", 2)], [[9, 1], [9, 1]], costs)
    rescore = Rescore(scores)
    budget = hp.Budget(keep_params=(500 + 200) / 1200)  # one head of each, the cheap one of a
    with pytest.raises(InfeasibleBudget):  # by what the first step keeps
        select(scores, budget, "knapsack", must_remove={"a": [1]})
    plan = select(scores, budget, Iterative(steps=3, inner="knapsack"), rescore=rescore)
    assert [mask.kept("a") for mask in rescore.masks] == [(0,)]
    assert (plan.mask.kept("a"), plan.mask.n_kept) == ((1,), 2)
    said = (
        "step 2 of 3 could not meet the budget: the final heads were chosen at once from an earlier"
        " plan (1 plans before the latest); "
    )
    assert plan.notes[-1] == f"knapsack in steps, of which {said}scored anew 1 times."


def test_bundles_and_groups_are_scored_in_their_own_units() -> None:
    balanced = site("a", 4, 2, policy="balanced", kind="self")
    scores = scores_of(0, [balanced, site("b", 4, kind="self"), site("c", 4, kind="cross")])
    rescore, budgets = Rescore(scores), {"self": hp.Budget(keep_heads=4)}
    plan = select(scores, budgets, Iterative(steps=3), rescore=rescore)
    assert plan.mask.n_kept == 8
    kept = set(plan.mask.kept("a"))
    assert len({len(kept & set(group)) for group in balanced.groups}) == 1
    assert {mask.kept("c") for mask in rescore.masks} == {(0, 1, 2, 3)}


# ---------------------------------------------------------------- local search


def test_swaps_lower_the_measured_loss() -> None:
    better = 0
    for seed in range(10):
        loss, scores, budget = pairwise(seed), scores_of(seed), hp.Budget(keep_heads=6)
        start = select(scores, budget, GlobalTopk(min_heads=0))
        plan = select(scores, budget, LocalSearch(min_heads=0), loss=loss)
        before, after = (float(loss([p.mask]).mean()) for p in (start, plan))
        assert after <= before
        better += after < before - 0.1
        assert f"{before:.4g} by global_topk, {after:.4g} after" in plan.notes[-1]
        for one, other in itertools.product(plan.mask, _gone(plan.mask)):
            swapped = (plan.mask - _one(plan.mask, one)) | _one(plan.mask, other)
            assert float(loss([swapped]).mean()) >= after - 1e-5, "a swap that would help"
    assert better >= 8


def _one(mask: HeadMask, head: Any) -> HeadMask:
    return HeadMask.from_keep(
        {s: [head.head] if s == head.site else [] for s in mask.sites}, dict.fromkeys(mask.sites, 4)
    )


def _gone(mask: HeadMask) -> list[Any]:
    return [hp.HeadId(s, h) for s in mask.sites for h in mask.removed(s)]


def test_noise_is_not_fitted() -> None:
    """Heads that differ by noise alone: with a margin the first plan is kept, without one heads are
    swapped, but not for what rounding could be."""
    off, six = np.random.default_rng(5).normal(size=(50, 12)), hp.Budget(keep_heads=6)

    def searched(margin: float, scale: float = 1.0, base: float = 0.0) -> hp.PruningPlan:
        loss = lambda masks: base + scale * (removed(masks) @ off.T)  # noqa: E731
        return select(scores_of(), six, LocalSearch(margin=margin), loss=loss)

    start = select(scores_of(), six)
    assert searched(4.0).mask == start.mask
    assert "after 0 swaps" in searched(4.0).notes[-1]
    assert searched(0.0).mask != start.mask
    assert searched(0.0, 1e-9, 1.0).mask == start.mask


@pytest.mark.parametrize(("most", "at_once"), [(2, 16), (7, 3), (40, 16), (1000, 5)])
def test_measurements_are_bounded_and_never_repeated(most: int, at_once: int) -> None:
    asked_for: list[list[HeadMask]] = []

    def loss(masks: Sequence[HeadMask]) -> Any:
        asked_for.append(list(masks))
        return pairwise(3)(masks)

    selector = LocalSearch(max_losses=most, at_once=at_once)
    plan = select(scores_of(), hp.Budget(keep_heads=6), selector, loss=loss)
    assert sum(map(len, asked_for)) <= most
    assert max(map(len, asked_for)) <= at_once + 1
    swaps = [mask for call in asked_for for mask in call[1:]]
    assert len(set(swaps)) == len(swaps)
    assert f"{sum(map(len, asked_for))} plans measured" in plan.notes[-1]
    value = {hp.HeadId(u.name, u.heads[0]): u.value for u in scores_of().units()}
    start = asked_for[0][0]
    lowest, highest = min(start, key=value.__getitem__), max(_gone(start), key=value.__getitem__)
    allowed = len(start.kept(lowest.site)) > 1 or lowest.site == highest.site
    assert not allowed or swaps[0] == (start - _one(start, lowest)) | _one(start, highest)
    assert select(scores_of(), hp.Budget(keep_heads=6), selector, loss=loss) == plan


def test_a_swap_is_sure_by_the_standard_error_of_paired_differences() -> None:
    """Differences of mean -1 and of sample variance 4/3 at four examples: a standard error of
    1/sqrt(3)."""
    losses = np.array([[5.0, 6.0, 7.0, 8.0], [5.0, 5.0, 5.0, 7.0], [4.0, 5.0, 8.0, 5.0]])
    losses[1] = losses[0] + [-2.0, 0.0, -2.0, 0.0]
    edge = 3**0.5
    assert LocalSearch(margin=edge * 0.999)._better(losses[:2]) == 0
    assert LocalSearch(margin=edge * 1.001)._better(losses[:2]) is None
    losses[2] = losses[0] - 3
    assert LocalSearch(margin=2.0)._better(losses) == 1
    assert LocalSearch(margin=0.0)._better(losses[[0, 0]]) is None


def test_where_nothing_can_be_swapped_the_loss_is_still_said() -> None:
    plan = select(scores_of(), hp.Budget(keep_heads=1.0), "local_search", loss=pairwise(0))
    assert plan.mask.n_kept == 12
    assert "0 by global_topk, 0 after 0 swaps; 1 plans measured" in plan.notes[-1]


def test_settings_are_checked() -> None:
    """More of them: ``tests/selection_answers.json``."""
    with pytest.raises(InvalidValue, match=r"GlobalTopk\.normalise"):
        Iterative(inner_settings={"normalise": "l3"})
    with pytest.raises(InvalidValue, match=r"LocalSearch\.margin"):
        LocalSearch(margin=float("nan"))


# ---------------------------------------------------------------- on real models


def test_both_on_a_model() -> None:
    subject = subject_of("bert")
    batches, options = [subject.batch], {"sites": subject.sites, "progress": False}
    scores = hp.score(subject.model, batches, "fisher", **options)
    budget, selector = hp.Budget(keep_heads=0.5), Iterative(steps=3, inner="quadratic")
    rescore = hp.scoring.rescorer(subject.model, batches, "fisher", **options)
    plan = hp.select(scores, budget, selector, rescore=rescore)
    assert 0 < plan.mask.n_kept <= scores.n_heads / 2
    loss = hp.scoring.loss_of(subject.model, batches, **options)
    found = hp.select(scores, budget, LocalSearch(margin=0.0, max_losses=30), loss=loss)
    start = hp.select(scores, budget)
    before, after = torch.tensor(loss([start.mask, found.mask])).mean(1)
    assert after < before
    assert found.mask.n_kept == start.mask.n_kept
