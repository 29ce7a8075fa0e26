"""Bound the time of a regular expression from somebody else's file before it is used."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser as parser
else:
    import sre_parse as parser

#: Characters of a long module name.
LONGEST = 64
#: Characters of the longest pattern that is parsed.
_READ = 100_000
#: Names of the parser's elements, by how they are counted.
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY", "GROUPREF", "FAILURE")


def work(pattern: str) -> float:
    """Bound the steps of a search in a name of ``LONGEST`` characters.

    Each element is tried once for every way in which the elements before it can match. ``*`` and
    ``+`` match in about 64 ways each, and these multiply. A repeated group has as many ways as
    its content to the power of the repetitions.

    Args:
        pattern: The regular expression.

    Returns:
        Steps; infinite for a pattern that cannot be parsed.

    >>> work(r"(.*)layer(.*)") < 64**3, work("([a-z]+)+!") > 64**9, work("(")
    (True, True, inf)
    """
    # Parsing takes time too.
    if len(pattern) > _READ:
        return math.inf
    try:
        _, steps = _sequence(parser.parse(pattern).data)
    except (re.error, RecursionError, OverflowError):
        return math.inf
    return steps


def _sequence(elements: Iterable[Any]) -> tuple[float, float]:
    """Return the ways in which a sequence can match, and the steps of all."""
    ways, steps = 1.0, 1.0
    for kind, content in elements:
        more, each = _element(str(kind), content)
        steps += ways * each
        ways *= more
    return ways, steps


def _element(kind: str, content: Any) -> tuple[float, float]:
    """Return the ways and steps of one element of Python's own parser."""
    if kind in _SINGLE:
        return 1.0, 1.0
    if kind == "SUBPATTERN":
        return _sequence(content[-1])
    if kind == "ATOMIC_GROUP":
        return _sequence(content)
    if kind in ("ASSERT", "ASSERT_NOT"):
        # An assertion takes no characters, so it matches in one way.
        return 1.0, _sequence(content[1])[1]
    if kind == "BRANCH":
        return _branch(content[1])
    if kind in _REPEATS:
        return _repeat(int(content[0]), int(content[1]), content[2])
    return math.inf, math.inf


def _branch(branches: list[Any]) -> tuple[float, float]:
    ways, steps = 0.0, 0.0
    words = []
    for branch in branches:
        more, each = _sequence(branch)
        ways += more
        steps += each
        words.append(_word(branch))
    if None not in words:
        # In one place only words can match that begin alike. Sorted, a word follows its beginnings.
        ways = 1.0
        for start, word in pairwise(sorted(map(str, words))):
            ways += word.startswith(start)
    return ways, steps


def _word(branch: Iterable[Any]) -> str | None:
    """Return a branch in lower case, or None unless it is plain ASCII text."""
    letters = ""
    for kind, value in branch:
        if str(kind) != "LITERAL" or value >= 128:
            return None
        letters += chr(value).lower()
    return letters


def _repeat(low: int, high: int, content: Iterable[Any]) -> tuple[float, float]:
    # It cannot match a module name, but Python would try.
    if low > LONGEST:
        return math.inf, math.inf
    high = max(low, min(high, LONGEST))
    ways, steps = _sequence(content)
    # For each number of repetitions. Python raises OverflowError for a power beyond all bounds.
    by_number = [ways**n for n in range(high + 1)]
    return sum(by_number[low:]), steps * sum(by_number)
