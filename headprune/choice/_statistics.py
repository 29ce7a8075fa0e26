"""Choose a candidate by the losses of held-out rows, and bound how far it may be from the best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from headprune.core.choice import RANDOM, Candidate, candidate_name, most_above
from headprune.core.codec import EMPTY, FrozenDict

Floats = NDArray[np.float64]
#: A candidate: its scorer, settings, and whether each kind of attention meets the budget by itself.
JudgedKey = tuple[str, FrozenDict, bool]


def ranked(
    keys: Sequence[JudgedKey],
    losses: Floats,
    same: Sequence[int],
    folds: int | None,
    confidence: float,
    draws: Sequence[Floats] = (),
    is_text: bool = False,
) -> tuple[tuple[Candidate, ...], str]:
    """Rank the candidates by their loss, and compare each with the chosen one.

    Chosen is the first candidate whose loss is within one standard error of the lowest (Breiman
    et al. 1984, section 3.4.3) and within 10 % of it (text: of its perplexity). A difference has
    Student's interval of the paired differences per row (Nadeau and Bengio 2003), for as many
    comparisons as there are other candidates (Bonferroni).

    Args:
        keys: Scorer, its settings and whether by kind, per candidate, the preferred one first.
        losses: ``[candidates, rows]``.
        same: Per candidate the first one with the same plan, itself where there is none.
        folds: Parts that the rows were dealt to; None where nothing was refitted, so that no rows
            share a fit.
        confidence: Level of all intervals together: that no candidate is better than the chosen
            one by more than its interval says.
        draws: Losses ``[rows]`` of each plan of random heads. They are one candidate; see
            ``_random``.
        is_text: Whether losses are those of a text's tokens, so that perplexities are compared.

    Returns:
        The candidates from the lowest loss to the highest, and the name of the chosen one, which is
        never ``random``.
    """
    means = losses.mean(1)
    chosen = _chosen(losses, folds, is_text)
    # Any of the others may be the best one.
    comparisons = max(1, len(keys) - 1)

    candidates = []
    for i, (scorer, settings, by_kind) in enumerate(keys):
        difference = losses[i] - losses[chosen]  # [rows]
        low, high = interval(difference, folds, confidence, comparisons)
        other = candidate_name(*keys[same[i]]) if same[i] != i else ""
        candidates.append(
            Candidate(
                scorer=scorer,
                settings=settings,
                by_kind=by_kind,
                loss=float(means[i]),
                difference=float(difference.mean()),
                low=low,
                high=high,
                same_as=other,
            )
        )
    if len(draws):
        # The chosen candidate is the best of several on these rows. Where rows share a refit, the
        # stretch of the standard error allows for that; elsewhere Bonferroni does.
        of_random = comparisons if folds is None else 1
        candidates.append(_random(draws, losses[chosen], folds, confidence, of_random))
    # Among equal losses the chosen one comes first.
    order = sorted(range(len(candidates)), key=lambda i: (candidates[i].loss, i != chosen, i))
    return tuple(candidates[i] for i in order), candidates[chosen].name


def _random(
    draws: Sequence[Floats], chosen: Floats, folds: int | None, confidence: float, comparisons: int
) -> Candidate:
    """Return the random draws as one candidate with their mean loss.

    Its interval is that of the draws' mean difference, widened to the difference of every draw:
    draws may differ by more than their rows do. It is about these draws, not about all that there
    may be.

    Args:
        draws: Losses ``[rows]`` of each.
        chosen: ``[rows]``: losses of the chosen candidate.
        folds: As in `ranked`.
        confidence: As in `ranked`.
        comparisons: How many the confidence is for.
    """
    differences = np.stack(draws) - chosen  # [draws, rows]
    low, high = interval(differences.mean(0), folds, confidence, comparisons)
    of_draws = differences.mean(1)  # [draws]
    return Candidate(
        scorer=RANDOM,
        settings=EMPTY,
        by_kind=False,
        loss=float(np.mean(draws)),
        difference=float(differences.mean()),
        low=float(min(low, of_draws.min())),
        high=float(max(high, of_draws.max())),
    )


def interval(
    difference: Floats, folds: int | None, confidence: float, comparisons: int
) -> tuple[float, float]:
    """Return Student's interval of the mean of paired differences.

    Args:
        difference: ``[rows]``.
        folds: Parts that the rows were dealt to; None where nothing was refitted.
        confidence: Of all comparisons together.
        comparisons: How many there are (Bonferroni).
    """
    mean, error = _paired(difference, folds)
    if not error:
        return mean, mean
    quantile = float(student.ppf(1 - (1 - confidence) / (2 * comparisons), len(difference) - 1))
    return mean - quantile * error, mean + quantile * error


def _chosen(losses: Floats, folds: int | None, is_text: bool) -> int:
    """Return the place of the first candidate within one standard error and 10 % of the lowest."""
    # Losses of few rows differ by chance. So a candidate that is usually good, and comes first,
    # keeps its place until another one is better by more than that.
    means = losses.mean(1)
    lowest = int(means.argmin())
    most = most_above(float(means[lowest]), is_text)
    for i in range(len(losses)):
        mean, error = _paired(losses[i] - losses[lowest], folds)
        if mean <= min(error, most):
            return i
    return lowest


def _paired(difference: Floats, folds: int | None) -> tuple[float, float]:
    """Return the mean of paired differences ``[rows]`` and its standard error."""
    # Rows of one fold share a refit, so the variance is larger than that of independent rows. As in
    # Nadeau and Bengio 2003 ("Inference for the generalization error", section 3), rows judged per
    # row fitted, 1 / (folds - 1), are added to 1 / folds.
    stretch = 1.0 if folds is None else np.sqrt(1 + folds / (folds - 1))
    error = difference.std(ddof=1) / np.sqrt(len(difference)) * stretch
    return float(difference.mean()), float(error)
