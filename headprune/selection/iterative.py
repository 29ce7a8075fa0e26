"""Remove heads in steps and score the kept heads anew before each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from headprune.core.codec import FrozenDict
from headprune.core.errors import InfeasibleBudget, InvalidValue
from headprune.core.scores import HeadScores
from headprune.selection._base import Position, Problem, Selector
from headprune.selection._inner import frozen, inner_selector


@dataclass(frozen=True)
class Iterative(Selector):
    """Remove heads in steps and score the kept heads anew before each step.

    The importance of a head changes when others are removed. The budget falls over ``steps`` steps
    from the cost of the model now to the limit. At each step another selector chooses by the scores
    of the model without the removed heads (``rescore`` of ``hp.select``); these never come back.
    Levels of neurons keep the order of the first scores.

    Source: Molchanov et al. 2017, "Pruning Convolutional Neural Networks for Resource Efficient
    Inference", who remove one unit per step; Yang et al. 2022, "TextPruner", for heads in steps. A
    recovery between the steps, which is their fine-tuning, belongs into ``rescore``: see
    ``hp.scoring.rescorer(after_cut=)``.

    When: most heads are removed, so that scores of the whole model no longer tell their importance.
    Cost: one scoring of a cut copy for every step but the last, and a recovery of it where asked.

    Args:
        steps: The number of steps.
        schedule: ``linear`` removes the same cost at every step, ``geometric`` the same share of
            the remaining cost.
        inner: The selector of every step, by name; one that needs scores alone.
        inner_settings: Its settings, without ``min_heads`` and ``multiple_of``, which are those
            given here.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rescore"})

    steps: int = 8
    schedule: Literal["linear", "geometric"] = "linear"
    inner: str = "global_topk"
    inner_settings: Mapping[str, Any] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.steps) is not int or self.steps < 1:
            raise InvalidValue("Iterative.steps", "a count of steps >= 1", repr(self.steps))
        if self.schedule not in ("linear", "geometric"):
            raise InvalidValue("Iterative.schedule", "'linear' or 'geometric'", repr(self.schedule))
        object.__setattr__(self, "inner_settings", frozen(self.inner_settings, self))
        inner_selector(self, self.inner, self.inner_settings)

    def keep(self, problem: Problem) -> frozenset[Position]:
        assert problem.rescore is not None
        inner = inner_selector(self, self.inner, self.inner_settings)
        inner.keep(problem)  # raises now, before any work, where the budget cannot be met
        everything = frozenset(problem.positions())
        keep = everything - problem.must_remove
        scores = problem.scores
        cost = problem.cost(keep)
        plans = [(keep, scores)]  # the kept units so far, with their scores
        for step in range(1, self.steps + 1):
            limit = self._limit(cost, problem.limit, step)
            removed = everything - keep
            tighter = replace(problem, scores=scores, limit=limit, must_remove=removed)
            try:
                fewer = inner.keep(tighter)
            except InfeasibleBudget:
                return self._at_once(problem, inner, plans, step)
            if fewer != keep and step < self.steps:
                scores = problem.rescore(problem.mask(fewer))
                plans.append((fewer, scores))
            keep = fewer
        problem.notes.append(
            f"{self.inner} in {self.steps} steps; scored anew {len(plans) - 1} times."
        )
        return keep

    def _at_once(
        self,
        problem: Problem,
        inner: Selector,
        plans: list[tuple[frozenset[Position], HeadScores]],
        step: int,
    ) -> frozenset[Position]:
        """Meet the budget in one step from the latest plan that allows it.

        Needed where units cost differently: earlier steps may have removed the cheap ones.
        """
        everything = frozenset(problem.positions())
        for back, (keep, scores) in enumerate(reversed(plans)):
            last = replace(problem, scores=scores, must_remove=everything - keep)
            try:
                fewer = inner.keep(last)
            except InfeasibleBudget:
                continue
            problem.notes.append(
                f"{self.inner} in steps, of which step {step} of {self.steps} could not meet the"
                f" budget: the final heads were chosen at once from an earlier plan ({back} plans"
                f" before the latest); scored anew {len(plans) - 1} times."
            )
            return fewer
        raise AssertionError("the first plan allows it, as `keep` checked before any work")

    def _limit(self, start: int, end: int, step: int) -> int:
        """The limit of a step, between the cost at the start and the limit at the end."""
        if step == self.steps or start <= end:
            return end
        share = step / self.steps
        if self.schedule == "linear":
            return round(start + (end - start) * share)
        # At least 1: a limit of zero or less has no logarithm.
        factor: float = (max(end, 1) / start) ** share
        return max(end, round(start * factor))
