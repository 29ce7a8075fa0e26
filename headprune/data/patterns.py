"""How long a regular expression may search in the name of a module: those of other people's files
are asked first."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser as parser
else:
    import sre_parse as parser

#: Characters of a long name of a module, and of the longest pattern that is read.
LONGEST, _READ = 64, 100_000
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_ONE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY", "GROUPREF", "FAILURE")


def work(pattern: str) -> float:
    """Steps that a search for a pattern takes at worst in a name of ``LONGEST`` characters, from
    above.

    Every element counts once for every way in which those before it can match: 64 ways for each
    ``*`` or ``+``, which multiply, and as many ways as a repeated group has for every repetition.
    Infinite for what cannot be read.

    >>> work(r"(.*)layer(.*)") < 64**3, work("([a-z]+)+!") > 64**9, work("(")
    (True, True, inf)
    """
    if len(pattern) > _READ:
        return math.inf
    try:
        return _cost(parser.parse(pattern).data)[1]
    except (re.error, RecursionError, OverflowError):
        return math.inf


def _cost(elements: Iterable[Any]) -> tuple[float, float]:
    """Ways in which a row of elements can match, and steps that it takes to try them all."""
    ways, steps = 1.0, 1.0
    for kind, given in elements:
        more, each = _of(str(kind), given)
        steps += ways * each
        ways *= more
    return ways, steps


def _of(kind: str, given: Any) -> tuple[float, float]:
    """The same of one element, as Python's parser tells it."""
    if kind in _ONE:
        return 1.0, 1.0
    if kind == "SUBPATTERN":
        return _cost(given[-1])
    if kind == "ATOMIC_GROUP":
        return _cost(given)
    if kind in ("ASSERT", "ASSERT_NOT"):
        return 1.0, _cost(given[1])[1]
    if kind == "BRANCH":
        costs = [_cost(branch) for branch in given[1]]
        return _branches(given[1], [ways for ways, _ in costs]), sum(steps for _, steps in costs)
    if kind in _REPEATS:
        return _repeated(int(given[0]), int(given[1]), *_cost(given[2]))
    return math.inf, math.inf


def _branches(branches: list[Any], ways: list[float]) -> float:
    """Of words only those can match in one place that begin alike; of anything else, all."""
    words = [
        [chr(value).lower() for kind, value in b if str(kind) == "LITERAL" and value < 128]
        for b in branches
    ]
    if any(len(word) != len(branch) for word, branch in zip(words, branches, strict=True)):
        return sum(ways)
    joined = sorted("".join(word) for word in words)
    most, open_ = 1, list[str]()  # sorted, a word comes right after all that it begins with
    for word in joined:
        open_ = [*(start for start in open_ if word.startswith(start)), word]
        most = max(most, len(open_))
    return most


def _repeated(low: int, high: int, ways: float, steps: float) -> tuple[float, float]:
    if low > LONGEST:
        return math.inf, math.inf
    high = max(low, min(high, LONGEST))
    if ways == 1:
        return high - low + 1.0, (high + 1) * steps
    every = [_power(ways, n) for n in range(high + 1)]
    return sum(every[low:]), steps * sum(every)


def _power(ways: float, n: int) -> float:
    try:
        return ways**n
    except OverflowError:
        return math.inf
