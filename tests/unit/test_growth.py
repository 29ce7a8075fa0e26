"""What is done with scores takes about twice as long for twice as many heads: counted, not timed.

Counted are the lines of our own code that run, and the most memory that arrays take at a time; work
that looks at all pairs of heads shows in one of them.
"""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import headprune as hp
from headprune.core.codec import EMPTY
from headprune.core.errors import HeadPruneError, InfeasibleBudget
from headprune.core.heads import AttentionSite
from headprune.core.samples import Samples
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.report.explanation import explain
from headprune.scoring import rank_average
from headprune.scoring._agreement import _kendall
from headprune.selection import _close, registry
from tests.reference.agreement import kendall
from tests.reference.close_calls import close
from tests.selection_problems import (
    CURRENCIES,
    SELECTORS,
    asked,
    configured,
    random_scores,
    random_table,
)

PACKAGE = str(Path(hp.__file__).parent)
#: Heads of the smaller scores; the larger ones have four times as many. Work per pair grows
#: sixteenfold, sorting less than fivefold.
FEW, TIMES, MOST = 196, 4, 7.5

Make = Callable[[int], HeadScores]


def scores_of(n_sites: int, n_heads: int, values: Any, errors: Any, seed: int = 0) -> HeadScores:
    matrix = np.random.default_rng(seed).normal(size=(8, n_sites * n_heads))
    heads = tuple(range(n_heads))
    sites = tuple(
        AttentionSite(f"l.{i}", "bert", "self", n_heads, n_heads, 8, 8, heads)
        for i in range(n_sites)
    )
    rows, wide = (
        np.broadcast_to(x, n_sites * n_heads).reshape(n_sites, n_heads).tolist()
        for x in (values, errors)
    )
    samples = Samples.of(matrix)
    found = HeadScores(
        sites,
        tuple(map(tuple, rows)),
        tuple(map(tuple, wide)),
        "a",
        EMPTY,
        8,
        ModelFingerprint("s", "w"),
    )
    return replace(found, samples=samples, data="d")


def shaped(shape: str, n: int) -> tuple[int, int]:
    side = round(n**0.5)
    return {"square": (side, side), "many sites": (n // 2, 2), "single heads": (n, 1)}[shape]


def levels(what: str, n: int) -> tuple[Any, Any]:
    """Values and standard errors."""
    drawn = np.random.default_rng(n).normal(size=n)
    one = np.zeros(n)
    one[n // 3] = 100.0  # whose window holds all the others
    few = np.where(np.arange(n) % 50 == 0, 5.0, 0.0)
    return {
        "certain": (drawn, 0.0),
        "uncertain": (drawn, 10.0),
        "equal": (1.0, 0.0),
        "one uncertain": (drawn, one),
        "some uncertain": (drawn, few),
    }[what]


SHAPES = ("square", "many sites", "single heads")
LEVELS = ("certain", "uncertain", "equal", "one uncertain", "some uncertain")
ACTIONS: dict[str, Callable[[HeadScores], object]] = {
    "select": lambda s: hp.select(s, hp.Budget(keep_heads=0.5)),
    "select without a minimum": lambda s: hp.select(
        s, hp.Budget(keep_heads=0.5), hp.selection.GlobalTopk(min_heads=0)
    ),
    "select uniform": lambda s: hp.select(
        s, hp.Budget(keep_heads=0.6), hp.selection.Uniform(min_heads=0)
    ),
    "select with heads that must stay": lambda s: hp.select(
        s,
        hp.Budget(keep_heads=0.7),
        must_keep={site.name: [0] for site in s.sites[: len(s.sites) // 2]},
    ),
    "agreement": lambda s: hp.agreement(s, replace(s, values=s.values[::-1]), draws=20),
    "agreement with itself": lambda s: hp.agreement(s, s, draws=20),
    "rank_average": lambda s: rank_average([s, s], draws=20),
    "stable": lambda s: s.stable(s.n_heads // 2, draws=20),
    "lowest": lambda s: s.lowest(s.n_heads // 3, draws=20),
    "rank_interval": lambda s: s.rank_interval(draws=20),
    "explain": lambda s: explain(
        hp.select(s, hp.Budget(keep_heads=0.5), hp.selection.GlobalTopk(min_heads=0)), s
    ),
}


def cost(action: Callable[[], object]) -> tuple[int, int]:
    """Lines of the package that an action runs, and the bytes that it has at most at a time."""
    lines = 0

    def traced(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        ours = frame.f_code.co_filename.startswith(
            (PACKAGE, "<string>")
        )  # dataclasses write methods so
        return traced if ours else None

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        action()
    finally:
        sys.settrace(before)
    tracemalloc.start()
    try:
        action()
        return lines, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


#: Heads whose standard errors differ matter to close calls alone.
CASES = [
    (name, what)
    for name in ACTIONS
    for what in (LEVELS if name.startswith("select") else LEVELS[:3])
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "what"), CASES)
def test_work_grows_with_the_heads_and_not_with_their_pairs(
    name: str, shape: str, what: str
) -> None:
    few, many = (scores_of(*shaped(shape, n), *levels(what, n)) for n in (FEW, FEW * TIMES))
    try:
        ACTIONS[name](few)
        small, large = cost(lambda: ACTIONS[name](few)), cost(lambda: ACTIONS[name](many))
    except InfeasibleBudget:
        assert shape == "single heads", "there a head of each site must stay"
        return
    assert small[0] > 20
    assert large[0] < MOST * small[0], "lines"
    assert large[1] < MOST * small[1], "bytes"


@pytest.mark.parametrize("seed", range(40))
def test_kendall_is_that_of_all_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    a, b = rng.integers(0, [2, 5, 1000][seed % 3], size=(2, 5, n)).astype(float)
    if seed % 4 == 0:
        b[0] = 1.0  # no order
        b[1] = a[1]
    assert_allclose(
        _kendall(a, b), [kendall(x, y) for x, y in zip(a, b, strict=True)], rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("name", [n for n in SELECTORS if not registry.get(n).needs])
@pytest.mark.parametrize("seed", range(12))
def test_close_calls_are_those_of_all_pairs(
    seed: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of unlike size and cost, ties, sites that have their least, budgets of every
    currency."""
    plain, seen = _close._Swaps.close, []

    def compared(swaps: Any, units: list[Any], others: list[Any]) -> list[Any]:
        found = plain(swaps, units, others)
        assert [u.position for u in found] == [u.position for u in close(swaps, units, others)]
        seen.append(len(units) * len(others))
        return found

    monkeypatch.setattr(_close._Swaps, "close", compared)
    draw = random.Random(f"{name} {seed}")
    for _ in range(10):
        scores = random_scores(draw.randrange(10**6), dear=draw.random() < 0.5)
        ties = tuple(tuple(round(v, draw.choice((0, 1, 8))) for v in row) for row in scores.values)
        errors = tuple(tuple(draw.choice((0.0, 0.1, 0.5, 5.0)) for _ in row) for row in ties)
        scores = replace(scores, values=ties, standard_errors=errors, samples=None)
        table = random_table(scores, draw.randrange(10**6))
        for kind in CURRENCIES:
            given = {"latency": table} if kind == "speedup" else {}
            with suppress(HeadPruneError):  # a budget that cannot be met
                hp.select(
                    scores, asked(kind, draw.choice((0.4, 0.6, 0.8))), configured(name), **given
                )
    assert sum(seen) > 0
