"""Quality of an answer taken from a text: SQuAD's exact match and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compared(text: str) -> str:
    """Normalise an answer as SQuAD does.

    No case, no punctuation, no English articles, single blanks.

    >>> compared("The  U.S. Navy, of course!")
    'us navy of course'
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, true: Sequence[str]) -> float:
    """1 where the answer is one of the true ones, else 0 (Rajpurkar et al. 2016, section 6.1).

    Answers are compared after ``compared``.

    Args:
        answer: The answer; empty for "there is none".
        true: The true answers; none where the text has no answer (Rajpurkar et al. 2018).

    >>> exact_match("the Navy", ["Army", "navy"]), exact_match("", []), exact_match("navy", [])
    (1.0, 1.0, 0.0)
    """
    return _best(answer, true, _equal)


def f1(answer: str, true: Sequence[str]) -> float:
    """The largest F1 with a true answer, both as bags of words.

    Where one of them is empty: 1 if both are, else 0.

    Args:
        answer: See ``exact_match``.
        true: See ``exact_match``.

    >>> f1("in the US Navy", ["US Navy", "the Navy yard"]), f1("", []), f1("navy", [])
    (0.8, 1.0, 0.0)
    """
    return _best(answer, true, _overlap)


def _best(answer: str, true: Sequence[str], rate: Callable[[str, str], float]) -> float:
    plain = compared(answer)
    # A text without an answer has one true answer: the empty one.
    return max(rate(plain, compared(other)) for other in true or [""])


def _equal(answer: str, true: str) -> float:
    return float(answer == true)


def _overlap(answer: str, true: str) -> float:
    """F1 of two answers as bags of words."""
    words, true_words = answer.split(), true.split()
    if not words or not true_words:
        return float(words == true_words)
    common = sum((Counter(words) & Counter(true_words)).values())
    # Equals 2 / (1 / precision + 1 / recall).
    return 2 * common / (len(words) + len(true_words))
