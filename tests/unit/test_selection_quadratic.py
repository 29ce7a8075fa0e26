"""Quadratic selection against all choices there are, and against Kwon's rearrangement written
out."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import headprune as hp
from headprune.core.errors import InfeasibleBudget, InvalidValue
from headprune.core.samples import Curvature
from headprune.core.scores import HeadScores
from headprune.selection import GlobalTopk, Problem, Quadratic, _feasible_moves
from headprune.selection._api import select
from headprune.selection._budget import problem_of
from tests.selection_problems import CURRENCIES, asked, make, random_table, site, unit_cost

SHAPES = [(4, 4, 4), (3, 3, 3, 3), (6, 6), (2,) * 6]


def curved(seed: int, sizes: Any, rank: int, dear: bool = False, sites: Any = None) -> HeadScores:
    """Scores whose heads are strongly tied to each other; ``rank`` examples behind them."""
    rng = np.random.default_rng(seed)
    sites = sites or [site(f"s{i}", n) for i, n in enumerate(sizes)]
    n = sum(len(s.units) for s in sites)
    gradients = rng.normal(size=(rank, n)) * np.exp(rng.normal(size=n))
    gradients += rng.normal(size=(rank, 1)) * rng.normal(size=n)
    matrix = gradients.T @ gradients / rank
    values = np.split(np.diag(matrix) / 2, np.cumsum([len(s.units) for s in sites])[:-1])
    costs = [[unit_cost(int(rng.integers(1, 5))) for _ in s.units] for s in sites] if dear else None
    return replace(make(sites, values, costs), curvature=Curvature.of(matrix))


def objective(scores: HeadScores, keep: Any) -> float:
    """Written out from the definition."""
    m = np.array([(u.site, u.unit) in keep for u in scores.units()], float)
    assert scores.curvature is not None
    return float((1 - m) @ scores.curvature.matrix @ (1 - m) / 2)


def problem_for(scores: HeadScores, budget: Any, selector: Any, **changes: Any) -> Problem:
    rules = {"min_heads": selector.min_heads, "multiple_of": selector.multiple_of}
    return replace(problem_of(scores, budget, changes.pop("latency", None)), **rules, **changes)


def best_of_all(scores: HeadScores, problem: Problem) -> float | None:
    """Over all subsets there are, the lowest objective first, until one is allowed."""
    assert scores.curvature is not None
    places = list(problem.positions())
    removed = np.array(list(itertools.product((0.0, 1.0), repeat=len(places))))
    values = np.einsum("ij,jk,ik->i", removed, scores.curvature.matrix, removed) / 2
    for i in np.argsort(values, kind="stable"):
        keep = frozenset(itertools.compress(places, removed[i] == 0))
        if problem.fits(keep) and problem.lawful(keep):
            return float(values[i])
    return None


def kwon(scores: HeadScores, keep: Any) -> frozenset[tuple[int, int]]:
    """Greedy rearrangement, layer by layer, with sums over example gradients spelled as sums over
    the block."""
    assert scores.curvature is not None
    matrix, places = scores.curvature.matrix, [(u.site, u.unit) for u in scores.units()]
    removed = []
    for s in range(len(scores.sites)):
        here = [i for i, p in enumerate(places) if p[0] == s]
        masked = [i for i in here if places[i] not in keep]
        order = sorted((i for i in here if places[i] in keep), key=lambda i: (matrix[i, i], i))
        for i in order if masked else []:
            masked = sorted([*masked, i])
            rest = [[k for k in masked if k != j] for j in masked]
            masked = min(rest, key=lambda row: matrix[np.ix_(row, row)].sum())
        removed += masked
    return frozenset(p for i, p in enumerate(places) if i not in removed)


# ---------------------------------------------------------------- against all choices


@pytest.mark.parametrize(("rank", "share", "worst"), [(4, 0.8, 4.0), (8, 0.9, 1.4), (40, 1.0, 1.0)])
def test_it_finds_the_best_choice_nearly_always(rank: int, share: float, worst: float) -> None:
    """Of 64 such problems of 12 units each: 88 %, 94 % and 100 %, where Kwon's rearrangement has
    11 %, 16 % and 28 %, and global_topk 11 %, 14 % and 27 %; the fewer examples, the nearer the
    objective can be brought to zero."""
    ratios, greedy = [], []
    for seed in range(32):
        scores, min_heads = curved(seed, SHAPES[seed % 4], rank), (seed // 4) % 2
        budget = hp.Budget(keep_heads=(0.5, 0.7)[seed // 8 % 2])
        selector = Quadratic(min_heads=min_heads)
        problem = problem_for(scores, budget, selector)
        best = best_of_all(scores, problem)
        assert best is not None
        ratios.append(objective(scores, selector.keep(problem)) / best)
        first = GlobalTopk(min_heads=min_heads).keep(problem)
        greedy.append(objective(scores, kwon(scores, first)) / best)
    assert min(ratios) > 1 - 1e-9
    assert np.mean([r < 1 + 1e-9 for r in ratios]) >= share
    assert max(ratios) <= worst + 1e-9
    assert np.mean([r < 1 + 1e-9 for r in greedy]) < 0.4


TOLD = {"must_keep": frozenset({(0, 3)}), "must_remove": frozenset({(1, 2)})}


@pytest.mark.parametrize("kind", CURRENCIES)
def test_every_currency_and_rule_against_all_choices(kind: str) -> None:
    shapes = [site("a", 4), site("b", 6, 3), site("c", 3, heads=(0, 2))]
    exact = met = 0
    for seed in range(18):
        scores = curved(seed, None, 30, dear=kind != "speedup" and seed % 2 == 1, sites=shapes)
        table = {"latency": random_table(scores, seed, noise=seed % 2)} if kind == "speedup" else {}
        selector = Quadratic(min_heads=seed % 3, multiple_of=1 + (seed % 4 == 3))
        budget = asked(kind, (0.75, 0.85)[seed % 2])
        problem = problem_for(scores, budget, selector, **table, **(TOLD if seed % 5 else {}))
        best = best_of_all(scores, problem)
        try:
            keep = selector.keep(problem)
        except InfeasibleBudget:
            # of dear units the best heads, not the cheapest, make up the minimum
            assert best is None or seed % 3
            continue
        assert problem.fits(keep)
        assert problem.lawful(keep)
        assert best is not None
        met += 1
        exact += objective(scores, keep) <= best * (1 + 1e-9) + 1e-12
        assert objective(scores, keep) <= 1.5 * best + 1e-12
    assert met >= 12
    assert exact >= 0.9 * met


def test_it_is_never_worse_than_greedy() -> None:
    for seed in range(12):
        shape, rank = [(12, 12, 12), (5, 9, 14), (16, 16)][seed % 3], [4, 12, 60][seed % 3]
        scores = curved(seed, shape, rank, dear=seed % 2 == 1)
        selector = Quadratic(min_heads=seed % 4)
        budget = hp.Budget(keep_macs=(0.65, 0.8)[seed // 6], length=10)
        problem = problem_for(scores, budget, selector)
        first = GlobalTopk(min_heads=selector.min_heads).keep(problem)
        bounds, other = [first], kwon(scores, first)
        if problem.fits(other) and problem.lawful(other):
            bounds.append(other)
        found = objective(scores, selector.keep(problem))
        assert found <= min(objective(scores, keep) for keep in bounds) * (1 + 1e-9)


def test_kwons_search_is_theirs_and_nothing_more() -> None:
    differ = 0
    for seed in range(12):
        scores = curved(seed, (6, 6, 6), 40)
        selector = Quadratic(search="kwon", min_heads=0)
        problem = problem_for(scores, hp.Budget(keep_heads=9), selector)
        theirs = selector.keep(problem)
        assert theirs == kwon(scores, GlobalTopk(min_heads=0).keep(problem))
        ours = Quadratic(min_heads=0).keep(problem)
        differ += objective(scores, theirs) > objective(scores, ours)
    assert differ


# ---------------------------------------------------------------- what it sees


@pytest.mark.parametrize(("tie", "kept"), [(1.0, ()), (2.5, (0,)), (-1.0, ())])
def test_of_two_heads_that_do_the_same_one_is_kept(tie: float, kept: tuple[int, ...]) -> None:
    """Alone, neither is missed; both are, together. The diagonal cannot tell them from an idle
    head."""
    matrix = np.diag([1.0, 1.0, 3.0, 4.0])
    matrix[0, 1] = matrix[1, 0] = tie
    scores = make([site("a", 2), site("b", 2)], [[0.5, 0.5], [1.5, 2.0]])
    scores = replace(scores, curvature=Curvature.of(matrix))
    budget = hp.Budget(keep_heads=2)
    assert select(scores, budget, GlobalTopk(min_heads=0)).mask.kept("a") == ()
    assert select(scores, budget, Quadratic(min_heads=0)).mask.kept("a") == kept


def test_without_ties_between_heads_it_is_the_diagonal() -> None:
    values = [[5.0, 1.0, 4.0], [2.0, 3.0, 0.5]]
    matrix = np.diag(2 * np.concatenate(values))
    scores = replace(make([site("a", 3), site("b", 3)], values), curvature=Curvature.of(matrix))
    for n in range(2, 7):
        budget = hp.Budget(keep_heads=n)
        assert select(scores, budget, "quadratic").mask == select(scores, budget).mask


def test_heads_that_cost_nothing_are_kept_where_there_is_room() -> None:
    scores = make([site("a", 2), site("b", 2)], [[1, 0], [0, 2]])
    scores = replace(scores, curvature=Curvature.of(np.diag([2.0, 0.0, 0.0, 4.0])))
    for n in (3, 4):
        assert select(scores, hp.Budget(keep_heads=n), "quadratic").mask.n_kept == n


def test_large_sites_are_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites of more than 12 units have no table of all subsets; with none at all the result is as
    good here."""
    scores = curved(3, (6, 6), 40)
    expected = select(scores, hp.Budget(keep_heads=6), "quadratic")
    monkeypatch.setattr(_feasible_moves, "ENUMERATED", 0)
    assert select(scores, hp.Budget(keep_heads=6), "quadratic").mask == expected.mask


@pytest.mark.parametrize("kind", CURRENCIES)
def test_moves_and_choices_are_those_that_the_problem_allows(kind: str) -> None:
    """Entry by entry against ``Problem.lawful`` and ``Problem.fits``, for units of unlike size and
    price."""
    allowed = refused = 0
    bundles = ((0, 1), (2,), (3,), (4,))
    shapes = [site("a", 4), replace(site("b", 5), bundles=bundles), site("c", 3, heads=(0, 2))]
    for seed in range(12):
        scores = curved(seed, None, 9, dear=kind != "speedup", sites=shapes)
        table = random_table(scores, seed, noise=1.0) if kind == "speedup" else None
        selector = Quadratic(min_heads=seed % 3, multiple_of=1 + (seed % 3 == 2))
        rules = {"latency": table, **(TOLD if seed % 2 else {})}
        problem = problem_for(scores, asked(kind, 0.8), selector, **rules)
        assert scores.curvature is not None
        moves = _feasible_moves.FeasibleMoves(problem)
        removed = np.random.default_rng(seed).uniform(size=len(moves.positions)) < 0.4
        removed &= [p not in problem.must_keep for p in moves.positions]
        removed |= [p in problem.must_remove for p in moves.positions]
        keep = frozenset(itertools.compress(moves.positions, ~removed))
        if not problem.lawful(keep):
            continue
        assert moves.costs(removed).tolist() == [
            problem.site_cost(i, u) for i, u in enumerate(problem.by_site(keep))
        ]
        out, back = np.flatnonzero(moves.free & ~removed), np.flatnonzero(moves.free & removed)
        found = moves.pairs(out, back, removed)
        for (i, a), (j, b) in itertools.product(enumerate([*out, None]), enumerate([*back, None])):
            new = keep - ({moves.positions[a]} if a is not None else set())
            new |= {moves.positions[b]} if b is not None else set()
            assert found[i, j] == (problem.lawful(new) and problem.fits(new)), (a, b)
            allowed, refused = allowed + found[i, j], refused + (not found[i, j])
        for place, span in enumerate(moves.spans):
            choices = moves.choices(place, scores.curvature.matrix[np.ix_(span, span)])
            units = [[u for u, r in enumerate(row) if not r] for row in choices.rows]
            assert choices.costs.tolist() == [problem.site_cost(place, u) for u in units]
            assert {problem.heads(place, u) for u in units} == problem.counts[place]
    assert allowed > 20
    assert refused > 20


def test_groups_of_sites_and_bundles_have_their_own_curvature() -> None:
    balanced = site("b", 4, 2, kind="self", policy="balanced")
    sites = [site("a", 4, kind="self"), balanced, site("c", 3, kind="cross")]
    scores = curved(1, None, 30, sites=sites)
    alone = select(scores.of("cross"), hp.Budget(keep_heads=2), "quadratic")
    both = select(scores, {"cross": hp.Budget(keep_heads=2)}, "quadratic")
    assert both.mask.kept("c") == alone.mask.kept("c")
    kept = set(select(scores, hp.Budget(keep_heads=7), "quadratic").mask.kept("b"))
    assert len({len(kept & set(group)) for group in balanced.groups}) == 1


def test_it_says_why_there_is_no_curvature() -> None:
    """Without a reason: ``tests/selection_answers.json``."""
    scores = replace(curved(0, (3, 3), 9), curvature=None)
    lost = replace(scores, notes=("a first note", "the curvature was taken away", "a last note"))
    with pytest.raises(InvalidValue, match=r"without. the curvature was taken away$"):
        select(lost, hp.Budget(keep_heads=3), "quadratic")
