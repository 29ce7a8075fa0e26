"""Close calls at the cut: what the plan's notes name is what swapping two units and looking
finds."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from headprune.core.errors import InfeasibleBudget
from headprune.core.plan import Budget
from headprune.selection import registry
from headprune.selection._api import select
from headprune.selection._close import close_calls
from headprune.selection._task import SelectionTask
from headprune.selection.global_topk import GlobalTopk
from headprune.selection.uniform import Uniform
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


def scores_with(values, errors, **more):
    """Scores of sites of plain heads, a, b, ..., with standard errors."""
    found = make(
        [site(name, len(row), **more) for name, row in zip("abcdef", values, strict=False)], values
    )
    return replace(found, standard_errors=None if errors is None else tuple(map(tuple, errors)))


def note_of(scores, budget, selector=None, **more):
    """The plan's note on close calls; empty where there is none."""
    notes = select(scores, budget, selector, **more).notes
    found = [note for note in notes if note.startswith("Close call")]
    assert len(found) <= 1
    return found[0] if found else ""


# Four are kept: 9, 8, 5.2 and 5.1; 5.0 is 0.1 and 0.2 below.
NEAR = [[1.0, 5.0, 5.2, 9.0], [1.5, 5.1, 8.0, 2.0]]
TIED = [[1.0, 2.0, 2.0, 3.0]]
#: 100 and 110 are far apart for one site and close for another that counts by the hundreds.
UNLIKE = [[1.0, 2.0, 3.0], [100.0, 205.0, 300.0]], [[0.01] * 3, [10.0] * 3]
#: The only head of a site is kept whatever the others' scores: changing places is not lawful.
LONELY = [[1.0], [1.1, 5.0]], [[0.5], [0.5, 0.5]]
WIDE = [[0.3] * 3] * 2
TEN = [[1.0 + i / 100 for i in range(10)]], [[1.0] * 10]


@pytest.mark.parametrize(
    ("values", "errors", "count", "selector", "said"),
    [
        (NEAR, [[0.1] * 4] * 2, 4, None, "b[1] is kept, a[1] removed"),
        (NEAR, [[0.15] * 4] * 2, 4, None, "b[1] and 1 more are kept, a[1] removed"),
        (NEAR, [[0.01] * 4] * 2, 4, None, ""),
        (*TEN, 5, None, "a[5] and 4 more are kept, a[4] and 4 more removed"),
        (TIED, None, 2, None, "a[1] is kept, a[2] removed"),
        (TIED, None, 3, None, ""),
        ([[1.0, 2.0, 2.0 + 1e-15, 3.0]], None, 2, None, ""),
        (*LONELY, 2, None, ""),
        (*LONELY, 2, GlobalTopk(min_heads=0), "b[0] is kept, a[0] removed"),
        (*UNLIKE, 4, None, ""),
        (*UNLIKE, 3, GlobalTopk(normalise="l2"), "b[1] is kept, a[1] removed"),
        (*UNLIKE, 3, GlobalTopk(normalise="zscore"), "b[1] is kept, a[1] removed"),
        # uniform compares the heads of one site only: 5.0 and 5.2, 5.0 and 5.1 do not compete
        ([[1.0, 5.0, 9.0], [1.4, 3.0, 5.2]], WIDE, 4, Uniform(), ""),
        ([[1.0, 5.0, 9.0], [5.1, 6.0, 7.0]], WIDE, 4, Uniform(), ""),
        ([[4.8, 5.0, 9.0], [1.4, 3.0, 5.2]], WIDE, 4, Uniform(), "a[1] is kept, a[0] removed"),
    ],
)
def test_heads_on_either_side_within_their_error_are_named(values, errors, count, selector, said):
    why = "are equal, so place decides"
    if errors:
        why = "differ by no more than their standard error"
    note = note_of(scores_with(values, errors), Budget(keep_heads=count), selector)
    assert note == (f"Close call: {said}; their scores {why}." if said else "")


def test_what_is_told_is_no_close_call():
    scores, two = scores_with([[1.0, 2.0, 2.1, 3.0]], [[0.5] * 4]), Budget(keep_heads=2)
    assert "a[2] is kept, a[1] removed" in note_of(scores, two)
    assert note_of(scores, two, must_keep={"a": [2]}, must_remove={"a": [0]}) == ""
    assert note_of(scores, two, must_remove={"a": [0, 1]}) == ""
    assert note_of(scores, Budget(keep_heads=4)) == "", "where all are kept nothing was decided"


@pytest.mark.parametrize("name", [name for name in SELECTORS if registry.get(name).needs])
def test_a_selector_that_asks_for_more_than_scores_has_no_close_calls(name):
    scores, more = fitted(name, scores_with([[1.0, 1.0, 1.0, 1.0]] * 2, [[1.0] * 4] * 2))
    assert note_of(scores, Budget(keep_heads=4), name, **more) == ""


def test_groups_with_budgets_of_their_own_speak_for_themselves():
    sites = [site("a", 3, kind="self"), site("b", 3, kind="causal")]
    scores = make(sites, [[1.0, 2.0, 2.1], [1.0, 2.0, 5.0]])
    scores = replace(scores, standard_errors=((0.1,) * 3,) * 2)
    note = note_of(scores, {"self": Budget(keep_heads=1), "causal": Budget(keep_heads=1)})
    assert note.startswith("Close call: a[2] is kept, a[1] removed;")


@pytest.mark.parametrize("kind", CURRENCIES)
@pytest.mark.parametrize("name", [name for name in SELECTORS if not registry.get(name).needs])
def test_close_calls_are_those_that_trying_every_swap_finds(name, kind, monkeypatch):
    """Ragged sites, groups, unlike costs, rules: against Problem.lawful and Problem.fits."""
    monkeypatch.setattr("headprune.selection._close._NAMED", 3)
    seen = quiet = 0
    for seed in range(40):
        rng = random.Random(seed)
        scores = random_scores(seed, dear=seed % 2 == 1, highest=9)
        errors = tuple(tuple(rng.choice([0.0, 0.4, 1.5, 5.2]) for _ in r) for r in scores.values)
        scores = replace(scores, standard_errors=errors if seed % 4 else None)
        rules = {"min_heads": rng.randint(0, 2), "multiple_of": rng.choice([1, 1, 2])}
        if name == "global_topk":
            rules["normalise"] = rng.choice(["none", "l2", "zscore"])
        selector = configured(name, **rules)
        told = {scores.sites[0].name: [scores.sites[0].heads[0]]} if seed % 3 == 0 else None
        table = random_table(scores, seed) if kind == "speedup" else None
        task = SelectionTask.of(scores, told, None, None, None, table)
        try:
            problem = task.problem(asked(kind, rng.uniform(0.6, 0.95)), selector)
            keep = selector.keep(problem)
        except (InfeasibleBudget, ValueError):
            continue
        close = slow(problem, selector, keep)
        (note,) = close_calls(problem, selector, keep) or ("",)
        seen, quiet = seen + bool(close), quiet + (not close)
        for side in ({a for a, _ in close}, {b for _, b in close}):
            labels = [f"{scores.sites[s].name}{list(scores.sites[s].units[u])}" for s, u in side]
            assert sum(label in note for label in labels) >= min(len(side), 3), note
            assert len(side) <= 3 or f"and {len(side) - 3} more" in note
        assert bool(note) == bool(close)
    assert seen > 3
    assert quiet > 3


def slow(problem, selector, keep):
    """Pairs of a kept unit and a removed one which may change places, one by one."""
    units, pairs = {(u.site, u.unit): u for u in problem.scores.units()}, set()

    def scaled(position):
        unit, (shift, divisor) = units[position], selector.scale(problem.scores.values[position[0]])
        return (unit.value - shift) / divisor, (unit.standard_error or 0.0) / divisor

    told = problem.must_keep | problem.must_remove
    for a, b in itertools.product(keep - told, units.keys() - keep - told):
        (mine, error), (theirs, other) = scaled(a), scaled(b)
        near = abs(mine - theirs) <= math.sqrt(error**2 + other**2)
        swapped = keep - {a} | {b}
        compared = selector.across or a[0] == b[0]
        if near and compared and problem.lawful(swapped) and problem.fits(swapped):
            pairs.add((a, b))
    return pairs
