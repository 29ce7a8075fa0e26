"""The verb: a pruned model and data in, the same model with less of a loss out."""

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
    """Wins back what a cut cost, in place; on an error the model is as it was.

    Args:
        model: The pruned model, or any model for a method that only trains. A compiled model is run
            uncompiled.
        batches: Any iterable of what the model takes; a method that trains goes through it more
            than once.
        method: A registered name, see ``hp.recovery.registry.names()``, or a configured method. The
            default trains nothing and is the best of that kind without touching anything but
            attention (docs/pipelines.md).
        teacher: The unpruned original, for methods that need one (``Recovery.needs_teacher``); left
            as it is.
        loss: ``(model, batch) -> Tensor[batch]``; the default covers the usual Transformers heads.
            A method that does not train runs models through it, where a batch is not simply their
            arguments.
        sites: Default ``find_sites(model)``; a method that looks at no heads only checks it against
            the model.
        progress: Show a progress bar.
        validation: Batches that a method judges its work by (``Recovery.needs_validation``); read
            several times.
        folder: Where a method that trains leaves a checkpoint, and continues from the one that it
            finds there (``Recovery.resumes``).
        leave_checkpoint: Leave one there at the end, too, so that nothing is lost before the model
            is saved: the same call, with the model as it was before, then gives the trained one at
            once. Take it away when it is saved.

    Raises:
        UnknownName: no method of this name.
        InvalidValue: no data; a teacher, or validation data, that the method needs and lacks, or
            has no use for; a folder that it has no use for; a checkpoint to be left, and no folder.
        CheckpointError: the folder holds the checkpoint of another training.
        UnsupportedModel: accelerate offloads weights of one of the two.
        PlanMismatch: the teacher is no model that ``model`` can have been cut from.

    >>> import copy, torch
    >>> from headprune import MultiHeadAttention, HeadMask, find_sites, prune_
    >>> model = torch.nn.Sequential(MultiHeadAttention(8, 2))
    >>> teacher = copy.deepcopy(model)
    >>> _ = prune_(model, HeadMask.from_keep({"0": [1]}, {"0": 2}))
    >>> report = recover_(model, [torch.randn(4, 5, 8)], "mean_fold", teacher)
    >>> report.changed, report.metrics["heads"]
    (('0.W_o.bias',), 1)
    """
    name, chosen = registry.resolve(method, Recovery, "recover_(method=)")
    if not isinstance(model, nn.Module):
        raise InvalidValue("recover_(model=)", "a torch.nn.Module", type(model).__name__)
    model = unwrap(model)
    check_whole(model, "one whose weights are whole in this process, to be changed")
    if sites is not None:
        sites = sites if isinstance(sites, Sites) else tuple(sites)
        bind(model, sites)
    home = None if folder is None else Path(folder)
    if leave_checkpoint and home is None:
        raise InvalidValue("leave_checkpoint", "given with folder", "no folder")
    given = (teacher, loss, sites, progress, validation, home, leave_checkpoint)
    return carry_out(name, chosen, Job(model, batches, *given))


def carry_out(name: str, method: Recovery, job: Job) -> RecoveryReport:
    """Does a job by a method, called ``name``, once what it is given is what the method has a use
    for."""
    if job.teacher is not None or method.needs_teacher:
        job = replace(job, teacher=_checked_teacher(job.model, job.teacher, name, method))
    _check_use("validation", job.validation, method.needs_validation, name)
    _check_use("folder", job.folder, method.resumes and job.folder is not None, name)
    for one in (job.model, job.teacher):
        if one is not None and offloaded(one):
            hint = "Save the cut model, load it onto one device, and recover it there."
            raise UnsupportedModel(
                f"the model for {name}", "in memory", "weights that accelerate offloads", hint
            )
    batches = Batches.of(job.batches)
    job = replace(job, batches=batches)
    start = perf_counter()
    with weights_change():
        try:
            job.undo.remember(job.model)
            with explained(job.model, batches):
                job, notes = _looked_at(job, method)
                done = method.recover_(job)
            report = RecoveryReport(
                method=name,
                settings=method.settings,
                changed=done.changed,
                n_examples=done.n_examples,
                seconds=perf_counter() - start,
                metrics=FrozenDict(done.metrics),
                notes=(*notes, *done.notes),
            )
        except BaseException:
            job.undo.restore()
            raise
    return report


def _looked_at(job: Job, method: Recovery) -> tuple[Job, tuple[str, ...]]:
    """The job, and whether its model does something else in training mode; a method that trains
    looks itself."""
    if method.trains or not has_own_code(job.model):
        return job, ()
    batches = Batches.of(job.batches)
    try:
        batch = batches.first()
    except (InvalidValue, TypeError):  # the method says itself what it needs
        return job, ()
    looked = judged(job.model, job.loss, to_device(batch, device_of(job.model)), asked=False)
    return replace(job, batches=batches), looked.notes


def _check_use(argument: str, value: object, used: bool, name: str) -> None:
    if value is not None and not used:
        must = f"left out: {name}, as it is set, has no use for it"
        raise InvalidValue(argument, must, f"a {type(value).__name__}")
    if value is None and used:
        raise InvalidValue(argument, f"given to {name}, as it is set", "none")


def _checked_teacher(
    model: nn.Module, teacher: nn.Module | None, name: str, method: Recovery
) -> nn.Module:
    hint = "Keep one before you cut: teacher = copy.deepcopy(model)."
    if not method.needs_teacher:
        got = f"a {type(teacher).__name__}"
        raise InvalidValue("teacher", f"left out: {name}, as it is set, does not read it", got)
    if not isinstance(teacher, nn.Module):
        raise InvalidValue(
            "teacher", f"the unpruned original, which {name} needs", repr(teacher), hint
        )
    teacher = unwrap(teacher)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if teacher is model or any(id(p) in trained for p in teacher.parameters()):
        got = (
            "the model itself"
            if teacher is model
            else "one that shares trainable parameters with it"
        )
        raise InvalidValue("teacher", "another model than the one that is recovered", got, hint)
    return teacher
