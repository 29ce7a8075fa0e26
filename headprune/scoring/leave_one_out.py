"""Ablation: how much the loss rises when one head alone is switched off; exact, at a fraction of a
pass a head."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.core.errors import InvalidValue
from headprune.scoring._ablation import (
    Fill,
    Replay,
    byte_count,
    differences,
    idle,
    means,
    nothing,
    other_contexts,
    unit_rows,
)
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, one_of


@dataclass(frozen=True)
class LeaveOneOut(Scorer):
    """``I_h = mean_i [l_i(without h) - l_i]``, labels; negative where the model does better without
    the head.

    Source: Michel, Levy, Neubig 2019, section 3.2 (there on accuracy and BLEU; here on the loss,
    which is finer).

    When: few heads go, and the exact answer for each alone is worth its passes.
    Cost: a head's pass begins at its own output projection, ``about n / 2`` passes for n heads,
    several heads at once; the numbers are those of whole passes, which a proof on two examples
    checks. Models that cannot be played back, for example those whose examples see each other, have
    n whole passes, and a note says so.

    Args:
        replacement: What a head that is gone leaves: ``zero``; ``mean``, its mean output over the
            tokens of the data (so that its bias stays, one pass more; what `mean_fold` recovers);
            ``resample``, its output on another example (Chan et al. 2022, "Causal Scrubbing"),
            which keeps everything but the information.
        pool: With ``resample``, so many examples are those that others are drawn from.
        seed: Of those draws, which go by what examples contain: the order of the data plays no
            part.
        max_bytes: Bound on the memory for what is kept of a pass and for heads that run at once,
            about.
        replay: False runs a whole pass a head.

    The standard error is that of the mean over examples.
    """

    replacement: str = "zero"
    pool: int = 16
    seed: int = 0
    max_bytes: int = 2**30
    replay: bool = True

    def __post_init__(self) -> None:
        one_of("LeaveOneOut.replacement", self.replacement, ("zero", "mean", "resample"))
        if self.pool < 2 or (self.pool != 16 and self.replacement != "resample"):
            raise InvalidValue(
                "LeaveOneOut.pool", "a count of examples >= 2, with 'resample' only", self.pool
            )
        byte_count("LeaveOneOut.max_bytes", self.max_bytes)

    @property
    def by_example(self) -> bool:
        return self.replacement == "zero"  # what others put out stands in otherwise

    def estimate(self, problem: ScoringProblem) -> Estimate:
        rows, replay = unit_rows(problem), Replay(self.max_bytes, self.replay)
        base = rows.new_ones(rows.shape[1])
        samples = differences(
            problem, "leave one out", base - rows, base, replay, self._fill(problem)
        )
        seed = self.seed if self.replacement == "resample" else None
        return idle(replay.noted(averaged(samples, seed=seed)), problem)

    def _fill(self, problem: ScoringProblem) -> Fill:
        if self.replacement == "zero":
            return nothing
        problem.keep()
        return (
            means(problem)
            if self.replacement == "mean"
            else other_contexts(problem, self.pool, self.seed)
        )
