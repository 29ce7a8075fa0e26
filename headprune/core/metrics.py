"""Metrics: which way is better, and what a drop is; the one place, so that tables, pictures and
choices agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from headprune.core.errors import InvalidValue

#: A float, or an array of them.
_Numbers = TypeVar("_Numbers", bound=Any)

#: Matthews correlation, as ``evaluate`` names it.
MATTHEWS = "matthews"
#: Fractions of one, higher is better: differences are given in points (hundredths; of BLEU, what
#: others call a BLEU).
POINTS = (
    *("accuracy", "f1", "exact_match", "mcc", MATTHEWS, "auc", "auroc", "precision", "recall"),
    *("pearson", "spearman", "r2", "top1", "top5", "bleu"),
)
#: Lower is better, and what counts is the factor.
RATIO = ("perplexity", "mse")
#: Lower is better, plain differences.
LOWER = ("loss", "mae", "error", "bits_per_character")


def is_one_of(metric: str, names: Sequence[str]) -> bool:
    """Whether a metric's name holds one of these, whatever its case and its separators."""
    return any(n in metric.lower().replace("-", "_").replace(" ", "_") for n in names)


def drop(metric: str, base: float, value: float) -> float:
    """What was lost; above 0 is worse, whichever way the metric goes.

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
    """``drop`` of arrays of NumPy too, number by number; relative ones need a base other than 0."""
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


def drop_words(metric: str, amount: float) -> str:
    """A drop as people write it: points, per cent, or the plain number.

    >>> drop_words("accuracy", 0.0123), drop_words("perplexity", -0.05), drop_words("loss", 0.25)
    ('1.23 points', '-5.00 %', '0.2500')
    """
    if is_one_of(metric, POINTS):
        return f"{100 * amount:.2f} points"
    return f"{100 * amount:.2f} %" if is_one_of(metric, RATIO) else f"{amount:.4f}"
