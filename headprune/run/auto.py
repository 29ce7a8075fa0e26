"""The scorer of a run; `auto` judges its candidates by the run's own budget, selector and
recoveries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from headprune import recovery, scoring
from headprune.choice._held_out import Folds, losses_of_fold
from headprune.choice.auto import Auto
from headprune.core.errors import InfeasibleBudget, UnsupportedModel
from headprune.core.heads import HeadMask
from headprune.core.plan import Budget, PruningPlan
from headprune.core.scores import HeadScores
from headprune.model.losses import default_loss
from headprune.model.running import undisturbed
from headprune.model.sites import bind
from headprune.recipes.judged import STAND_IN, judged_after
from headprune.recovery._api import recover_
from headprune.run.choosing import choose_heads
from headprune.run.recovering import seeded
from headprune.run.subject import Subject
from headprune.scoring._api import score
from headprune.scoring._base import Scorer, ScoringProblem
from headprune.selection._api import select
from headprune.selection._groups import by_kind


@dataclass(frozen=True)
class AutoOfRun(Auto):
    """``auto`` where plans are those of a run, and cut models are refitted as the run will refit
    its own."""

    subject: Subject | None = field(default=None, repr=False, compare=False)

    @property
    def _run(self) -> Subject:
        assert self.subject is not None
        return self.subject

    def groups(self, scores: HeadScores) -> dict[str, Budget] | None:
        recipe = self._run.recipe
        if recipe.select.budgets or recipe.gradual is not None:  # stages have one budget
            return None
        return by_kind(scores.sites, recipe.select.budget)

    def selected(self, scores: HeadScores, groups: Mapping[str, Budget] | None) -> PruningPlan:
        return choose_heads(self._run, scores, baseline=True, budget=groups)

    @property
    def refit_name(self) -> str:
        return " + ".join(step.method for step in judged_after(self._run.recipe))

    def refit_(self, problem: ScoringProblem, small: nn.Module, batches: list[Any]) -> None:
        for step in judged_after(self._run.recipe):
            method = seeded(recovery.registry, step.method, step.settings, self._run.recipe.seed)
            teacher = problem.model if method.needs_teacher else None
            recover_(small, batches, method, teacher, sites=self._run.sites)

    @property
    def stands_in(self) -> bool:
        return judged_after(self._run.recipe) == [STAND_IN] != self._run.recipe.recover

    @property
    def most_plans(self) -> int:
        """Plans that are judged, at most: candidates that keep the same heads are judged once."""
        kinds = len({site.kind for site in self._run.sites})
        return len(self.candidates) * (2 if kinds > 1 else 1) + self.random_draws

    @property
    def said(self) -> str:
        """What is done with every plan, in words."""
        done = f"cut and refitted by {self.refit_name}" if self.refit_name else "cut"
        return f"up to {self.most_plans} plans, each {done} {self.folds} times"

    def judge_once(self, batches: list[Any]) -> None:
        """Cuts half of the heads once, refits, and judges one fold of these batches: a sample to
        time.

        The heads are random, because the run's own budget may ask for a latency table. The model is
        left as it was.

        Raises:
            InvalidValue: fewer rows than two per fold.
        """
        subject = self._run
        mask = _half_of(
            score(subject.model, batches[:1], "random", sites=subject.sites, progress=False)
        )
        with undisturbed(subject.model) as model:
            problem = ScoringProblem(
                model, bind(model, subject.sites), batches, default_loss, progress=False
            )
            problem.judge()
            folds = Folds(problem, self.folds)
            try:
                refit = partial(self.refit_, problem) if self.refit_name else None
                losses_of_fold(problem, folds, 0, mask, refit)
            except UnsupportedModel:  # the run judges without a refit then, too
                losses_of_fold(problem, folds, 0, mask, None)


def _half_of(scores: HeadScores) -> HeadMask:
    """Half of the heads; all of them where layers of one head make that impossible."""
    try:
        return select(scores, Budget(keep_heads=0.5)).mask
    except InfeasibleBudget:
        return select(scores, Budget(keep_heads=1.0)).mask


def scorer_of(subject: Subject) -> Scorer:
    """The recipe's scorer, configured, with the run's seed; ``auto`` draws its random plans from
    that."""
    wanted = subject.recipe.score
    found: Scorer = seeded(scoring.registry, wanted.scorer, wanted.settings, subject.recipe.seed)
    if not isinstance(found, Auto):
        return found
    return AutoOfRun(**{name: getattr(found, name) for name in found.settings}, subject=subject)
