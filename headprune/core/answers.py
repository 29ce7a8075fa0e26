"""How good an answer out of a text is: SQuAD's exact match and F1, in words and nothing but
words."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compared(text: str) -> str:
    """An answer as SQuAD compares it: no case, no punctuation, no English articles, single blanks.

    >>> compared("The  U.S. Navy, of course!")
    'us navy of course'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(said: str, true: Sequence[str]) -> float:
    """1 where the answer is one of the true ones, up to what ``compared`` drops (Rajpurkar et al.
    2016, section 6.1).

    Args:
        said: The answer; empty for "there is none".
        true: The true answers; none where the text has no answer (Rajpurkar et al. 2018).

    >>> exact_match("the Navy", ["Army", "navy"]), exact_match("", []), exact_match("navy", [])
    (1.0, 1.0, 0.0)
    """
    return _best(said, true, lambda a, b: float(a == b))


def f1(said: str, true: Sequence[str]) -> float:
    """The largest F1 with a true answer, both taken as bags of words; where one is empty, 1 if both
    are.

    Args:
        said: See ``exact_match``.
        true: See ``exact_match``.

    >>> f1("in the US Navy", ["US Navy", "the Navy yard"]), f1("", []), f1("navy", [])
    (0.8, 1.0, 0.0)
    """
    return _best(said, true, _overlap)


def _best(said: str, true: Sequence[str], rate: Callable[[str, str], float]) -> float:
    return max(rate(compared(said), compared(one)) for one in true or [""])


def _overlap(said: str, true: str) -> float:
    words, wanted = said.split(), true.split()
    if not words or not wanted:
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))
