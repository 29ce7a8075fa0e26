"""`auto`: try several scorers, and take one whose plan is among the best on held-out rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import Any, TypeVar

import torch
from torch import nn

from headprune import recovery, scoring
from headprune.attention.sharded import check_whole
from headprune.choice._held_out import Folds, Refit, RefitRefused, held_out_losses, whole_losses
from headprune.choice._scores import as_scores
from headprune.choice._statistics import JudgedKey, interval, ranked
from headprune.core.bars import announce
from headprune.core.choice import RANDOM, Choice, Refitting, candidate_name
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.errors import InfeasibleBudget, InvalidValue, check_count
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import Budget, PruningPlan
from headprune.core.scores import HeadScores
from headprune.model.losses import predicts_text
from headprune.model.own_loss import is_default
from headprune.model.sites import sites_of
from headprune.recovery._api import recover_
from headprune.recovery._base import Recovery
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.scoring._coupling import losses_are_coupled, refuse_coupled
from headprune.selection._api import select
from headprune.selection._groups import by_kind

_T = TypeVar("_T")
#: Name and settings of a candidate.
CandidateKey = tuple[str, FrozenDict]
#: The candidates, unless others are requested: cheap, each the best on some of the tasks of
#: docs/regret.md, and those with the least regret there first.
DEFAULT = (
    "surgeon",
    FrozenDict({"surgeon": {"curvature": "logits"}}),
    "taylor",
    "fluctuation",
    "obs",
)
#: The candidates where heads and neurons share a budget.
WITH_NEURONS = (
    FrozenDict({"ladder": {"order": "surgeon"}}),
    FrozenDict({"ladder": {"order": "taylor"}}),
    "surgeon",
    "taylor",
    "fluctuation",
)
#: Settings of `lstsq`, unless others are given.
_LSTSQ_SETTINGS = {"feed_forward": True}
#: Where the seeds of random draws begin, away from those of anything else.
_FIRST_DRAW = 2000


@dataclass(frozen=True)
class Auto(Scorer):
    """Try several scorers: cut and refit each one's plan, and compare their held-out losses.

    Each candidate scores all rows, and heads are selected by the budget. A copy of the model is
    cut, refitted on one half of the rows, and judged by its loss on the other, and the other way
    round. The first one within one standard error and 10 % of the lowest loss is chosen. Scores
    have its name; ``scores.choice`` is the table. Where a model has several kinds of attention,
    each candidate is also judged with the budget met by each kind alone.

    When: you do not know which scorer fits model, data and budget.
    Cost: all candidates' shared passes, then one cut and refit per distinct plan and fold. Memory:
    that of its most expensive candidate, and a copy of the model.

    Args:
        keep: Heads to keep, as ``Budget(keep_heads=)``.
        candidates: Registered scorers, the preferred one first: names, or ``{name: settings}``.
        refit: A recovery that does not train, or None.
        refit_settings: Its settings; None is ``feed_forward=True`` for ``lstsq``, else the
            defaults.
        folds: Parts of the rows.
        random_draws: Random plans to compare with.
        confidence: Level of all intervals together.
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
        object.__setattr__(self, "candidates", _frozen(self.candidates))
        refit_settings = self.refit_settings
        if not isinstance(refit_settings, (Mapping, type(None))):
            raise InvalidValue("Auto.refit_settings", "a mapping", repr(refit_settings))
        # A copy of an `auto` (``dataclasses.replace``) passes on the default that was filled in.
        if self.refit is None and refit_settings and refit_settings != _LSTSQ_SETTINGS:
            must = "left out where refit is None"
            raise InvalidValue("Auto.refit_settings", must, repr(refit_settings))
        if refit_settings is None:
            refit_settings = _LSTSQ_SETTINGS if self.refit == "lstsq" else {}
        object.__setattr__(self, "refit_settings", FrozenDict(refit_settings))
        Budget(keep_heads=self.keep)  # refuses what is no budget
        self._check_candidates()
        for name, least in (("folds", 2), ("random_draws", 0), ("seed", 0)):
            check_count(f"Auto.{name}", getattr(self, name), least)
        if not isinstance(self.confidence, float) or not 0 < self.confidence < 1:
            raise InvalidValue("Auto.confidence", "between 0 and 1", self.confidence)
        if self.refit is not None:
            self._check_refit(recovery.registry.get(self.refit))

    @property
    def candidate_keys(self) -> list[CandidateKey]:
        """Name and settings of every candidate.

        Raises:
            InvalidValue: a mapping that is not of one name to its settings.
        """
        return list(map(_key, self.candidates))

    @property
    def scorers(self) -> list[Scorer]:
        """Every candidate, configured."""
        return list(starmap(_configured, self.candidate_keys))

    def most_plans(self, sites: Iterable[AttentionSite], n_candidates: int) -> int:
        """The largest number of plans to judge; candidates that keep the same heads share one."""
        kinds = {site.kind for site in sites if not site.is_feed_forward}
        # With several kinds of attention, a plan with a budget for each kind is tried as well.
        plans_per_candidate = 2 if len(kinds) > 1 and self.tries_kinds else 1
        return n_candidates * plans_per_candidate + self.random_draws

    def judging(self, sites: Iterable[AttentionSite], n_candidates: int) -> str:
        """How many plans are judged, and how, as text."""
        done = f"cut and refitted by {self.refit_name}" if self.refit_name else "cut"
        return f"up to {self.most_plans(sites, n_candidates)} plans, each {done} {self.folds} times"

    def n_fitted(self, n_rows: int) -> int:
        """How many of so many rows each refit is fitted to, on average."""
        return n_rows * (self.folds - 1) // self.folds

    @property
    def tries_kinds(self) -> bool:
        """Whether a budget for each kind of attention is tried, where there are several."""
        return True

    def announce(self, text: str, progress: bool | None) -> None:
        """Say how much work is about to be done; ``progress`` is that of ``score``."""
        announce(text, progress)

    def _check_candidates(self) -> None:
        """Refuse scorers that cannot be candidates, and settings that they do not have."""
        for name, settings in self.candidate_keys:
            if name in ("auto", RANDOM) or not scoring.registry.get(name).needs_data:
                must = "scorers that read data, auto not among them"
                hint = "random is judged anyway: see random_draws."
                raise InvalidValue("Auto.candidates", must, repr(name), hint)
            _configured(name, settings)
        if not self.candidates:
            raise InvalidValue("Auto.candidates", "at least one scorer", "none")
        if len(set(self.candidate_keys)) < len(self.candidate_keys):
            names = ", ".join(
                starmap(candidate_name, ((*key, False) for key in self.candidate_keys))
            )
            raise InvalidValue("Auto.candidates", "different scorers", names)

    def _check_refit(self, method: type[Recovery]) -> None:
        """Refuse a refit that trains, and settings that it does not have."""
        if method.trains:
            must = "a recovery that does not train"
            hint = "Take lstsq in place of the training."
            raise InvalidValue("Auto.refit", must, repr(self.refit), hint)
        self._method()  # refuses settings that it does not have

    @property
    def settings(self) -> FrozenDict:
        # Auto's own fields: a subclass has more, which are no settings.
        return FrozenDict({f.name: getattr(self, f.name) for f in dataclasses.fields(Auto)})

    @property
    def by_example(self) -> bool:
        return False

    @torch.inference_mode(False)
    def estimate(self, problem: ScoringProblem) -> Estimate:
        """Score with all candidates, judge their plans, and return the estimate of the best.

        Raises:
            InvalidValue: fewer rows than two per fold, losses that depend on other examples of a
                batch, or what a candidate refuses.
            InfeasibleBudget: no plan meets the budget.
        """
        must = "one whose weights are whole in this process, to be copied and cut"
        check_whole(problem.model, must)
        problem.keep_batches()
        folds = Folds(problem, self.folds)

        # 1. Score with every candidate, and select heads by each one's scores.
        candidates = self._usable(problem)
        if problem.workers.rank == 0:
            judging = self.judging(sites_of(problem.bound), len(candidates))
            text = f"auto: {len(candidates)} scorers, then {judging}, on {folds.size:,} rows"
            self.announce(text, problem.progress)
        estimates = self._estimates(problem, candidates)
        if losses_are_coupled(problem):
            # Rows of a fold would have other losses than rows of a whole batch.
            refuse_coupled(problem, "auto")
        keys, plans = self._plans(problem, candidates, estimates)
        # Before the copies: a model may keep what it computed last, and a tensor with a graph
        # cannot be copied.
        whole = float(whole_losses(problem, folds).mean())

        # 2. Judge every plan by the losses of held-out rows, equal plans once.
        masks = [plan.mask for plan in plans]
        distinct = list(dict.fromkeys(masks))
        _check_equal_plans(problem, distinct)
        of_distinct, refit, notes = self._losses(problem, folds, distinct)
        losses = of_distinct[_first_places(masks, distinct)]  # [plans, rows]
        finite, note = _finite(keys, losses)
        is_text = is_default(problem.loss) and predicts_text(problem.model, folds.batches[0][0])

        # 3. Take a candidate.
        keys, masks, losses = _at(keys, finite), _at(masks, finite), losses[finite]
        n_scorers = sum(scorer != RANDOM for scorer, _, _ in keys)  # the draws come last
        table, chosen = ranked(
            keys[:n_scorers],
            losses[:n_scorers].numpy(),
            _first_places(masks, masks)[:n_scorers],
            self.folds if refit else None,
            self.confidence,
            draws=list(losses[n_scorers:].numpy()),
            is_text=is_text,
        )

        # 4. Compare its plan with the same plan without a refit.
        refitting = None
        if refit and not self.stands_in:
            names = list(starmap(candidate_name, keys))
            at = names.index(chosen)
            refitting = self._refitting(problem, folds, masks[at], losses[at])
        choice = Choice(
            candidates=table,
            chosen=chosen,
            budget=plans[0].wanted,
            refit=refit,
            n_examples=folds.size,
            whole=whole,
            confidence=self.confidence,
            notes=(*notes, *note),
            refitting=refitting,
            is_text=is_text,
            selector=plans[0].selector,
            n_refitted=self.n_fitted(folds.size) if refit else 0,
        )
        scorer = candidates.index((choice.best.scorer, choice.best.settings))
        return _with_choice(estimates[scorer], choice)

    def plan(self, scores: HeadScores, alone: bool) -> PruningPlan | None:
        """Select the plan that a candidate's scores are judged by.

        Args:
            scores: Of a candidate.
            alone: Whether each kind of attention meets the budget by itself.

        Returns:
            The plan. With ``alone`` None where that is no other plan, or where none meets the
            budget.
        """
        if not alone:
            return self.selected(scores, None)
        groups = self.groups(scores)
        if groups is None:
            return None
        # A budget that all heads meet together may be too small for one kind.
        try:
            return self.selected(scores, groups)
        except InfeasibleBudget:
            return None

    def groups(self, scores: HeadScores) -> dict[str, Budget] | None:
        """The budget of each kind of attention; None where kinds are not judged by themselves."""
        return by_kind(scores.sites, Budget(keep_heads=self.keep))

    def selected(self, scores: HeadScores, groups: Mapping[str, Budget] | None) -> PruningPlan:
        """Select the plan under these budgets, or under one for all heads."""
        return select(scores, groups or Budget(keep_heads=self.keep))

    def refit_(self, problem: ScoringProblem, small: nn.Module, batches: list[Any]) -> object:
        """Refit a cut model in place, as it will be after the cut."""
        loss = None if is_default(problem.loss) else problem.loss
        sites = sites_of(problem.bound)
        return recover_(small, batches, self._method(), problem.model, loss, sites)

    @property
    def refit_name(self) -> str:
        """Name of the recovery of cut models; empty where there is none."""
        return self.refit or ""

    @property
    def stands_in(self) -> bool:
        """Whether the refit replaces a training, so that the user did not ask for it."""
        return False

    def _method(self) -> Recovery:
        """The refit, configured."""
        assert self.refit is not None
        settings = self.refit_settings or {}
        method: Recovery = recovery.registry.configured(self.refit, settings, "Auto.refit_settings")
        return method

    def _usable(self, problem: ScoringProblem) -> list[CandidateKey]:
        """The candidates that can score with the problem's loss.

        With the user's own loss, default candidates that call the model themselves are left out:
        the loss may take batches that the model does not take.
        """
        if self.candidates != DEFAULT or is_default(problem.loss):
            return self.candidate_keys
        return [
            (name, settings)
            for name, settings in self.candidate_keys
            if "curvature" not in settings
        ]

    def _estimates(
        self, problem: ScoringProblem, candidates: Sequence[CandidateKey]
    ) -> list[Estimate]:
        """Every candidate's estimate; candidates share their passes."""
        scorers = list(starmap(_configured, candidates))
        # Scorers that are registered here gather what they read in one pass.
        problem.scorers = (*problem.scorers, *scorers)
        return [scorer.estimate(problem) for scorer in scorers]

    def _plans(
        self,
        problem: ScoringProblem,
        candidates: Sequence[CandidateKey],
        estimates: Sequence[Estimate],
    ) -> tuple[list[JudgedKey], list[PruningPlan]]:
        """Every candidate with its plan, and after them every random draw with its plan."""
        keys: list[JudgedKey] = []
        plans: list[PruningPlan] = []

        def add(key: CandidateKey, estimate: Estimate, alone: bool) -> None:
            plan = self.plan(as_scores(problem, key[0], estimate), alone)
            if plan is not None:
                keys.append((*key, alone))
                plans.append(plan)

        for named, estimate in zip(candidates, estimates, strict=True):
            add(named, estimate, alone=False)
            add(named, estimate, alone=True)
        for number in range(self.random_draws):
            seed = self.seed + _FIRST_DRAW + number
            draw = _configured(RANDOM, {"seed": seed})
            add((RANDOM, EMPTY), draw.estimate(problem), alone=False)
        return keys, plans

    def _losses(
        self, problem: ScoringProblem, folds: Folds, masks: Sequence[HeadMask]
    ) -> tuple[torch.Tensor, str, tuple[str, ...]]:
        """``[masks, rows]``, the name of the refit that was used, and notes."""
        refit: Refit | None = partial(self.refit_, problem) if self.refit_name else None
        # A model that cannot be refitted is judged by the cut alone, in every process.
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
    ) -> Refitting | None:
        """Compare the losses of the refitted model, ``[rows]``, with those of the cut one alone.

        It is a single comparison: the stretch of the standard error allows for the choice of the
        plan. None where the cut model alone has losses that are not finite: the refit is needed.
        """
        (alone,) = held_out_losses(problem, folds, [mask], None)  # [rows]
        if not bool(alone.isfinite().all()):
            return None
        difference = (alone - refitted).numpy()
        low, high = interval(difference, self.folds, self.confidence, 1)
        return Refitting(float(alone.mean()), low, high)


def _frozen(candidates: Any) -> tuple[str | FrozenDict, ...]:
    """The candidates as values that do not change.

    Raises:
        InvalidValue: no collection of names and mappings.
    """
    must = "a list of scorers, each a name or {name: settings}"
    if isinstance(candidates, (str, Mapping)) or not isinstance(candidates, Iterable):
        raise InvalidValue("Auto.candidates", must, repr(candidates))
    frozen: list[str | FrozenDict] = []
    for candidate in candidates:
        if not isinstance(candidate, (str, Mapping)):
            raise InvalidValue("Auto.candidates", must, repr(candidate))
        frozen.append(candidate if isinstance(candidate, str) else FrozenDict(candidate))
    return tuple(frozen)


def _key(candidate: str | Mapping[str, Mapping[str, Any]]) -> CandidateKey:
    """Name and settings of a candidate, as the user gave it."""
    if isinstance(candidate, str):
        return candidate, EMPTY
    pairs = list(candidate.items())
    if len(pairs) != 1 or not isinstance(pairs[0][1], Mapping):
        must = "names, or mappings of one name to its settings"
        raise InvalidValue("Auto.candidates", must, repr(candidate))
    name, settings = pairs[0]
    return name, FrozenDict(settings)


def _check_equal_plans(problem: ScoringProblem, masks: Sequence[HeadMask]) -> None:
    """Refuse plans that differ between the processes, which share the work on them.

    Raises:
        InvalidValue: in every process, where the plans differ.
    """
    problem.workers.agree(
        "the plans of auto",
        "the same in every process",
        repr([mask.rows for mask in masks]),
        "With a budget of speed, each process measures a latency table of its own, so plans may"
        " differ: name a scorer in place of auto.",
    )


def _with_choice(estimate: Estimate, choice: Choice) -> Estimate:
    """The estimate of the chosen candidate, with the choice and notes about it."""
    notes = [*choice.notes]
    # Each is empty where there is none.
    notes += [choice.tie_note, choice.doubt, choice.refit_doubt]
    of_auto = [f"auto: {note}" for note in notes if note]
    return replace(estimate, notes=(*estimate.notes, *of_auto), choice=choice)


def _configured(name: str, settings: Mapping[str, Any]) -> Scorer:
    """Make a candidate's scorer."""
    scorer: Scorer = scoring.registry.configured(name, settings, "Auto.candidates")
    return scorer


def _finite(keys: Sequence[JudgedKey], losses: torch.Tensor) -> tuple[list[int], tuple[str, ...]]:
    """Find the plans whose cut models have finite losses ``[plans, rows]``.

    Returns:
        Their places, and a note about the others.

    Raises:
        InvalidValue: no scorer's plan has finite losses.
    """
    finite: list[int] = []
    others: list[str] = []
    any_scorer = False
    for place, is_finite in enumerate(losses.isfinite().all(1).tolist()):
        if is_finite:
            finite.append(place)
            any_scorer |= keys[place][0] != RANDOM
        else:
            others.append(candidate_name(*keys[place]))
    if not any_scorer:
        must, got = "finite for at least one candidate", "NaN or infinite"
        hint = "Look for NaN or infinite values in the batches; try a larger budget, or float32."
        raise InvalidValue("losses of cut models", must, got, hint)
    if not others:
        return finite, ()
    names = ", ".join(others)
    note = f"Not judged, because the cut model's losses are NaN or infinite: {names}."
    return finite, (note,)


def _at(items: Sequence[_T], places: Sequence[int]) -> list[_T]:
    return [items[i] for i in places]


def _first_places(items: Sequence[HeadMask], among: Sequence[HeadMask]) -> list[int]:
    """Of every item, the first place where it is among others."""
    return list(map(among.index, items))
