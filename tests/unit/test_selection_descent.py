"""What the selector ``quadratic`` is made of, each part by itself against its definition written
out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import headprune as hp
from headprune.core.samples import Curvature
from headprune.core.scores import HeadScores
from headprune.selection import Problem, _feasible_moves
from headprune.selection._budget import problem_of
from headprune.selection._quadratic_search import QuadraticSearch
from tests.selection_problems import make, site, unit_cost

Units = frozenset[int]


def search_of(
    seed: int, sizes: Any, keep_heads: int, dear: bool = False, ties: bool = False, **rules: Any
) -> QuadraticSearch:
    """Of random scores whose heads are tied to each other; with ``ties`` of small whole numbers."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    factors = rng.integers(-1, 2, size=(n // 2, n)) if ties else rng.normal(size=(2 * n, n))
    matrix = (factors.T @ factors).astype(np.float64)
    sites = [site(f"s{i}", size) for i, size in enumerate(sizes)]
    costs = [[unit_cost(int(rng.integers(1, 5))) for _ in s.units] for s in sites] if dear else None
    values = np.split(np.diag(matrix) / 2, np.cumsum(sizes)[:-1])
    scores: HeadScores = replace(make(sites, values, costs), curvature=Curvature.of(matrix))
    budget = hp.Budget(keep_params=keep_heads / n) if dear else hp.Budget(keep_heads=keep_heads)
    return QuadraticSearch(replace(problem_of(scores, budget, None), **rules), matrix)


def objective(search: QuadraticSearch, removed: Units) -> float:
    return sum(search.matrix[i, j] for i in removed for j in removed) / 2


def flags(search: QuadraticSearch, removed: Units) -> Any:
    return np.array([i in removed for i in range(len(search.moves.positions))])


def units(removed: Any) -> Units:
    return frozenset(map(int, np.flatnonzero(removed)))


def allowed(problem: Problem, search: QuadraticSearch, removed: Units) -> bool:
    keep = frozenset(p for i, p in enumerate(search.moves.positions) if i not in removed)
    return problem.lawful(keep) and problem.fits(keep)


RULES: tuple[dict[str, Any], ...] = (
    {},
    {"min_heads": 2},
    {"multiple_of": 2, "min_heads": 2},
    {"must_keep": frozenset({(0, 0)}), "must_remove": frozenset({(1, 1)})},
)


def test_the_value_is_half_of_the_quadratic_form() -> None:
    search = search_of(0, (4, 3), 3)
    for removed in map(frozenset, itertools.combinations(range(7), 3)):
        assert search.value(flags(search, removed)) == pytest.approx(objective(search, removed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_elimination_takes_out_what_raises_it_least_for_its_cost(seed: int, rules: Any) -> None:
    search = search_of(seed, (6, 5, 4), 6 + seed % 3, dear=seed % 2 == 1, **rules)
    problem, places = search.problem, search.moves.positions
    removed: Units = frozenset(i for i, p in enumerate(places) if p in problem.must_remove)
    while not allowed(problem, search, removed):
        rates = []
        kept = frozenset(p for i, p in enumerate(places) if i not in removed)
        for i, (place, unit) in enumerate(places):
            fewer = kept - {(place, unit)}
            saved = problem.cost(kept) - problem.cost(fewer)
            n_heads = problem.heads(place, {u for p, u in fewer if p == place})
            lawful = n_heads in problem.counts[place] and (place, unit) not in problem.must_keep
            if i not in removed and lawful and saved > 0:
                rates.append(
                    ((objective(search, removed | {i}) - objective(search, removed)) / saved, i)
                )
        if not rates:
            assert search.backward_elimination() is None
            return
        removed |= {min(rates)[1]}
    found = search.backward_elimination()
    assert found is not None
    assert units(found) == removed


@pytest.mark.parametrize("seed", range(4))
def test_a_large_site_has_a_choice_for_every_number_of_heads(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unit after unit is removed, always the one that is missed least beside the others."""
    monkeypatch.setattr(_feasible_moves, "ENUMERATED", 3)
    search = search_of(seed, (7, 6, 3), 6, **RULES[seed % 4])
    moves, problem = search.moves, search.problem
    for number, (span, choices) in enumerate(zip(moves.spans, search.choices, strict=True)):
        free = [int(i) for i in span if moves.free[i]]
        if len(free) <= 3:
            continue
        removed = frozenset(int(i) for i in span if moves.positions[i] in problem.must_remove)
        expected = {removed}
        while left := [i for i in free if i not in removed]:
            removed |= {min(left, key=lambda i: (objective(search, removed | {i}), i))}
            expected.add(removed)
        expected = {out for out in expected if len(span) - len(out) in problem.counts[number]}
        found = [frozenset(int(span[u]) for u in np.flatnonzero(row)) for row in choices.rows]
        assert set(found) == expected
        assert choices.own.tolist() == pytest.approx([objective(search, out) for out in found])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [1, 2, 40])
def test_the_best_move_is_the_best_of_the_shortlist(seed: int, most: int) -> None:
    search = search_of(seed, (20, 20), 20, ties=seed % 2 == 1)
    rng = np.random.default_rng(seed)
    removed = units(rng.permutation(40) < 22)
    now = objective(search, removed)
    outs = sorted(set(range(40)) - removed, key=lambda i: (objective(search, removed | {i}), i))[
        :most
    ]
    backs = sorted(removed, key=lambda i: (objective(search, removed - {i}), i))[:most]
    moves = [
        (objective(search, (removed | {a}) - {b}) - now, (a, b))
        for a in [*sorted(outs), -1]
        for b in [*sorted(backs), -1]
        if (a, b) != (-1, -1) and allowed(search.problem, search, (removed | {a}) - {b} - {-1})
    ]
    rise, out, back = search._best_move(flags(search, removed), search.moves.free, most)
    best = min(r for r, _ in moves)
    assert rise == pytest.approx(best)
    first = next(m for r, m in moves if r <= best + 1e-9)
    assert (*units(out), *units(back)) == tuple(i for i in first if i >= 0), "of equals the first"


@pytest.mark.parametrize("seed", range(3))
def test_the_rearrangement_puts_units_in_by_rising_diagonal_of_equals_the_first(seed: int) -> None:
    """Sites wide enough that an unstable sort shows; Kwon's order written out."""
    search = search_of(seed, (40, 36), 38, ties=True)
    removed = units(np.random.default_rng(seed).permutation(76) < 38)
    expected = removed
    for span in search.moves.spans:
        out = [int(i) for i in span if i in removed]
        rest = [int(i) for i in span if i not in removed]
        for unit in sorted(rest, key=lambda i: (search.matrix[i, i], i)):
            out = sorted([*out, unit])
            least = min(out, key=lambda i: (objective(search, frozenset(out) - {i}), i))
            out.remove(least)
        expected = expected - {int(i) for i in span} | set(out)
    assert units(search.rearranged(flags(search, removed))) == expected


@pytest.mark.parametrize(
    ("costs", "values", "kept"),
    [
        ([1, 2, 3], [3.0, 2.0, 1.0], [0, 1, 2]),
        ([1, 2, 3], [3.0, 3.0, 1.0], [0, 2]),
        ([2, 2, 1], [1.0, 1.0, 2.0], [2, 0]),
        ([1, 2], [1.0, 5.0], [0]),
    ],
)
def test_the_cheapest_points_are_beaten_by_none(
    costs: list[int], values: list[float], kept: list[int]
) -> None:
    assert _feasible_moves.undominated_points(np.array(costs), np.array(values)).tolist() == kept
