"""From losses of held-out rows to the candidate that is taken, and how far behind the best it may
be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from headprune.core.choice import RANDOM, Candidate, candidate_name
from headprune.core.codec import FrozenDict

Floats = NDArray[np.float64]
#: A candidate: its scorer, settings, and whether each kind of attention meets the budget by itself.
Asked = tuple[str, FrozenDict, bool]


def ranked(
    asked: Sequence[Asked], losses: Floats, same: Sequence[int], folds: int, confidence: float
) -> tuple[Candidate, ...]:
    """The candidates from the lowest loss to the highest, each compared with the best that is not
    random.

    A difference's interval is Student's of the paired differences per row. The refits of two folds
    share no rows that they are judged on, but rows of one fold share a refit: as Nadeau and Bengio
    2003 ("Inference for the generalization error", section 3) the variance of ``folds`` results has
    the share of rows judged to rows fitted added to 1/folds. All intervals hold together
    (Bonferroni), because the best is picked from them.

    Args:
        asked: Scorer, its settings and whether by kind, per candidate.
        losses: ``[candidates, rows]``.
        same: Per candidate the first one with the same plan, itself where there is none.
        folds: Parts that the rows were dealt to.
        confidence: Of all intervals together.
    """
    means = losses.mean(1)
    scorers = [i for i, (scorer, _, _) in enumerate(asked) if scorer != RANDOM]
    best = min(scorers, key=lambda i: means[i])
    n = losses.shape[1]
    stretch = np.sqrt(1 + folds / (folds - 1))
    comparisons = max(1, len(asked) - 1)
    quantile = (
        float(student.ppf(1 - (1 - confidence) / (2 * comparisons), n - 1)) if n > 1 else np.inf
    )
    found = []
    for i, (scorer, settings, by_kind) in enumerate(asked):
        difference = losses[i] - losses[best]
        mean = float(difference.mean())
        error = float(difference.std(ddof=1) / np.sqrt(n) * stretch) if n > 1 else 0.0
        half = quantile * error if error else 0.0
        other = candidate_name(*asked[same[i]]) if same[i] != i else ""
        found.append(
            Candidate(
                scorer, settings, by_kind, float(means[i]), mean, mean - half, mean + half, other
            )
        )
    order = sorted(range(len(asked)), key=lambda i: (means[i], i != best, i))
    return tuple(found[i] for i in order)
