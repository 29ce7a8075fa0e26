"""The scorer of a run. `auto` judges candidates by the run's budget, selector and recoveries."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from headprune import recovery, scoring
from headprune.choice._held_out import Folds, losses_of_fold
from headprune.choice.auto import DEFAULT, WITH_NEURONS, Auto
from headprune.core.errors import InfeasibleBudget, UnsupportedModel
from headprune.core.heads import HeadMask, SiteKeep
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
    """``auto`` in a run: its plans and refits are those of the recipe."""

    subject: Subject | None = field(default=None, repr=False, compare=False)

    @property
    def _run(self) -> Subject:
        assert self.subject is not None
        return self.subject

    @property
    def tries_kinds(self) -> bool:
        recipe = self._run.recipe
        # Budgets by site are the user's choice, and gradual pruning has a single budget.
        return not recipe.select.budgets and recipe.gradual is None

    def groups(self, scores: HeadScores) -> dict[str, Budget] | None:
        if not self.tries_kinds:
            return None
        return by_kind(scores.sites, self._run.recipe.select.budget)

    def selected(self, scores: HeadScores, groups: Mapping[str, Budget] | None) -> PruningPlan:
        return choose_heads(self._run, scores, baseline=True, budget=groups)

    @property
    def refit_name(self) -> str:
        """The recipe's recoveries that do not train, or ``lstsq`` in place of those that do."""
        return " + ".join(step.method for step in judged_after(self._run.recipe))

    def refit_(self, problem: ScoringProblem, small: nn.Module, batches: list[Any]) -> None:
        for step in judged_after(self._run.recipe):
            method = seeded(recovery.registry, step.method, step.settings, self._run.recipe.seed)
            teacher = problem.model if method.needs_teacher else None
            recover_(small, batches, method, teacher, sites=self._run.sites)

    def announce(self, text: str, progress: bool | None) -> None:
        self._run.journal.tell(text)
        data, recipe = self._run.data, self._run.recipe
        n_judged = self.n_fitted(len(data.examples["calibration"]))
        for step in judged_after(recipe):
            if step not in recipe.recover:  # it replaces a training
                continue
            purpose = step.rows_of(trains=False)
            n_own = len(data.some(purpose, step.examples).examples[purpose])
            if n_own != n_judged:
                line = f"auto fits {step.method} to {n_judged:,} rows"
                self._run.journal.tell(f"{line}, the run will fit it to {n_own:,} of {purpose}")

    @property
    def stands_in(self) -> bool:
        judged = judged_after(self._run.recipe)
        return judged == [STAND_IN] and judged != self._run.recipe.recover

    def judge_once(self, batches: list[Any]) -> None:
        """Cut half of the heads, refit, and judge one fold, so that it can be timed.

        The heads are random, because the run's own budget may need a latency table. The model is
        not changed.

        Raises:
            InvalidValue: fewer rows than two per fold.
        """
        subject = self._run
        mask = half_of_heads(subject)
        with undisturbed(subject.model) as model:
            bound = bind(model, subject.sites)
            problem = ScoringProblem(model, bound, batches, default_loss, progress=False)
            problem.choose_loss()  # losses of the uncut model, which others are compared with
            folds = Folds(problem, self.folds)
            try:
                refit = partial(self.refit_, problem) if self.refit_name else None
                losses_of_fold(problem, folds, 0, mask, refit)
            except UnsupportedModel:  # then the run judges without a refit, too
                losses_of_fold(problem, folds, 0, mask, None)


def half_of_heads(subject: Subject) -> HeadMask:
    """Keep a random half of the heads, or all of them if layers have one head; half the neurons."""
    mask = HeadMask.full(subject.sites)
    # A budget of heads needs an attention.
    if not all(site.is_feed_forward for site in subject.sites):
        batch = subject.data.of_like_length("calibration", subject.recipe.score.batch_size)[:1]
        scores = score(subject.model, batch, "random", sites=subject.sites, progress=False)
        # Every layer keeps at least one head.
        with suppress(InfeasibleBudget):
            mask = select(scores, Budget(keep_heads=0.5)).mask
    rows = []
    for site, row in zip(subject.sites, mask.rows, strict=True):
        if site.is_feed_forward:
            row = SiteKeep.of(site, site.heads[: len(site.heads) // 2])
        rows.append(row)
    return HeadMask(tuple(rows))


def scorer_of(subject: Subject) -> Scorer:
    """Return the recipe's scorer; its seed is the run's unless the recipe sets another."""
    wanted = subject.recipe.score
    scorer: Scorer = seeded(scoring.registry, wanted.scorer, wanted.settings, subject.recipe.seed)
    if not isinstance(scorer, Auto):
        return scorer
    # The same settings, and the run that gives it budget, selector and recoveries.
    settings = {name: getattr(scorer, name) for name in scorer.settings}
    if subject.recipe.select.feed_forward and scorer.candidates == DEFAULT:
        settings["candidates"] = WITH_NEURONS
    return AutoOfRun(**settings, subject=subject)
