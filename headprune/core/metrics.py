"""Metrics: which way is better, and how a drop is computed; tables, pictures and choices agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from headprune.core.errors import InvalidValue

#: A float, or an array of them.
_Numbers = TypeVar("_Numbers", bound=Any)

#: Standard errors on each side of a 95 % interval.
Z = 1.959964
#: Matthews correlation, as ``evaluate`` names it.
MATTHEWS = "matthews"
#: Fractions of one, higher is better. Differences are given in points: hundredths, which for BLEU
#: is the unit that others call a BLEU.
POINTS = (
    "accuracy",
    "f1",
    "exact_match",
    "mcc",
    MATTHEWS,
    "auc",
    "auroc",
    "precision",
    "recall",
    "pearson",
    "spearman",
    "r2",
    "top1",
    "top5",
    "bleu",
)
#: Lower is better; differences are relative.
RATIO = ("perplexity", "mse")
#: Lower is better, plain differences.
LOWER = ("loss", "mae", "error", "bits_per_character")


def is_one_of(metric: str, names: Sequence[str]) -> bool:
    """Whether a metric's name contains one of these; case and separators do not matter."""
    plain = metric.lower().replace("-", "_").replace(" ", "_")
    return any(name in plain for name in names)


def drop(metric: str, base: float, value: float) -> float:
    """Compute the loss of quality; above 0 is worse for every metric.

    A fraction of one for metrics such as accuracy (0.01 is one point), the relative increase for
    perplexity and mean squared error (0.01 is 1 % more), the plain increase for other losses.

    Raises:
        InvalidValue: a metric whose direction is not known.

    >>> (
    ...     round(drop("accuracy", 0.9, 0.88), 6),
    ...     round(drop("perplexity", 10.0, 10.5), 6),
    ...     drop("loss", 0.5, 0.75),
    ... )
    (0.02, 0.05, 0.25)
    """
    try:
        return drops(metric, base, value)
    except ZeroDivisionError:
        return math.nan


def drops(metric: str, base: _Numbers, value: _Numbers) -> _Numbers:
    """Compute drops of floats or NumPy arrays; relative ones need a base other than 0."""
    lost: _Numbers
    if is_one_of(metric, POINTS):
        lost = base - value
    elif is_one_of(metric, RATIO):
        lost = value / base - 1
    elif is_one_of(metric, LOWER):
        lost = value - base
    else:
        raise InvalidValue("metric", f"one of {', '.join((*POINTS, *RATIO, *LOWER))}", repr(metric))
    return lost


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``n`` rows (Wilson 1927).

    >>> low, high = wilson(0.9, 100)
    >>> round(low, 3), round(high, 3)
    (0.826, 0.945)
    """
    z = Z
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def beats_constant(classes: Sequence[tuple[int, int]]) -> bool:
    """Whether answers are shown to be right more often than the most frequent class, at 95 %.

    Args:
        classes: Rows of each class, and how many of them are answered correctly.

    >>> beats_constant([(50, 45), (50, 45)]), beats_constant([(90, 90), (10, 1)])
    (True, False)
    """
    n_most, right = max(classes)
    gained = sum(one for _, one in classes) - right
    return paired_interval(n_most - right, gained, sum(n for n, _ in classes))[1] < 0


def paired_interval(lost: float, gained: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of the share that ``n`` pairs lose (Agresti and Min 2005).

    Args:
        lost: Rows that only the first of the two has right.
        gained: Rows that only the second has right.
        n: All rows.

    >>> low, high = paired_interval(0, 0, 98)
    >>> round(low, 3), round(high, 3)
    (-0.02, 0.02)
    """
    lost, gained = lost + 0.5, gained + 0.5  # half a row more of each kind of pair
    middle = (lost - gained) / (n + 2)
    error = math.sqrt(lost + gained - (lost - gained) ** 2 / (n + 2)) / (n + 2)
    return max(-1.0, middle - Z * error), min(1.0, middle + Z * error)


def drop_words(metric: str, amount: float, digits: int = 2) -> str:
    """Format a drop: points, per cent, or the plain number with two digits more.

    >>> drop_words("accuracy", 0.0123), drop_words("perplexity", -0.05), drop_words("loss", 0.25)
    ('1.23 points', '-5.00 %', '0.2500')
    """
    if is_one_of(metric, POINTS):
        return f"{100 * amount:.{digits}f} points"
    if is_one_of(metric, RATIO):
        return f"{100 * amount:.{digits}f} %"
    return f"{amount:.{digits + 2}f}"


def apart(metric: str, amount: float, other: float) -> tuple[str, str]:
    """Format two drops with as many digits as it takes to see that they differ.

    >>> apart("accuracy", 0.01, 0.01004)
    ('1.000 points', '1.004 points')
    """
    for digits in range(2, 9):
        texts = drop_words(metric, amount, digits), drop_words(metric, other, digits)
        if amount == other or texts[0] != texts[1]:
            break
    return texts
