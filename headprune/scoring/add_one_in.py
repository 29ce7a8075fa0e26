"""What a head does alone: how much the loss falls when it is the only one switched on."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.scoring._ablation import Replay, byte_count, differences, nothing, unit_rows
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Scorer, ScoringProblem


@dataclass(frozen=True)
class AddOneIn(Scorer):
    """``I_h = mean_i [l_i(no head) - l_i(h alone)]``: the other end of ``leave_one_out``;
    needs labels.

    The first marginal of the heads' Shapley value (Held & Yang 2022, "Shapley Head Pruning"), as
    ``leave_one_out`` is the last. High for a head that needs no other one; a head that reads what
    others wrote scores about 0 here. Cost and settings are those of ``leave_one_out``.

    When: to see what each head can do alone; heads that work together are underrated.

    Args:
        max_bytes: Approximate bound on the memory for what is kept of a pass and for heads that run
            at once.
        replay: False runs a whole pass per head.
    """

    max_bytes: int = 2**30
    replay: bool = True

    def __post_init__(self) -> None:
        byte_count("AddOneIn.max_bytes", self.max_bytes)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        rows = unit_rows(problem)  # [units, heads], 1 at the unit's heads
        replay = Replay(self.max_bytes, self.replay)
        none = rows.new_zeros(rows.shape[1])
        samples = -differences(problem, "add one in", rows, none, replay, nothing)
        return replay.noted(averaged(samples))
