"""`auto`: try several scorers, and take one whose plan is among the best on held-out rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from headprune import recovery, scoring
from headprune.attention.sharded import check_whole
from headprune.choice._held_out import Folds, Refit, RefitRefused, held_out_losses, whole_losses
from headprune.choice._statistics import Asked, Floats, interval, ranked
from headprune.core.choice import RANDOM, Choice, Refitting, candidate_name
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.errors import InfeasibleBudget, InvalidValue, did_you_mean
from headprune.core.heads import HeadMask
from headprune.core.plan import Budget, PruningPlan
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.model.own_loss import is_default
from headprune.model.sites import sites_of
from headprune.recovery._api import recover_
from headprune.recovery._base import Recovery
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.scoring._coupling import losses_are_coupled, refuse_coupled
from headprune.selection._api import select
from headprune.selection._groups import by_kind

#: Name and settings of a candidate.
Named = tuple[str, FrozenDict]
#: The candidates, unless others are requested: cheap, each the best on some of the tasks of
#: docs/regret.md, and those with the least regret there first.
DEFAULT = (
    "surgeon",
    FrozenDict({"surgeon": {"curvature": "logits"}}),
    "taylor",
    "fluctuation",
    "obs",
)
#: Where the seeds of random draws begin, away from those of anything else.
_FIRST_DRAW = 2000


@dataclass(frozen=True)
class Auto(Scorer):
    """Try several scorers: cut and refit each one's plan, and compare their held-out losses.

    No scorer is best on every task. Each candidate scores all rows, and heads are selected by the
    budget. A copy of the model is cut, refitted on one half of the rows, and judged by its loss on
    the other half; then the halves change places. The first candidate whose loss is within one
    standard error of the lowest is taken. The scores are that candidate's, under its own name;
    ``scores.choice`` holds the table, the interval of each difference, ties, and random heads
    refitted alike. Where a model has several kinds of attention, each candidate is also judged
    with the budget met by each kind alone, and ``hp.select`` then selects so.

    When: always, unless you know which scorer fits your model, data and budget.
    Cost: all candidates' passes (they share them), then one cut and refit per distinct plan and
    fold.
    Memory: that of its most expensive candidate, and a copy of the model.

    Args:
        keep: Heads to keep when candidates are judged, as ``Budget(keep_heads=)``: give the budget
            that you will use.
        candidates: Registered scorers, the preferred one first: by name, or with settings as
            ``{name: settings}``.
        refit: A recovery that does not train, or None for a cut that will not be refitted.
        refit_settings: Its settings; None is ``feed_forward=True`` for ``lstsq``, and the defaults
            for others.
        folds: Parts that the rows are dealt to.
        random_draws: Random plans to compare with.
        confidence: Of the margin.
        seed: Of the random plans.
    """

    keep: int | float = 0.5
    candidates: tuple[str | Mapping[str, Mapping[str, Any]], ...] = DEFAULT
    refit: str | None = "lstsq"
    refit_settings: Mapping[str, Any] | None = None
    folds: int = 2
    random_draws: int = 2
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        given = tuple(c if isinstance(c, str) else FrozenDict(c) for c in self.candidates)
        object.__setattr__(self, "candidates", given)
        usual = {"feed_forward": True} if self.refit == "lstsq" else {}
        given_settings = usual if self.refit_settings is None else self.refit_settings
        object.__setattr__(self, "refit_settings", FrozenDict(given_settings))
        Budget(keep_heads=self.keep)
        for name, settings in self.asked:
            if name in ("auto", RANDOM) or not scoring.registry.get(name).needs_data:
                hint = "random is judged anyway: see random_draws."
                raise InvalidValue(
                    "Auto.candidates",
                    "scorers that read data, auto not among them",
                    repr(name),
                    hint,
                )
            _configured(name, settings)
        if not self.candidates:
            raise InvalidValue("Auto.candidates", "one scorer at least", "none")
        if self.folds < 2:
            raise InvalidValue("Auto.folds", "a count >= 2", self.folds)
        if self.random_draws < 0:
            raise InvalidValue("Auto.random_draws", "a count >= 0", self.random_draws)
        if not 0 < self.confidence < 1:
            raise InvalidValue("Auto.confidence", "between 0 and 1", self.confidence)
        if self.refit is not None:
            self._check_refit(recovery.registry.get(self.refit))

    @property
    def asked(self) -> list[tuple[str, FrozenDict]]:
        """Name and settings of every candidate.

        Raises:
            InvalidValue: a mapping that is not of one name to its settings.
        """
        found = []
        for one in self.candidates:
            pairs = [(one, EMPTY)] if isinstance(one, str) else list(one.items())
            if len(pairs) != 1 or not isinstance(pairs[0][1], Mapping):
                raise InvalidValue(
                    "Auto.candidates", "names, or mappings of one name to its settings", repr(one)
                )
            found.append((pairs[0][0], FrozenDict(pairs[0][1])))
        return found

    @property
    def scorers(self) -> list[Scorer]:
        """Every candidate, configured."""
        return [_configured(name, settings) for name, settings in self.asked]

    def _check_refit(self, method: type[Recovery]) -> None:
        if method.trains:
            hint = "Let lstsq stand in for the training."
            raise InvalidValue(
                "Auto.refit", "a recovery that does not train", repr(self.refit), hint
            )
        _check_settings("Auto.refit_settings", str(self.refit), method, self.refit_settings or {})

    @property
    def settings(self) -> FrozenDict:
        names = [f.name for f in dataclasses.fields(Auto)]
        return FrozenDict({name: getattr(self, name) for name in names})

    @property
    def by_example(self) -> bool:
        return False

    @torch.inference_mode(False)
    def estimate(self, problem: ScoringProblem) -> Estimate:
        """Scores all candidates, judges their plans, and gives the estimate of the best.

        Raises:
            InvalidValue: fewer rows than two per fold, losses that depend on other examples of a
                batch, or what a candidate refuses.
            InfeasibleBudget: no plan meets the budget.
        """
        check_whole(
            problem.model, "one whose weights are whole in this process, to be copied and cut"
        )
        problem.keep()
        folds = Folds(problem, self.folds)
        candidates = self._usable(problem)
        estimates = self._estimates(problem, candidates)
        if losses_are_coupled(problem):
            # Rows of a fold would have other losses than rows of a whole batch.
            refuse_coupled(problem, "auto")
        asked, plans = self._plans(problem, candidates, estimates)
        # Before the copies: a model may keep what it computed last, and a tensor with a graph
        # cannot be copied.
        whole = float(whole_losses(problem, folds).mean())
        distinct = list(dict.fromkeys(plan.mask for plan in plans))
        problem.workers.agree(
            "the plans of auto",
            "the same in every process",
            repr([[row.kept for row in mask.rows] for mask in distinct]),
            "With a budget of speed, each process measures its own: name a scorer for that.",
        )
        losses, refit, notes = self._losses(problem, folds, distinct)
        rows = losses[[distinct.index(plan.mask) for plan in plans]]  # [plans, rows]
        kept, more = _finite(asked, rows)
        masks = [plans[i].mask for i in kept]
        same = [masks.index(mask) for mask in masks]
        merged = _draws_as_one([asked[i] for i in kept], rows[kept].numpy(), same)
        folds_of_refits = self.folds if refit else None
        found, chosen = ranked(*merged, folds_of_refits, self.confidence)
        taken = next(i for i in kept if candidate_name(*asked[i]) == chosen)
        refitting = None
        if refit and not self.stands_in:
            refitting = self._refitting(
                problem, folds, plans[taken].mask, rows[taken], len(distinct)
            )
        choice = Choice(
            candidates=found,
            chosen=chosen,
            budget=plans[0].wanted,
            refit=refit,
            n_examples=folds.size,
            whole=whole,
            confidence=self.confidence,
            notes=(*notes, *more),
            refitting=refitting,
        )
        scorer = candidates.index((choice.best.scorer, choice.best.settings))
        return self._of(estimates[scorer], choice)

    def plan(self, scores: HeadScores, alone: bool) -> PruningPlan | None:
        """The plan that a candidate's scores are judged by.

        Args:
            scores: Of a candidate.
            alone: Whether each kind of attention meets the budget by itself; None is returned where
                that is no other plan, or none can be had.
        """
        if not alone:
            return self.selected(scores, None)
        groups = self.groups(scores)
        if groups is None:
            return None
        try:
            return self.selected(scores, groups)
        except InfeasibleBudget:
            return None

    def groups(self, scores: HeadScores) -> dict[str, Budget] | None:
        """The budget of each kind of attention; None where kinds are not judged by themselves."""
        return by_kind(scores.sites, Budget(keep_heads=self.keep))

    def selected(self, scores: HeadScores, groups: Mapping[str, Budget] | None) -> PruningPlan:
        """The plan under these budgets, or under one for all heads."""
        return select(scores, groups or Budget(keep_heads=self.keep))

    def refit_(self, problem: ScoringProblem, small: nn.Module, batches: list[Any]) -> object:
        """Refits a cut model in place, as it will be after the cut."""
        loss = None if is_default(problem.loss) else problem.loss
        return recover_(
            small, batches, self._method(), problem.model, loss, sites_of(problem.bound)
        )

    @property
    def refit_name(self) -> str:
        """What cut models are refitted by, in words; empty for nothing."""
        return self.refit or ""

    @property
    def stands_in(self) -> bool:
        """Whether the refit stands in for a training, so that nobody asked for it."""
        return False

    def _method(self) -> Recovery:
        assert self.refit is not None
        method: Recovery = recovery.registry.get(self.refit)(**(self.refit_settings or {}))
        return method

    def _usable(self, problem: ScoringProblem) -> list[Named]:
        """The candidates; of the default ones none that calls the model itself, where the loss is
        the user's own.

        Such a loss may take apart batches that the model itself does not take.
        """
        if self.candidates != DEFAULT or is_default(problem.loss):
            return self.asked
        return [(name, settings) for name, settings in self.asked if "curvature" not in settings]

    def _estimates(self, problem: ScoringProblem, candidates: Sequence[Named]) -> list[Estimate]:
        """Every candidate's estimate; candidates share their passes."""
        scorers = [_configured(name, settings) for name, settings in candidates]
        problem.scorers = (*problem.scorers, *scorers)
        return [scorer.estimate(problem) for scorer in scorers]

    def _plans(
        self, problem: ScoringProblem, candidates: Sequence[Named], estimates: Sequence[Estimate]
    ) -> tuple[list[Asked], list[PruningPlan]]:
        """What is asked, and its plan, of every candidate and random draw."""
        seeds = [self.seed + _FIRST_DRAW + i for i in range(self.random_draws)]
        draws = [
            _configured(RANDOM, FrozenDict({"seed": seed})).estimate(problem) for seed in seeds
        ]
        scored = [
            *zip(candidates, estimates, strict=True),
            *(((RANDOM, EMPTY), draw) for draw in draws),
        ]
        asked, plans = [], []
        for (name, settings), estimate in scored:
            scores = _scores(problem, name, estimate)
            for alone in (False,) if name == RANDOM else (False, True):
                plan = self.plan(scores, alone)
                if plan is not None:
                    asked.append((name, settings, alone))
                    plans.append(plan)
        return asked, plans

    def _losses(
        self, problem: ScoringProblem, folds: Folds, masks: Sequence[HeadMask]
    ) -> tuple[torch.Tensor, str, tuple[str, ...]]:
        """``[masks, rows]``, what refitted the cut models, and notes."""
        refit: Refit | None = partial(self.refit_, problem) if self.refit_name else None
        try:
            return held_out_losses(problem, folds, masks, refit), self.refit_name, ()
        except RefitRefused as error:
            note = f"Judged without a refit, which {self.refit_name} refuses: {error}"
            return held_out_losses(problem, folds, masks, None), "", (note,)

    def _refitting(
        self,
        problem: ScoringProblem,
        folds: Folds,
        mask: HeadMask,
        refitted: torch.Tensor,
        n_plans: int,
    ) -> Refitting | None:
        """Compare the losses of the refitted model, ``[rows]``, with those of the cut one alone.

        The plan was taken for its loss after the refit, so the interval allows for all plans. None
        where the cut model alone has losses that are not finite: the refit is needed then.
        """
        (alone,) = held_out_losses(problem, folds, [mask], None)  # [rows]
        if not bool(alone.isfinite().all()):
            return None
        difference = (alone - refitted).numpy()
        low, high = interval(difference, self.folds, self.confidence, n_plans)
        return Refitting(float(alone.mean()), low, high)

    def _of(self, estimate: Estimate, choice: Choice) -> Estimate:
        """The estimate of the chosen candidate, with the choice and what there is to say about
        it."""
        said = [*choice.notes]
        if choice.ties:
            names = " and ".join([choice.chosen, *(c.name for c in choice.ties)])
            said.append(
                f"On these rows {names} are equally good, though they keep different heads."
            )
        said += filter(None, (choice.doubt, choice.refit_doubt))
        notes = [*estimate.notes, *(f"auto: {note}" for note in said)]
        return replace(estimate, notes=tuple(notes), choice=choice)


def _scores(problem: ScoringProblem, name: str, estimate: Estimate) -> HeadScores:
    """An estimate as a selector takes it."""
    sites = tuple(b.site for b in problem.bound)
    rows = estimate.values.split([len(site.units) for site in sites])
    values = tuple(tuple(map(float, row)) for row in rows)
    n_examples, nothing = estimate.n_examples, ModelFingerprint("", "")
    return HeadScores(sites, values, None, name, EMPTY, n_examples, nothing, costs=problem.costs)


def _configured(name: str, settings: Mapping[str, Any]) -> Scorer:
    """A candidate's scorer.

    Raises:
        UnknownName: no such scorer.
        InvalidValue: a setting that it lacks, or that cannot be.
    """
    cls = scoring.registry.get(name)
    _check_settings("Auto.candidates", name, cls, settings)
    found: Scorer = cls(**settings)
    return found


def _check_settings(where: str, name: str, method: Any, settings: Mapping[str, Any]) -> None:
    """Refuses settings that a registered method, a dataclass, does not have."""
    known = [f.name for f in dataclasses.fields(method)]
    for key in settings:
        if key not in known:
            raise InvalidValue(where, f"settings of {name}", repr(key), did_you_mean(key, known))


def _finite(asked: Sequence[Asked], losses: torch.Tensor) -> tuple[list[int], tuple[str, ...]]:
    """Places of those whose cut models have finite losses ``[plans, rows]``, and a note about the
    others.

    Raises:
        InvalidValue: no scorer's has.
    """
    finite = losses.isfinite().all(1).tolist()
    kept = [i for i, fine in enumerate(finite) if fine]
    if not any(asked[i][0] != RANDOM for i in kept):
        hint = "Look for NaN or infinite values in the batches; try a larger budget, or float32."
        raise InvalidValue(
            "losses of cut models", "finite for one candidate at least", "NaN or infinite", hint
        )
    lost = [candidate_name(*one) for one, fine in zip(asked, finite, strict=True) if not fine]
    notes = (
        (f"Not judged, for losses of the cut model are NaN or infinite: {', '.join(lost)}.",)
        if lost
        else ()
    )
    return kept, notes


def _draws_as_one(
    asked: list[Asked], losses: Floats, same: list[int]
) -> tuple[list[Asked], Floats, list[int]]:
    """The random draws as one candidate, whose loss is their mean; it comes last, and keeps no
    plan's heads."""
    n_scorers = sum(name != RANDOM for name, _, _ in asked)
    if n_scorers == len(asked):
        return asked, losses, same
    rows = np.concatenate([losses[:n_scorers], losses[n_scorers:].mean(0, keepdims=True)])
    return [*asked[:n_scorers], (RANDOM, EMPTY, False)], rows, [*same[:n_scorers], n_scorers]
