"""``prune_gradually_``: heads leave in steps while the model is trained, along a cubic schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from headprune.selection._budget import pose
from headprune.surgery.prune import prune_

#: The checkpoint's name.
FILE = "gradual.pt"
KINDS = ("keep_heads", "keep_params", "keep_macs", "keep_kv")


@dataclass(frozen=True)
class GradualStage(Value):
    """One step down and the training after it.

    Args:
        plan: What stays; its budget is one of the whole model that was given.
        proof: The cut model compared with the gated one; None where no example was given.
        training: The training after the cut.
    """

    plan: PruningPlan
    proof: Proof | None
    training: RecoveryReport


@dataclass(frozen=True)
class GradualReport(Value):
    """What ``prune_gradually_`` did, stage by stage."""

    stages: tuple[GradualStage, ...]

    @property
    def plan(self) -> PruningPlan:
        """What stays in the end, in original heads."""
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
    """Cuts and trains in turn: n times the heads are scored, some leave, and a share of the steps
    is trained.

    After stage i of n there stays ``final + (1 - final) (1 - i / n)³`` of the model that was given:
    the cubic schedule of Zhu & Gupta 2017, equation 1, from 0 sparsity at t0 = 0. Much leaves
    early, while much can be spared, little late, and the last share of the steps trains what the
    budget asks for. They mask single weights and keep the masked ones; here heads leave for good,
    so what stays at a stage is a part of what stayed before.

    The learning rate follows one schedule over all stages, and the data are read on from stage to
    stage. A cut replaces parameters, so AdamW's averages begin anew at each stage. Stage i draws
    from ``finetune.seed + i``.

    Args:
        model: The model, changed in place.
        batches: Training data, as for ``recover_``.
        budget: What may stay of the model as it is given; any but ``speedup``.
        stages: n; there must be as many steps.
        finetune: The training of all stages together; its teacher settings and adapters (merged at
            the end of each stage) hold in every stage. Not with validation or checkpoints, which
            belong to one training.
        scorer: How heads are scored, at every stage anew.
        selector: Which leave.
        must_keep: Heads that stay; as for ``select``.
        must_remove: Heads that leave at the first stage.
        calibration: Data to score on; ``batches`` where it is left out.
        teacher: The unpruned original, if ``finetune`` distils.
        loss: Per-example loss, of scorer and training.
        sites: Default ``find_sites(model)``; they say under which policy heads leave.
        example: A batch the model takes. With it every cut is compared with the gated model.
        progress: Show progress bars.
        folder: Where it leaves what it has after every stage; the same call with the model as it
            was before goes on from there after it was killed, to the same weights bit for bit where
            the device computes the same. Taken away at the end.
        leave_checkpoint: Leave that of the last stage, as for ``recover_``.

    Raises:
        InvalidValue: fewer steps than stages; a budget or settings that make no sense here.
        CheckpointError: the folder holds the checkpoint of another call.
        InfeasibleBudget: the selector cannot meet the budget; nothing has changed then, but for a
            selector that measures losses or scores again, which is not asked twice: the model has
            what the stages before left.

    >>> import torch
    >>> from headprune import Budget, MultiHeadAttention
    >>> from headprune.recovery import Finetune
    >>> model, data = nn.Sequential(MultiHeadAttention(8, 4)), [torch.randn(4, 5, 8)]
    >>> square = lambda m, x: m(x).square().mean((1, 2))
    >>> report = prune_gradually_(
    ...     model,
    ...     data,
    ...     Budget(keep_heads=1),
    ...     stages=3,
    ...     finetune=Finetune(steps=6),
    ...     scorer="magnitude",
    ...     loss=square,
    ... )
    >>> [stage.plan.mask.n_kept for stage in report.stages]
    [1, 1, 1]
    """
    model, settings = unwrap(model), finetune or Finetune()
    steps = settings.n_steps(sized(batches))
    if leave_checkpoint and folder is None:
        raise InvalidValue("prune_gradually_(leave_checkpoint=)", "given with folder", "no folder")
    _check(budget, stages, settings, steps)
    sites = (
        find_sites(model) if sites is None else sites if isinstance(sites, Sites) else tuple(sites)
    )
    check_unwrapped(model, (site.name for site in sites), "cut before it is wrapped")
    calibration = Batches.of(
        batches if calibration is None else calibration
    )  # read anew at every stage
    calibration.keep()
    rules: dict[str, Any] = {"must_keep": _listed(must_keep), "must_remove": _listed(must_remove)}
    source, whole, before = _Source(batches), 0, 0
    done: list[GradualStage] = []
    keeper = None
    if folder is not None:
        asked = (budget, stages, settings, scorer, selector, rules, len(batches))  # type: ignore[arg-type]
        own = identity(model, teacher, {"what was asked": repr(asked)})
        keeper = Keeper(Path(folder), 1, own, FILE, leave_checkpoint)
        saved = keeper.load()
        if saved is not None:
            done = list(GradualReport.from_json(saved["report"]).stages)
            sites = prune_(model, done[-1].plan.mask, example, sites).sites
            load_weights_(model, saved["weights"])
            source.continue_from(saved["source"])
            whole, before, rules["must_remove"] = saved["whole"], saved["before"], {}
            budget = replace(budget, length=saved["length"])
    for i in range(len(done) + 1, stages + 1):
        calibration.restart()  # a run that goes on from this stage has looked at nothing
        scores = score(model, calibration, scorer, loss=loss, sites=sites, progress=progress)
        extra = _callables(selector, model, calibration, scorer, loss, sites, progress)
        if i == 1:
            whole = pose(scores, budget).whole
            budget = _fixed_length(scores, budget)
            if not extra:
                select(
                    scores, budget, selector, **rules
                )  # refuses what cannot be reached, before anything changes
        wanted = stage_budget(budget, i, stages, whole)
        plan = select(
            scores, _of_now(wanted, whole, _whole(scores, budget)), selector, **rules, **extra
        )
        rules["must_remove"] = {}  # they have left
        cut = prune_(model, plan, example, sites)
        sites, after = cut.sites, steps * i // stages
        share = replace(
            settings, epochs=1, steps=after - before, seed=(settings.seed + i - 1) % 2**32
        )
        job = Job(
            model,
            _Share(source, after - before),
            teacher,
            loss,
            sites,
            progress,
            part=(before, steps),
        )
        done.append(
            GradualStage(replace(plan, budget=wanted), cut.proof, carry_out("finetune", share, job))
        )
        before = after
        if keeper is not None and keeper.due(i, i == stages):
            told = {
                "report": GradualReport(tuple(done)).to_json(),
                "whole": whole,
                "before": before,
            }
            keeper.save(
                {
                    **told,
                    "length": budget.length,
                    "weights": weights(model),
                    "source": source.state(),
                }
            )
    if keeper is not None:
        keeper.finish()
    return GradualReport(tuple(done))


def stage_budget(budget: Budget, stage: int, stages: int, whole: int) -> Budget:
    """What may stay after one of the stages, of the model at the beginning.

    Args:
        budget: What may stay at the end.
        stage: Which one, from 1.
        stages: How many there are.
        whole: Heads of the model, for a count of heads.

    >>> [stage_budget(Budget(keep_heads=0.2), i, 4, 0).amount for i in (1, 2, 3, 4)]
    [0.5375, 0.3, 0.2125, 0.2]
    >>> [stage_budget(Budget(keep_heads=8), i, 4, 72).amount for i in (1, 2, 3, 4)]
    [35, 16, 9, 8]
    """
    final, left = budget.amount, (stages - stage) ** 3
    if isinstance(final, int):
        return replace(budget, keep_heads=final + max(whole - final, 0) * left // stages**3)
    return _with(budget, final if left == 0 else round(final + (1 - final) * left / stages**3, 9))


def _with(budget: Budget, amount: float) -> Budget:
    """A budget of the same kind with another amount."""
    amounts: dict[str, Any] = {budget.kind: amount}
    return replace(budget, **amounts)


def _fixed_length(scores: HeadScores, budget: Budget) -> Budget:
    """A MAC budget at the length that the first scores were measured at: later ones must mean the
    same."""
    if budget.kind != "keep_macs" or budget.length is not None or scores.costs is None:
        return budget
    return replace(budget, length=scores.costs.length)


def _whole(scores: HeadScores, budget: Budget) -> int:
    """What the model costs now in the budget's currency; 0 where nothing is left that could be
    saved."""
    caching = (
        any(cost.kv_bytes for row in scores.costs.units for cost in row) if scores.costs else False
    )
    return 0 if budget.kind == "keep_kv" and not caching else pose(scores, budget).whole


def _of_now(budget: Budget, whole: int, now: int) -> Budget:
    """A budget of the model at the beginning as one of the model that is left."""
    if not now:
        return Budget(keep_heads=1.0)
    if isinstance(budget.amount, int):
        return budget
    if budget.kind == "keep_heads":
        count = allowance(budget.amount, whole)
        return (
            replace(budget, keep_heads=count) if count else budget
        )  # less than a head: refused by its own words
    return _with(budget, min(1.0, budget.amount * whole / now))


def _callables(
    selector: str | Selector,
    model: nn.Module,
    batches: Iterable[Any],
    scorer: str | Scorer,
    loss: Loss | None,
    sites: Iterable[AttentionSite],
    progress: bool,
) -> dict[str, Any]:
    """What a selector asks for beside scores."""
    _, chosen = selection.registry.resolve(selector, Selector, "prune_gradually_(selector=)")
    asked: dict[str, Any] = {}
    if "loss" in chosen.needs:
        asked["loss"] = loss_of(model, batches, loss=loss, sites=sites, progress=progress)
    if "rescore" in chosen.needs:
        asked["rescore"] = rescorer(
            model, batches, scorer, loss=loss, sites=sites, progress=progress
        )
    return asked


def _check(budget: Budget, stages: int, settings: Finetune, steps: int) -> None:
    if not isinstance(budget, Budget) or budget.kind not in KINDS:
        must = f"a Budget by one of {', '.join(KINDS)}"
        raise InvalidValue("prune_gradually_(budget=)", must, str(budget))
    if not isinstance(stages, int) or isinstance(stages, bool) or not 1 <= stages <= steps:
        must = f"a count from 1 to the number of steps, {steps}"
        raise InvalidValue(
            "prune_gradually_(stages=)",
            must,
            repr(stages),
            "Train for more steps, or take fewer stages.",
        )
    for name in ("patience", "eval_every", "checkpoint_every"):
        if getattr(settings, name) is not None:
            must = "left out: every stage is a training of its own"
            raise InvalidValue(
                f"prune_gradually_(finetune=): {name}", must, getattr(settings, name)
            )


def _listed(heads: Mapping[str, Iterable[int]] | None) -> dict[str, list[int]]:
    return {site: list(indices) for site, indices in (heads or {}).items()}


class _Source:
    """The batches, pass after pass, without end; it can begin again in the middle of a pass."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches, self.generators = batches, generators_of(batches)
        self.current: Iterator[Any] = iter(())
        self.begun = random_states(self.generators)
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for batch in self.current:
            self.taken += 1
            return batch
        self.begun, self.taken = random_states(self.generators), 1
        self.current = iter(self.batches)
        for batch in self.current:
            return batch
        raise InvalidValue("batches", "readable more than once", "none on a second reading")

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        return {
            "begun": self.begun,
            "taken": self.taken,
            "now": random_states(self.generators)["generators"],
        }

    def continue_from(self, state: dict[str, Any]) -> None:
        """Draws the order of that pass again and reads past what was taken; other random states
        stay."""
        outside = random_states()
        self.begun, self.taken = state["begun"], state["taken"]
        set_random_states(self.begun, self.generators)
        self.current = iter(self.batches)
        for _ in range(self.taken):
            next(self.current)
        set_random_states({**outside, "generators": state["now"]}, self.generators)


class _Share:
    """The next n batches of a reading that goes on."""

    def __init__(self, source: Iterator[Any], n: int) -> None:
        self.source, self.n = source, n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        return islice(self.source, self.n)
