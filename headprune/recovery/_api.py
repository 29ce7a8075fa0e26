"""Recovers a pruned model: checks the arguments, and lets a method change the model in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from headprune.attention.sharded import check_whole
from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import AttentionSite
from headprune.model.batches import Batches
from headprune.model.judging import judged
from headprune.model.losses import Loss
from headprune.model.mistakes import explained
from headprune.model.modes import has_own_code
from headprune.model.offloaded import offloaded
from headprune.model.precision import weights_change
from headprune.model.running import device_of, to_device
from headprune.model.sites import Sites, bind, unwrap
from headprune.recovery import registry
from headprune.recovery._base import Job, Recovery, RecoveryReport


def recover_(
    model: nn.Module,
    batches: Iterable[Any],
    method: str | Recovery = "lstsq",
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    sites: Iterable[AttentionSite] | None = None,
    progress: bool = False,
    validation: Iterable[Any] | None = None,
    folder: str | Path | None = None,
    leave_checkpoint: bool = False,
) -> RecoveryReport:
    """Recover what a cut cost, in place; after an error the model is as it was.

    Args:
        model: The pruned model, or any model for a method that only trains.
        batches: An iterable of what the model takes.
        method: A name in ``hp.recovery.registry.names()``, or a configured method.
        teacher: The unpruned original, for methods that need one; not changed.
        loss: ``(model, batch) -> Tensor[batch]``; the default is the loss of Transformers models.
        sites: Default ``find_sites(model)``, cut feed-forwards too.
        progress: Show a progress bar.
        validation: Batches that a training is judged by.
        folder: Where a training keeps its checkpoint, and continues from it.
        leave_checkpoint: Also keep the final checkpoint, until the model is saved.

    Raises:
        UnknownName: no method of this name.
        InvalidValue: data or a teacher that the method needs are missing, or an argument that it
            does not use is given.
        CheckpointError: the folder holds the checkpoint of another training.
        UnsupportedModel: accelerate offloads weights.
        PlanMismatch: ``model`` was not cut from the teacher.

    >>> import copy, torch
    >>> from headprune import MultiHeadAttention, HeadMask, find_sites, prune_
    >>> model = torch.nn.Sequential(MultiHeadAttention(8, 2))
    >>> teacher = copy.deepcopy(model)
    >>> _ = prune_(model, HeadMask.from_keep({"0": [1]}, {"0": 2}))
    >>> recover_(model, [torch.randn(4, 5, 8)], "mean_fold", teacher).changed
    ('0.W_o.bias',)
    """
    # lstsq is the default because it trains nothing, and is the best of that kind that changes
    # attention alone (docs/pipelines.md).
    name, chosen = registry.resolve(method, Recovery, "recover_(method=)")
    if not isinstance(model, nn.Module):
        raise InvalidValue("recover_(model=)", "a torch.nn.Module", type(model).__name__)
    model = unwrap(model)
    check_whole(model, "one whose weights are whole in this process, to be changed")
    if sites is not None:
        sites = sites if isinstance(sites, Sites) else tuple(sites)
        bind(model, sites)
    if leave_checkpoint and folder is None:
        raise InvalidValue("leave_checkpoint", "given with folder", "no folder")
    job = Job(
        model,
        batches,
        teacher=teacher,
        loss=loss,
        sites=sites,
        progress=progress,
        validation=validation,
        folder=None if folder is None else Path(folder),
        leave_checkpoint=leave_checkpoint,
    )
    return carry_out(name, chosen, job)


def carry_out(name: str, method: Recovery, job: Job) -> RecoveryReport:
    """Check that the method uses what it is given, run it, and report.

    Args:
        name: Name of the method, for messages and the report.
        method: The method.
        job: The model and what the method is given.
    """
    # 1. Arguments.
    if job.teacher is not None or method.needs_teacher:
        job = replace(job, teacher=_checked_teacher(job.model, job.teacher, name, method))
    _check_use("validation", job.validation, method.needs_validation, name)
    _check_use("folder", job.folder, method.resumes and job.folder is not None, name)
    _check_not_offloaded(job, name)
    batches = Batches.of(job.batches)
    job = replace(job, batches=batches)

    # 2. The method; after an error the model is restored.
    start = perf_counter()
    with weights_change():
        try:
            job.undo.remember(job.model)
            with explained(job.model, batches):
                job, notes = _checked_mode(job, method)
                outcome = method.recover_(job)
            report = RecoveryReport(
                method=name,
                settings=method.settings,
                changed=outcome.changed,
                n_examples=outcome.n_examples,
                seconds=perf_counter() - start,
                metrics=FrozenDict(outcome.metrics),
                notes=(*notes, *outcome.notes),
            )
        except BaseException:
            job.undo.restore()
            raise
    return report


def _check_not_offloaded(job: Job, name: str) -> None:
    for model in (job.model, job.teacher):
        if model is not None and offloaded(model):
            got = "weights that accelerate offloads"
            hint = "Save the cut model, load it onto one device, and recover it there."
            raise UnsupportedModel(f"the model for {name}", "in memory", got, hint)


def _checked_mode(job: Job, method: Recovery) -> tuple[Job, tuple[str, ...]]:
    """Return the job, and notes if its model behaves differently in training mode.

    A method that trains finds this out itself.
    """
    if method.trains or not has_own_code(job.model):
        return job, ()
    batches = Batches.of(job.batches)
    try:
        batch = batches.first()
    except (InvalidValue, TypeError):
        # The method has a better message about the data that it needs.
        return job, ()
    batch = to_device(batch, device_of(job.model))
    notes = judged(job.model, job.loss, batch, asked=False).notes
    return replace(job, batches=batches), notes


def _check_use(argument: str, value: object, used: bool, name: str) -> None:
    """Refuse an argument that is given and not used, or used and not given."""
    if value is not None and not used:
        must = f"left out: {name} with these settings does not use it"
        raise InvalidValue(argument, must, f"a {type(value).__name__}")
    if value is None and used:
        raise InvalidValue(argument, f"given: {name} with these settings needs it", "none")


def _checked_teacher(
    model: nn.Module, teacher: nn.Module | None, name: str, method: Recovery
) -> nn.Module:
    """Return the teacher without its wrappers.

    Raises:
        InvalidValue: there is none, the method does not use it, or it would change with the model.
    """
    hint = "Keep one before you cut: teacher = copy.deepcopy(model)."
    if not method.needs_teacher:
        must = f"left out: {name} with these settings does not use it"
        raise InvalidValue("teacher", must, f"a {type(teacher).__name__}")
    if not isinstance(teacher, nn.Module):
        must = f"the unpruned original, which {name} needs"
        raise InvalidValue("teacher", must, repr(teacher), hint)
    teacher = unwrap(teacher)
    must = "another model than the one that is recovered"
    if teacher is model:
        raise InvalidValue("teacher", must, "the model itself", hint)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    # Frozen parameters may be shared: a training does not change them.
    if not trained.isdisjoint(map(id, teacher.parameters())):
        got = "one that shares trainable parameters with it"
        raise InvalidValue("teacher", must, got, hint)
    return teacher
