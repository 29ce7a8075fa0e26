"""The scorer of a run; `auto` judges its candidates by the run's own budget, selector and recoveries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from headprune import recovery, scoring
from headprune.choice.auto import Auto
from headprune.core.errors import InfeasibleBudget
from headprune.core.plan import PruningPlan
from headprune.core.scores import HeadScores
from headprune.recovery._api import recover_
from headprune.run.choosing import choose_heads
from headprune.run.recipe import Recipe, RecoverStep
from headprune.run.recovering import seeded
from headprune.run.subject import Subject
from headprune.scoring._base import Problem, Scorer
from headprune.selection._groups import by_kind

#: What stands for a recovery that trains, while candidates are judged.
_STAND_IN = RecoverStep(method="lstsq", settings={"feed_forward": True})


@dataclass(frozen=True)
class AutoOfRun(Auto):
    """``auto`` where plans are those of a run, and cut models are refitted as the run will refit its own."""

    subject: Subject | None = field(default=None, repr=False, compare=False)

    @property
    def _run(self) -> Subject:
        assert self.subject is not None
        return self.subject

    def plan(self, scores: HeadScores, alone: bool) -> PruningPlan | None:
        wanted = self._run.recipe.select
        if not alone:
            return choose_heads(self._run, scores, baseline=True)
        groups = None if wanted.budgets else by_kind(scores.sites, wanted.budget)
        if groups is None:
            return None
        try:
            return choose_heads(self._run, scores, baseline=True, budget=groups)
        except InfeasibleBudget:
            return None

    @property
    def refit_name(self) -> str:
        return " + ".join(step.method for step in judged_after(self._run.recipe))

    def refit_(self, problem: Problem, small: nn.Module, batches: list[Any]) -> None:
        for step in judged_after(self._run.recipe):
            method = seeded(recovery.registry, step.method, step.settings, self._run.recipe.seed)
            teacher = problem.model if method.needs_teacher else None
            recover_(small, batches, method, teacher, sites=self._run.sites)


def judged_after(recipe: Recipe) -> list[RecoverStep]:
    """The recoveries that a candidate's cut model gets before it is judged.

    Those of the recipe that train nothing; where it only trains, ``lstsq`` stands in for the training.
    """
    alone = [step for step in recipe.recover if not recovery.registry.get(step.method).trains]
    trains = len(alone) < len(recipe.recover) or recipe.gradual is not None
    return [_STAND_IN] if trains and not alone else alone


def scorer_of(subject: Subject) -> Scorer:
    """The recipe's scorer, configured, with the run's seed."""
    wanted = subject.recipe.score
    found: Scorer = seeded(scoring.registry, wanted.scorer, wanted.settings, subject.recipe.seed)
    if not isinstance(found, Auto):
        return found
    return AutoOfRun(**{name: getattr(found, name) for name in found.settings}, subject=subject)
