"""Removes heads in steps and scores what is left anew before each: a head's worth changes when
others have gone."""

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
    """Removes heads in steps and scores what is left anew before each: a head's worth changes when
    others have gone.

    The budget tightens over ``steps`` steps from what the model costs now to what may stay; at
    each, another selector chooses by the scores of the model without the heads that are gone
    (``rescore`` of ``hp.select``), and those heads never come back. The last step meets the budget
    as that selector does. One step is that selector on the scores as they are, and nothing is
    scored anew.

    Source: Molchanov et al. 2017, "Pruning Convolutional Neural Networks for Resource Efficient
    Inference", who remove one unit a step; Yang et al. 2022, "TextPruner", for heads in steps. A
    recovery between the steps, which is their fine-tuning, belongs into ``rescore``: see
    ``hp.scoring.rescorer(after_cut=)``.

    When: most heads go, so that scores of the whole model no longer say what is missed.
    Cost: one scoring of a cut copy for every step but the last, and a recovery of it where one is
    asked for.

    Args:
        steps: How often heads are removed.
        schedule: ``linear`` takes away the same cost at every step, ``geometric`` the same share of
            what is left.
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
        everything = frozenset(problem.positions())
        inner.keep(problem)  # raises now, before any work, where the budget cannot be met
        left, scores = everything - problem.must_remove, problem.scores
        start, seen = problem.cost(left), [(left, scores)]
        for step in range(1, self.steps + 1):
            limit = self._limit(start, problem.limit, step)
            try:
                kept = inner.keep(
                    replace(problem, scores=scores, limit=limit, must_remove=everything - left)
                )
            except InfeasibleBudget:
                return self._at_once(problem, inner, seen, step)
            if kept != left and step < self.steps:
                scores = problem.rescore(problem.mask(kept))
                seen.append((kept, scores))
            left = kept
        problem.notes.append(
            f"{self.inner} in {self.steps} steps; scored anew {len(seen) - 1} times."
        )
        return left

    def _at_once(
        self,
        problem: Problem,
        inner: Selector,
        seen: list[tuple[frozenset[Position], HeadScores]],
        step: int,
    ) -> frozenset[Position]:
        """The last step from the latest plan that allows it, where units cost differently and the
        cheap ones went."""
        everything = frozenset(problem.positions())
        for back, (left, scores) in enumerate(reversed(seen)):
            try:
                kept = inner.keep(replace(problem, scores=scores, must_remove=everything - left))
            except InfeasibleBudget:
                continue
            said = (
                f"{self.inner} in steps, of which step {step} of {self.steps} could not meet the"
                " budget with what "
            )
            said += (
                f"was left: the rest was chosen at once, {back} plans back; scored anew"
                f" {len(seen) - 1} times."
            )
            problem.notes.append(said)
            return kept
        raise AssertionError("the first plan allows it: that was looked at before any work")

    def _limit(self, start: int, end: int, step: int) -> int:
        """What may stay after a step."""
        if step == self.steps or start <= end:
            return end
        share = step / self.steps
        if self.schedule == "linear":
            return round(start + (end - start) * share)
        # Both are whole numbers and the share is below 1, which a power's type does not say.
        left: float = (max(end, 1) / start) ** share
        return max(end, round(start * left))
