"""Comparisons of a run's models on the same rows: drops with intervals, and classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from headprune.bench.quality import Quality
from headprune.core.metrics import LOWER, POINTS, RATIO, is_one_of
from headprune.core.paired import Answers, drop_of_means, own_interval
from headprune.core.record import ClassRow, Comparison

#: Resamples of the bootstrap.
_DRAWS = 2000


def answers_of(quality: Quality) -> Answers | None:
    """The results per row; None where nothing can be resampled."""
    if len(quality.amounts) < 2 or not is_one_of(quality.metric, (*POINTS, *RATIO, *LOWER)):
        return None
    amounts, counts = np.array(quality.amounts, float), np.array(quality.counts, float)
    return Answers(quality.metric, amounts, counts)


def interval_of(quality: Quality) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of a metric over rows; None twice where nothing can be resampled."""
    answers = answers_of(quality)
    return (None, None) if answers is None else own_interval(answers, _DRAWS)


def compared(
    name: str, against: str, split: str, base: Sequence[Quality], others: Sequence[Quality]
) -> tuple[Comparison, ...]:
    """Compare models, or means of draws, on the same rows; empty where they cannot be compared.

    Args:
        name: What the row of the second ones is called.
        against: What the first ones are: ``base`` or ``random``.
        split: Which rows.
        base: Results of the uncut model, or of each random draw.
        others: Results of the model, or of each draw.
    """
    first, second = _all_answers(base), _all_answers(others)
    if not first or not second or first[0].metric != second[0].metric:
        return ()
    drop = drop_of_means(first, second, _DRAWS)
    ends = (drop.value, drop.low, drop.high)
    # A ratio to a perplexity or an error of 0 is not finite.
    if not np.isfinite(ends).all():
        return ()
    n = others[0].n_examples
    return (Comparison(name, against, first[0].metric, split, n, *ends),)


def _all_answers(some: Sequence[Quality]) -> list[Answers]:
    """The results of all models; empty where one has none."""
    known = [answers for answers in map(answers_of, some) if answers is not None]
    return known if len(known) == len(some) else []


def class_rows(base: Quality, final: Quality, names: Mapping[int, str]) -> tuple[ClassRow, ...]:
    """Count the right answers of both models per class, in the order of the classes."""
    before = _right(base)
    after = _right(final)
    rows = []
    for label, n in sorted(Counter(label for label, _ in base.classes).items()):
        rows.append(ClassRow(class_name(label, names), n, before[label], after[label]))
    return tuple(rows)


def _right(quality: Quality) -> Counter[int]:
    return Counter(label for label, predicted in quality.classes if label == predicted)


def class_name(label: int, names: Mapping[int, str]) -> str:
    """A class's name, or its number where it has none."""
    return str(names.get(label, label))
