"""An estimate as the scores that a selector takes."""

from __future__ import annotations

from headprune.core.codec import EMPTY
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.scoring._base import Estimate, ScoringProblem, units_per_site


def as_scores(problem: ScoringProblem, name: str, estimate: Estimate) -> HeadScores:
    """Return the values of an estimate as scores that are never saved or compared with a model."""
    by_site = estimate.values.split(units_per_site(problem.bound))
    return HeadScores(
        sites=tuple(b.site for b in problem.bound),
        values=tuple(tuple(row.tolist()) for row in by_site),
        standard_errors=None,
        scorer=name,
        settings=EMPTY,
        n_examples=estimate.n_examples,
        model=ModelFingerprint("", ""),
        costs=problem.costs,
        ladders=estimate.ladders,
        bundling=estimate.bundling,
    )
