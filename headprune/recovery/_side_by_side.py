"""Runs a model and its teacher on the same batches, and measures how far the model's stream is from
the teacher's."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.batches import EMPTY, Batches
from headprune.model.contexts import wide
from headprune.model.exposed import exposed
from headprune.model.padding import inputs_of
from headprune.model.running import (
    batch_size,
    device_of,
    to_device,
    undisturbed,
    without_fused_attention,
)
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_main_memory
from headprune.recovery._base import Job
from headprune.recovery._follow import Trail, follow
from headprune.recovery._least_squares import Moments
from headprune.recovery._playback import Playback
from headprune.recovery._sensitivity import sensitivities
from headprune.recovery._targets import Pair, Run, Target, check_as_often
from headprune.recovery._taught import Hidden, Taught, key_of


@contextmanager
def quiet(model: nn.Module, teacher: nn.Module, pairs: Sequence[Pair]) -> Iterator[None]:
    """Both models in evaluation mode, without gradients, every output projection called as a
    module.

    Nothing is fused: additions of nested tensors could not be followed token by token.
    """
    with ExitStack() as stack:
        stack.enter_context(without_fused_attention())
        for one in (model, teacher):
            stack.enter_context(undisturbed(one))
        stack.enter_context(torch.no_grad())
        stack.enter_context(exposed(ours for ours, _ in pairs))
        stack.enter_context(exposed(theirs for _, theirs in pairs))
        yield


def repeatable(batches: Any) -> Batches:
    """The batches, if they can be gone through more than once.

    Raises:
        InvalidValue: they cannot.
    """
    source = batches.source if isinstance(batches, Batches) else batches
    iterable = any(hasattr(source, name) for name in ("__iter__", "__getitem__"))
    if isinstance(source, Iterator) or not iterable:
        hint = "Pass a DataLoader or a list of batches: list(batches), for example."
        raise InvalidValue("batches", "readable more than once", type(source).__name__, hint)
    return Batches.of(batches)


def first(batches: Batches) -> Any:
    """The first batch, which the next pass still gives.

    Raises:
        InvalidValue: there is none.
    """
    batch = batches.first()
    batch_size(batch, "batch 0")
    return batch


def difference(
    model: nn.Module, target: Target, mine: Trail, theirs: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a projection read and what its output lacks against the teacher's stream,
    ``[tokens, width]``, and which tokens count."""
    ours, inputs = mine.stream(target.summed), mine.inputs
    e = theirs.to(ours.device, wide(ours)) - ours.to(wide(ours))
    counted = target.counted(model, mine.output, inputs)
    return target.tokens(mine.given, inputs.batch), target.tokens(e, inputs.batch), counted


def side_by_side(
    job: Job, pairs: Sequence[Pair], targets: Sequence[Target], run: Run
) -> Iterator[tuple[Any, list[list[Trail]], list[list[Trail]]]]:
    """Runs model and teacher on every batch; yields the batch and both models' trails by target."""
    assert job.teacher is not None
    for batch in job.batches:
        yield (
            batch,
            _trails(job.model, [ours for ours, _ in pairs], [t.ours for t in targets], batch, run),
            _trails(
                job.teacher,
                [theirs for _, theirs in pairs],
                [t.theirs for t in targets],
                batch,
                run,
            ),
        )


@dataclass(frozen=True)
class Call:
    """One call of a target on a batch.

    Args:
        mine: The model's trail.
        theirs: The teacher's stream.
        felt: How much the teacher's output feels each token, ``[..., 1]``; None where that was not
            asked.
        begins: Examples in the batches before.
        size: Examples in the batch.
    """

    mine: Trail
    theirs: Tensor
    felt: Tensor | None
    begins: int
    size: int


def streams_of(
    job: Job, pairs: Sequence[Pair], targets: Sequence[Target], number: int, run: Run, known: Known
) -> Iterator[Call]:
    """The calls of one target on every batch; no pass goes on after the last one."""
    assert job.teacher is not None
    target, taught = targets[number], known.taught
    proven = False
    begins = 0
    for batch in job.batches:
        size = batch_size(batch, "batches")
        key = key_of(batch)
        expected, theirs = taught.calls(key, number), taught.streams(key, number)
        whole = functools.partial(
            _trails, job.model, [o for o, _ in pairs], [target.ours], batch, run, expected
        )
        helped = known.playback.helps(key, number)
        with known.playback.before(key, number):
            (ours,) = whole()
        if helped and not proven:
            (really,) = whole()
            proven = len(ours) == len(really) and all(map(_equal, ours, really))
            if not proven:
                known.playback.forget()
                ours = really
        if theirs is None:
            (trails,) = _trails(
                job.teacher, [t for _, t in pairs], [target.theirs], batch, run, expected
            )
            theirs, hidden = [trail.stream(target.summed) for trail in trails], _hidden(trails)
        else:
            hidden = taught.hidden(key, number)
        check_as_often(target, ours, theirs)
        _tell_(ours, hidden)
        felt: Sequence[Tensor | None] = [None] * len(ours)
        if taught.felt_means:
            felt = (
                taught.felt(key, number) or _felt(job.teacher, [target], batch, run, [len(ours)])[0]
            )
        for mine, stream, of_call in zip(ours, theirs, felt, strict=True):
            yield Call(mine, stream, of_call, begins, size)
        begins += size


def _felt(
    teacher: nn.Module, targets: Sequence[Target], batch: Any, run: Run, calls: Sequence[int]
) -> list[list[Tensor]]:
    """By target and call how much the teacher's output feels each token.

    Args:
        teacher: The teacher.
        targets: What writes.
        batch: The batch, as the user gave it.
        run: Runs it.
        calls: How often each was seen to run: other code may add the bias of one that reads no
            head, without a call.
    """
    found = sensitivities(teacher, [t.theirs for t in targets], batch, run)
    for target, of_target, expected in zip(targets, found, calls, strict=True):
        if len(of_target) != expected:
            hint = 'token_weights="equal" needs no slopes.'
            must = f'called as a module, {expected} times on a batch, for token_weights="output"'
            raise UnsupportedModel(
                f"the teacher's {target.name}", must, f"{len(of_target)} calls", hint
            )
    return found


def _hidden(trails: Sequence[Trail]) -> list[Hidden]:
    return [trail.inputs.stream for trail in trails]


def _tell_(ours: Sequence[Trail], hidden: Sequence[Hidden]) -> None:
    """Where the model's attention has no head left to hide anything, what the teacher's hid tells
    the padding."""
    for trail, stream in zip(ours, hidden, strict=True):
        if not trail.inputs.stream:
            trail.inputs = replace(trail.inputs, stream=stream)


@dataclass(frozen=True)
class Known:
    """What passes before found out, so that later ones do less.

    Args:
        taught: Of the teacher.
        playback: Of the model.
    """

    taught: Taught
    playback: Playback


def _equal(a: Trail, b: Trail) -> bool:
    """Whether two calls read and led to the same."""
    pairs = [(a.given, b.given), (a.output, b.output), (a.stream(a.summed), b.stream(b.summed))]
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
        for x, y in pairs
    )


def _trails(
    model: nn.Module,
    bound: Sequence[BoundSite],
    projections: Sequence[nn.Module],
    batch: Any,
    run: Run,
    expected: int | None = None,
) -> list[list[Trail]]:
    """A pass on a batch, ended after so many trails: the trails of each projection."""
    batch = to_device(batch, device_of(model))
    with inputs_of(model, bound) as inputs:
        inputs.begin(batch)
        numbered = dict(enumerate(projections))
        trails = follow(lambda: run(model, batch), numbered, expected or None, lambda: inputs.now)
    return [[t for t in trails if t.number == number] for number in numbered]


@dataclass(frozen=True)
class Measured:
    """What ``errors`` found.

    Args:
        errors: Of each target.
        scales: The sums they are divided by.
        examples: Their number.
    """

    errors: list[float]
    scales: list[float]
    examples: int


def errors(
    job: Job,
    pairs: Sequence[Pair],
    targets: Sequence[Target],
    run: Run,
    taught: Taught | None = None,
    sensitive: bool = False,
) -> Measured:
    """How far the model's stream is from the teacher's after each target:
    ``sum |T - S|² / sum |A - mean A|²``.

    A is what the teacher's projection writes; sums over tokens that are no padding. So 0 is the
    teacher, 1 is as far off as if what the sub-layer writes were replaced by its mean, and values
    of one site can be compared. What later passes can spare is noted in ``taught``; where asked to
    be ``sensitive``, how much the output feels each token, too.
    """
    assert job.teacher is not None
    sums: dict[int, tuple[Moments, Moments]] = {}
    felt_sums: dict[int, Tensor] = {}
    examples = 0
    for batch, ours, theirs in side_by_side(job, pairs, targets, run):
        examples += batch_size(batch, "batches")
        streams = [
            [b.stream(t.summed) for b in of_target]
            for t, of_target in zip(targets, theirs, strict=True)
        ]
        calls = [len(of_target) for of_target in theirs]
        felt = _felt(job.teacher, targets, batch, run, calls) if sensitive else []
        for number, target in enumerate(targets):
            check_as_often(target, ours[number], theirs[number])
            _tell_(ours[number], _hidden(theirs[number]))
            for a, b, stream in zip(ours[number], theirs[number], streams[number], strict=True):
                off, written = sums.setdefault(
                    number, (Moments(wide(a.output)), Moments(wide(a.output)))
                )
                _, e, counted = difference(job.model, target, a, stream)
                wrote = target.tokens(b.output, a.inputs.batch)
                off.add(e[:, :0], e, counted)
                written.add(
                    wrote[:, :0], wrote, None if counted is None else counted.to(wrote.device)
                )
            for a, of_call in zip(
                ours[number], felt[number] if sensitive else (), strict=sensitive
            ):
                total = _total_felt(job.model, target, a, of_call)
                felt_sums[number] = felt_sums[number] + total if number in felt_sums else total
        if taught is not None:
            taught.learn(key_of(batch), streams, [_hidden(of_target) for of_target in theirs], felt)
    if not examples:
        raise InvalidValue(*EMPTY)
    done = [
        (off.done(), written.done())
        for off, written in (sums[number] for number in range(len(targets)))
    ]
    reached = in_main_memory(off.n > 0 for off, _ in done)
    finite = in_main_memory(normal.finite for both in done for normal in both)
    if taught is not None and sensitive:
        taught.felt_means = [
            felt_sums[n] / off.tokens.clamp(min=1) for n, (off, _) in enumerate(done)
        ]
        _check_felt(targets, taught.felt_means)
    totals = in_main_memory(off.total for off, _ in done)
    divisors = in_main_memory(written.ee for _, written in done)
    for number, target in enumerate(targets):
        if not bool(reached[number]):
            raise InvalidValue(
                "batches", "with a token that is no padding", f"only padding at {target.name}"
            )
        if not all(map(bool, finite[2 * number : 2 * number + 2])):
            hint = "Look for NaN or infinite values in the batches."
            raise InvalidValue(
                f"what model and teacher write at {target.name}", "finite", "NaN or infinite", hint
            )
    scales = [float(ee) or 1.0 for ee in divisors]
    return Measured(
        [float(total) / scale for total, scale in zip(totals, scales, strict=True)],
        scales,
        examples,
    )


def _total_felt(model: nn.Module, target: Target, mine: Trail, felt: Tensor) -> Tensor:
    """The sum over tokens that are no padding."""
    values = target.tokens(felt.to(mine.output.device), mine.inputs.batch)[:, 0]
    counted = target.counted(model, mine.output, mine.inputs)
    return (
        values if counted is None else torch.where(counted, values, torch.zeros_like(values))
    ).sum()


def _check_felt(targets: Sequence[Target], means: Sequence[Tensor]) -> None:
    """Refuses slopes that are not finite."""
    for target, mean in zip(targets, in_main_memory(means), strict=True):
        if not bool(mean.isfinite()):
            where = f"slopes of the teacher's output at {target.name}"
            raise InvalidValue(
                where, "finite", "NaN or infinite", 'token_weights="equal" needs no slopes.'
            )


def summary(
    targets: Sequence[Target], before: Sequence[float], after: Sequence[float]
) -> dict[str, Any]:
    """Errors for a report: their means, and those of every projection."""
    each = {
        t.name: {"before": b, "after": a} for t, b, a in zip(targets, before, after, strict=True)
    }
    means = {"error_before": sum(before) / len(before), "error_after": sum(after) / len(after)}
    return {**means, "errors": FrozenDict(each)}
