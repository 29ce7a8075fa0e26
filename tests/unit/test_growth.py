"""What is done with scores takes about twice as long for twice as many heads: counted, not timed.

Counted are the lines of our own code that run, and the most memory that arrays take at a time; work
that looks at all pairs of heads shows in one of them.
"""

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headprune as hp
from headprune.core.samples import Samples
from headprune.core.scores import HeadScores
from headprune.report.explanation import explain
from headprune.scoring import rank_average
from tests.selection_problems import make, site

PACKAGE = str(Path(hp.__file__).parent)
#: Heads of the smaller scores; the larger ones have four times as many. Work per pair grows
#: sixteenfold, sorting less than fivefold.
FEW, TIMES, MOST = 64, 4, 7.5

Make = Callable[[int], HeadScores]


def scores_of(n_sites, n_heads, values, errors):
    """Also with samples, which intervals of ranks are drawn from."""
    n = n_sites * n_heads
    rows, wide = (
        np.broadcast_to(x, n).reshape(n_sites, n_heads).tolist() for x in (values, errors)
    )
    scores = make([site(f"l.{i}", n_heads) for i in range(n_sites)], rows)
    samples = Samples.of(np.random.default_rng(0).normal(size=(8, n)))
    return replace(scores, standard_errors=tuple(map(tuple, wide)), samples=samples, data="d")


def shaped(shape, n):
    side = round(n**0.5)
    return {"square": (side, side), "many sites": (n // 2, 2), "single heads": (n, 1)}[shape]


def levels(what, n):
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


HALF = hp.Budget(keep_heads=0.5)
FREE = hp.selection.GlobalTopk(min_heads=0)
ACTIONS = {
    "select without a minimum": lambda s: hp.select(s, HALF, FREE),
    "select uniform": lambda s: hp.select(
        s, hp.Budget(keep_heads=0.6), hp.selection.Uniform(min_heads=0)
    ),
    "select with heads that must be kept": lambda s: hp.select(
        s,
        hp.Budget(keep_heads=0.7),
        must_keep={site.name: [0] for site in s.sites[: len(s.sites) // 2]},
    ),
    "agreement": lambda s: hp.agreement(s, replace(s, values=s.values[::-1]), draws=20),
    "rank_average": lambda s: rank_average([s, s], draws=20),
    "stable": lambda s: s.stable(s.n_heads // 2, draws=20),
    "rank_interval": lambda s: s.rank_interval(draws=20),
    "explain": lambda s: explain(hp.select(s, HALF, FREE), s),
}


def cost(action):
    """Lines of the package that an action runs, and the bytes that it has at most at a time."""
    lines = 0

    def traced(frame, event, _):
        nonlocal lines
        lines += event == "line"
        # dataclasses write methods in "<string>"
        return traced if frame.f_code.co_filename.startswith((PACKAGE, "<string>")) else None

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


#: Shapes and levels of every action; and of close calls, where standard errors matter, too.
USUAL = [("square", "uncertain"), ("many sites", "equal"), ("single heads", "certain")]
CLOSE = [
    ("square", "one uncertain"),
    ("many sites", "some uncertain"),
    ("single heads", "uncertain"),
]
CASES = [(name, *case) for name in ACTIONS for case in USUAL]
CASES.remove(("select uniform", *USUAL[2]))  # a budget of 60 % cannot be met one head a site
CASES.remove(("select with heads that must be kept", *USUAL[2]))
CASES += [("select without a minimum", *case) for case in CLOSE]


@pytest.mark.parametrize(("name", "shape", "what"), CASES)
def test_work_grows_with_the_heads_and_not_with_their_pairs(name, shape, what):
    few, many = (scores_of(*shaped(shape, n), *levels(what, n)) for n in (FEW, FEW * TIMES))
    ACTIONS[name](few)
    small, large = cost(lambda: ACTIONS[name](few)), cost(lambda: ACTIONS[name](many))
    assert small[0] > 20
    assert large[0] < MOST * small[0], "lines"
    assert large[1] < MOST * small[1], "bytes"
