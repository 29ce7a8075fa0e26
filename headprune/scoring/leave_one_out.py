"""Ablation: how much the loss rises when one head alone is switched off; exact."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.core.errors import InvalidValue, check_one_of
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
from headprune.scoring._base import Estimate, Scorer, ScoringProblem


@dataclass(frozen=True)
class LeaveOneOut(Scorer):
    """``I_h = mean_i [l_i(without h) - l_i]``, labels; negative where the model does better without
    the head.

    Source: Michel, Levy, Neubig 2019, section 3.2 (there on accuracy and BLEU; here on the loss,
    which is finer).

    When: few heads are removed, and the exact answer for each alone is worth its passes.
    Cost: about ``n / 2`` passes for n heads: each head's pass begins at its own output projection.
    Two examples prove that the numbers are those of whole passes. Models that cannot be replayed,
    for example those whose examples see each other, take n whole passes, and a note says so.

    Args:
        replacement: The output of a removed head: ``zero``; ``mean``, its mean output over the
            tokens of the data (one pass more; what `mean_fold` recovers); ``resample``, its output
            on another example (Chan et al. 2022, "Causal Scrubbing").
        pool: With ``resample``, the number of examples to draw from.
        seed: Of those draws, which also depend on what examples contain.
        max_bytes: Approximate bound on the memory for what is kept of a pass and for heads that run
            at once.
        replay: False runs a whole pass per head.

    The standard error is that of the mean over examples.
    """

    replacement: str = "zero"
    pool: int = 16
    seed: int = 0
    max_bytes: int = 2**30
    replay: bool = True

    def __post_init__(self) -> None:
        check_one_of("LeaveOneOut.replacement", self.replacement, ("zero", "mean", "resample"))
        if self.pool < 2 or (self.pool != 16 and self.replacement != "resample"):
            must = "a count of examples >= 2, with 'resample' only"
            raise InvalidValue("LeaveOneOut.pool", must, self.pool)
        byte_count("LeaveOneOut.max_bytes", self.max_bytes)

    @property
    def by_example(self) -> bool:
        return self.replacement == "zero"  # otherwise outputs on other examples are read

    def estimate(self, problem: ScoringProblem) -> Estimate:
        rows = unit_rows(problem)  # [units, heads], 1 at the unit's heads
        replay = Replay(self.max_bytes, self.replay)
        every = rows.new_ones(rows.shape[1])
        fill = self._fill(problem)
        samples = differences(problem, "leave one out", every - rows, every, replay, fill)
        seed = self.seed if self.replacement == "resample" else None
        return idle(replay.noted(averaged(samples, seed=seed)), problem)

    def _fill(self, problem: ScoringProblem) -> Fill:
        """The outputs that replace those of removed heads."""
        if self.replacement == "zero":
            return nothing
        problem.keep_batches()  # they take a pass of their own
        if self.replacement == "mean":
            return means(problem)
        return other_contexts(problem, self.pool, self.seed)
