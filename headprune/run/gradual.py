"""``prune_gradually_``: remove heads in stages while the model is trained.

>>> import torch
>>> from headprune import Budget, MultiHeadAttention
>>> from headprune.recovery import Finetune
>>> model, data = nn.Sequential(MultiHeadAttention(8, 4)), [torch.randn(4, 5, 8)]
>>> square = lambda m, x: m(x).square().mean((1, 2))
>>> training = Finetune(steps=6)
>>> report = prune_gradually_(
...     model, data, Budget(keep_heads=1), stages=3, finetune=training, loss=square
... )
>>> [stage.plan.mask.n_kept for stage in report.stages]
[1, 1, 1]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from headprune import selection
from headprune.core.codec import Value
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite
from headprune.core.plan import Budget, PruningPlan, allowance
from headprune.core.record import Proof
from headprune.core.scores import HeadScores
from headprune.model.batches import Batches
from headprune.model.losses import Loss
from headprune.model.sites import Sites, find_sites, unwrap
from headprune.model.wrappers import check_unwrapped
from headprune.recovery._api import carry_out
from headprune.recovery._base import Job, RecoveryReport
from headprune.recovery._checkpoint import Keeper, identity, load_weights_, weights
from headprune.recovery._stream import generators_of
from headprune.recovery._traces import random_states, set_random_states
from headprune.recovery.finetune import Finetune, sized
from headprune.scoring._api import score
from headprune.scoring._base import Scorer
from headprune.scoring._callables import loss_of, rescorer
from headprune.selection._api import select
from headprune.selection._base import Selector
from headprune.selection._budget import problem_of
from headprune.surgery.prune import prune_

#: The checkpoint's name.
FILE = "gradual.pt"
#: Budgets that can be reached in stages; a speedup would need a new latency table at each.
KINDS = ("keep_heads", "keep_params", "keep_macs", "keep_kv")


@dataclass(frozen=True)
class GradualStage(Value):
    """One cut and the training after it.

    Args:
        plan: The heads kept; its budget is relative to the model as it was given.
        proof: The cut model compared with the gated one; None without an example.
        training: The training after the cut.
    """

    plan: PruningPlan
    proof: Proof | None
    training: RecoveryReport


@dataclass(frozen=True)
class GradualReport(Value):
    """The cuts and trainings of ``prune_gradually_``, stage by stage."""

    stages: tuple[GradualStage, ...]

    @property
    def plan(self) -> PruningPlan:
        """The heads kept in the end, in the numbering of the given model."""
        return self.stages[-1].plan

    def __str__(self) -> str:
        return "\n".join(map(_line, self.stages))


def _line(stage: GradualStage) -> str:
    numbers = stage.training.metrics
    return f"{stage.plan.title}; {numbers['steps']} steps, loss {numbers['loss']:.4g}"


def prune_gradually_(
    model: nn.Module,
    batches: Iterable[Any],
    budget: Budget,
    *,
    stages: int = 8,
    finetune: Finetune | None = None,
    scorer: str | Scorer = "taylor",
    selector: str | Selector = "global_topk",
    must_keep: Mapping[str, Iterable[int]] | None = None,
    must_remove: Mapping[str, Iterable[int]] | None = None,
    calibration: Iterable[Any] | None = None,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    sites: Iterable[AttentionSite] | None = None,
    example: Any = None,
    progress: bool = False,
    folder: str | Path | None = None,
    leave_checkpoint: bool = False,
) -> GradualReport:
    """Cut and train in turn, in n stages: score the heads, remove some, train.

    Stage i keeps ``final + (1 - final) (1 - i / n)³`` of the given model: the cubic schedule of
    Zhu & Gupta 2017, equation 1. All stages share one learning rate schedule; AdamW's averages
    are reset at each stage.

    Args:
        model: Changed in place.
        batches: Training data, as for ``recover_``.
        budget: Any but ``speedup``, of the given model.
        stages: n; at most one per training step.
        finetune: The training of all stages; stage i adds ``i - 1`` to its seed.
        scorer: Scores the heads at every stage.
        selector: Chooses the heads to remove.
        must_keep: As for ``select``.
        must_remove: Heads to remove at the first stage.
        calibration: Data to score on; default ``batches``.
        teacher: The uncut original, if ``finetune`` distils.
        loss: Per-example loss.
        sites: Default: all.
        example: A batch, to compare every cut with the gated model.
        progress: Show progress bars.
        folder: For a checkpoint per stage, from which the same call resumes.
        leave_checkpoint: Keep the last one.

    Raises:
        InvalidValue: fewer steps than stages, or settings that do not apply.
        CheckpointError: ``folder`` has another call's checkpoint.
        InfeasibleBudget: the selector cannot meet the budget.
    """
    # Zhu & Gupta mask single weights and keep the masked ones. Here a stage removes heads for good,
    # so it keeps a subset of what the stage before kept.

    # 1. Check the arguments.
    model, settings = unwrap(model), finetune or Finetune()
    steps = settings.n_steps(sized(batches))
    if leave_checkpoint and folder is None:
        raise InvalidValue("prune_gradually_(leave_checkpoint=)", "given with folder", "no folder")
    _check(budget, stages, settings, steps)
    sites = _all_sites(model, sites)
    check_unwrapped(model, (site.name for site in sites), "cut before it is wrapped")

    # 2. Set up. The calibration data are read at every stage, so they are kept.
    calibration = Batches.of(batches if calibration is None else calibration)
    calibration.keep()
    work = _GradualPruning(
        model=model,
        sites=sites,
        budget=budget,
        n_stages=stages,
        n_steps=steps,
        settings=settings,
        scorer=scorer,
        selector=selector,
        calibration=calibration,
        training=_EndlessBatches(batches),
        teacher=teacher,
        loss=loss,
        example=example,
        progress=progress,
        must_keep=_as_lists(must_keep),
        must_remove=_as_lists(must_remove),
    )

    # 3. Resume from the checkpoint of an earlier call, if there is one.
    keeper = None
    if folder is not None:
        keeper = Keeper(Path(folder), 1, work.identity(len(batches)), FILE, leave_checkpoint)  # type: ignore[arg-type]
        saved = keeper.load()
        if saved is not None:
            work.restore_(saved)

    # 4. Score, select, cut and train, stage by stage.
    for i in range(len(work.done) + 1, stages + 1):
        work.stage_(i)
        if keeper is not None and keeper.due(i, i == stages):
            keeper.save(work.state())
    if keeper is not None:
        keeper.finish()
    return GradualReport(tuple(work.done))


@dataclass
class _GradualPruning:
    """The settings of one gradual pruning, and its state between two stages.

    Args:
        model: The model, changed in place.
        sites: Its sites after the last stage.
        budget: What to keep in the end, of the model as it was given.
        n_stages: How many stages there are.
        n_steps: Training steps of all stages together.
        must_remove: Heads to remove at the next stage; empty after the first one.
        original_cost: What the given model costs in the budget's unit; known after the first
            scoring.
        steps_done: Training steps of the stages so far.
        done: Reports of the stages so far.
    """

    model: nn.Module
    sites: Sites | tuple[AttentionSite, ...]
    budget: Budget
    n_stages: int
    n_steps: int
    settings: Finetune
    scorer: str | Scorer
    selector: str | Selector
    calibration: Batches
    training: _EndlessBatches
    teacher: nn.Module | None
    loss: Loss | None
    example: Any
    progress: bool
    must_keep: dict[str, list[int]]
    must_remove: dict[str, list[int]]
    original_cost: int = 0
    steps_done: int = 0
    done: list[GradualStage] = field(default_factory=list)

    def stage_(self, i: int) -> None:
        """Run stage ``i``, counted from 1."""
        # 1. Score the heads of the model as it is now.
        self.calibration.restart()  # a resumed call has read nothing yet
        scores = score(
            self.model,
            self.calibration,
            self.scorer,
            loss=self.loss,
            sites=self.sites,
            progress=self.progress,
        )

        # 2. Select the heads to keep.
        callables = self._callables()
        if i == 1:
            self._first_scores(scores, callables)
        wanted = stage_budget(self.budget, i, self.n_stages, self.original_cost)
        now = _budget_now(wanted, self.original_cost, _cost(scores, self.budget))
        plan = self._select(scores, now, callables)
        self.must_remove = {}  # they are removed in this stage's cut

        # 3. Cut the others.
        cut = prune_(self.model, plan, self.example, self.sites)
        self.sites = cut.sites

        # 4. Train for this stage's part of the steps.
        training = self._train_(i)
        self.done.append(GradualStage(replace(plan, budget=wanted), cut.proof, training))

    def _first_scores(self, scores: HeadScores, callables: dict[str, Any]) -> None:
        """Take from the first scores what the model costs, and refuse an impossible budget."""
        self.original_cost = problem_of(scores, self.budget).whole
        self.budget = _fixed_length(scores, self.budget)
        # Nothing has changed yet. A selector that measures losses or scores again is not asked
        # twice, because that takes long: it may refuse the budget at a later stage.
        if not callables:
            self._select(scores, self.budget, callables)

    def _select(self, scores: HeadScores, budget: Budget, callables: dict[str, Any]) -> PruningPlan:
        return select(
            scores,
            budget,
            self.selector,
            must_keep=self.must_keep,
            must_remove=self.must_remove,
            **callables,
        )

    def _callables(self) -> dict[str, Any]:
        """The functions by which the selector measures losses or new scores, if it does."""
        where = "prune_gradually_(selector=)"
        _, chosen = selection.registry.resolve(self.selector, Selector, where)
        options: dict[str, Any] = {
            "loss": self.loss,
            "sites": self.sites,
            "progress": self.progress,
        }
        callables: dict[str, Any] = {}
        if "loss" in chosen.needs:
            callables["loss"] = loss_of(self.model, self.calibration, **options)
        if "rescore" in chosen.needs:
            callables["rescore"] = rescorer(self.model, self.calibration, self.scorer, **options)
        return callables

    def _train_(self, i: int) -> RecoveryReport:
        """Train for the steps of stage ``i``, along the schedule of all stages."""
        end = self.n_steps * i // self.n_stages
        steps = end - self.steps_done
        seed = (self.settings.seed + i - 1) % 2**32
        settings = replace(self.settings, epochs=1, steps=steps, seed=seed)
        job = Job(
            self.model,
            _NextBatches(self.training, steps),
            self.teacher,
            self.loss,
            self.sites,
            self.progress,
            part=(self.steps_done, self.n_steps),
        )
        report = carry_out("finetune", settings, job)
        self.steps_done = end
        return report

    def identity(self, n_batches: int) -> Any:
        """What a checkpoint must agree with to be resumed from: models, data and arguments."""
        rules = {"must_keep": self.must_keep, "must_remove": self.must_remove}
        asked = (
            self.budget,
            self.n_stages,
            self.settings,
            self.scorer,
            self.selector,
            rules,
            n_batches,
        )
        return identity(self.model, self.teacher, {"what was asked": repr(asked)})

    def state(self) -> dict[str, Any]:
        """The checkpoint after a stage."""
        return {
            "report": GradualReport(tuple(self.done)).to_json(),
            "whole": self.original_cost,
            "before": self.steps_done,
            "length": self.budget.length,
            "weights": weights(self.model),
            "source": self.training.state(),
        }

    def restore_(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint: cut the model in the same way and load its weights."""
        self.done = list(GradualReport.from_json(saved["report"]).stages)
        self.sites = prune_(self.model, self.done[-1].plan.mask, self.example, self.sites).sites
        load_weights_(self.model, saved["weights"])
        self.training.continue_from(saved["source"])
        self.original_cost = saved["whole"]
        self.steps_done = saved["before"]
        self.must_remove = {}
        self.budget = replace(self.budget, length=saved["length"])


def _all_sites(
    model: nn.Module, sites: Iterable[AttentionSite] | None
) -> Sites | tuple[AttentionSite, ...]:
    """The given sites, or all sites of the model."""
    if sites is None:
        return find_sites(model)
    if isinstance(sites, Sites):  # a tuple that also carries layouts
        return sites
    return tuple(sites)


def stage_budget(budget: Budget, stage: int, stages: int, whole: int) -> Budget:
    """Return the budget of one stage, relative to the model at the beginning.

    Args:
        budget: The budget of the last stage.
        stage: Number of the stage, from 1.
        stages: How many there are.
        whole: Heads of the model at the beginning; only used for a budget that is a count.

    >>> [stage_budget(Budget(keep_heads=0.2), i, 4, 0).amount for i in (1, 2, 3, 4)]
    [0.5375, 0.3, 0.2125, 0.2]
    >>> [stage_budget(Budget(keep_heads=8), i, 4, 72).amount for i in (1, 2, 3, 4)]
    [35, 16, 9, 8]
    """
    # The cubic schedule: the factor (1 - i / n)³, as a fraction of whole numbers.
    final, numerator, denominator = budget.amount, (stages - stage) ** 3, stages**3
    if isinstance(final, int):
        extra = max(whole - final, 0) * numerator // denominator
        return replace(budget, keep_heads=final + extra)
    if numerator == 0:
        return _with_amount(budget, final)
    return _with_amount(budget, round(final + (1 - final) * numerator / denominator, 9))


def _with_amount(budget: Budget, amount: float) -> Budget:
    """Return a budget of the same kind with another amount."""
    amounts: dict[str, Any] = {budget.kind: amount}
    return replace(budget, **amounts)


def _fixed_length(scores: HeadScores, budget: Budget) -> Budget:
    """Fix a MAC budget's length to that of the first scores, for all stages."""
    if budget.kind != "keep_macs" or budget.length is not None or scores.costs is None:
        return budget
    return replace(budget, length=scores.costs.length)


def _cost(scores: HeadScores, budget: Budget) -> int:
    """What the model costs now, in the budget's unit; 0 without a KV cache to shrink."""
    if budget.kind == "keep_kv" and not _has_cache(scores):
        return 0
    return problem_of(scores, budget).whole


def _has_cache(scores: HeadScores) -> bool:
    """Whether any unit has bytes in the KV cache."""
    if scores.costs is None:
        return False
    n_bytes = 0
    for row in scores.costs.units:
        n_bytes += sum(cost.kv_bytes for cost in row)
    return n_bytes > 0


def _budget_now(budget: Budget, original: int, now: int) -> Budget:
    """Turn a budget of the given model into one of the model as it is now.

    Args:
        budget: Relative to the model at the beginning.
        original: Cost of that model, in the budget's unit.
        now: Cost of the model as it is now.
    """
    if not now:  # nothing can be saved any more
        return Budget(keep_heads=1.0)
    if isinstance(budget.amount, int):
        return budget
    if budget.kind == "keep_heads":
        count = allowance(budget.amount, original)
        if not count:  # less than one head: `select` refuses the fraction with its own message
            return budget
        return replace(budget, keep_heads=count)
    return _with_amount(budget, min(1.0, budget.amount * original / now))


def _check(budget: Budget, stages: int, settings: Finetune, steps: int) -> None:
    """Refuse a budget, a number of stages or training settings that do not apply."""
    if not isinstance(budget, Budget) or budget.kind not in KINDS:
        must = f"a Budget by one of {', '.join(KINDS)}"
        raise InvalidValue("prune_gradually_(budget=)", must, str(budget))
    if not isinstance(stages, int) or isinstance(stages, bool) or not 1 <= stages <= steps:
        must = f"a count from 1 to the number of steps, {steps}"
        hint = "Train for more steps, or take fewer stages."
        raise InvalidValue("prune_gradually_(stages=)", must, repr(stages), hint)
    for name in ("patience", "eval_every", "checkpoint_every"):
        value = getattr(settings, name)
        if value is not None:
            must = "left out, because every stage is a separate training"
            raise InvalidValue(f"prune_gradually_(finetune=): {name}", must, value)


def _as_lists(heads: Mapping[str, Iterable[int]] | None) -> dict[str, list[int]]:
    return {site: list(indices) for site, indices in (heads or {}).items()}


class _EndlessBatches:
    """The training batches, pass after pass; it can resume in the middle of a pass."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self.generators = generators_of(batches)
        self.current: Iterator[Any] = iter(())
        self.pass_states = random_states(self.generators)  # at the start of the current pass
        self.taken = 0  # batches of the current pass

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # The next batch of this pass, if it has one.
        for batch in self.current:
            self.taken += 1
            return batch
        # The pass is over: start the next one.
        self.pass_states = random_states(self.generators)
        self.taken = 1
        self.current = iter(self.batches)
        for batch in self.current:
            return batch
        raise InvalidValue("batches", "readable more than once", "none on a second reading")

    def state(self) -> dict[str, Any]:
        """The position in the current pass, and the random states that gave its order."""
        return {
            "begun": self.pass_states,
            "taken": self.taken,
            "now": random_states(self.generators)["generators"],
        }

    def continue_from(self, state: dict[str, Any]) -> None:
        """Draw that pass's order again and skip the batches that were taken.

        Random states outside of the data are not changed.
        """
        outside = random_states()
        # 1. Draw the order again.
        self.pass_states = state["begun"]
        self.taken = state["taken"]
        set_random_states(self.pass_states, self.generators)
        self.current = iter(self.batches)
        # 2. Read past the batches that were taken.
        for _ in range(self.taken):
            next(self.current)
        # 3. Set the states after them, and restore all others.
        set_random_states({**outside, "generators": state["now"]}, self.generators)


class _NextBatches:
    """The next n batches of an endless reading, as a stage's data."""

    def __init__(self, source: Iterator[Any], n: int) -> None:
        self.source, self.n = source, n

    # The training asks for the number of batches.
    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        return islice(self.source, self.n)
