"""Runs a model and its teacher on the same batches, and measures the distance of their residual
streams."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.batches import EMPTY, Batches
from headprune.model.contexts import not_finite, only_padding, wide
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
from headprune.recovery._follow import FollowedCall, follow
from headprune.recovery._least_squares import LeastSquaresSums
from headprune.recovery._playback import Playback
from headprune.recovery._sensitivity import sensitivities
from headprune.recovery._targets import (
    RunBatch,
    SitePair,
    Target,
    check_as_often,
    modules_of,
    teacher_modules_of,
)
from headprune.recovery._taught import HiddenPositions, TeacherCache, key_of

_NO_SLOPES = 'token_weights="equal" needs no slopes.'


@contextmanager
def quiet(model: nn.Module, teacher: nn.Module, pairs: Sequence[SitePair]) -> Iterator[None]:
    """Put both models into evaluation mode, without gradients and without fused attention.

    Every output projection is called as a module. Nothing is fused, because additions of nested
    tensors could not be followed token by token.
    """
    sites, teacher_sites = sites_of(pairs)
    with ExitStack() as stack:
        stack.enter_context(without_fused_attention())
        stack.enter_context(undisturbed(model))
        stack.enter_context(undisturbed(teacher))
        stack.enter_context(torch.no_grad())
        stack.enter_context(exposed(sites))
        stack.enter_context(exposed(teacher_sites))
        yield


def sites_of(pairs: Iterable[SitePair]) -> tuple[list[BoundSite], list[BoundSite]]:
    """Return the sites of the model and those of the teacher."""
    sites, teacher_sites = [], []
    for ours, theirs in pairs:
        sites.append(ours)
        teacher_sites.append(theirs)
    return sites, teacher_sites


def repeatable(batches: Any) -> Batches:
    """Return the batches if they can be read more than once.

    Raises:
        InvalidValue: they cannot.
    """
    source = batches.source if isinstance(batches, Batches) else batches
    iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if isinstance(source, Iterator) or not iterable:
        hint = "Pass a DataLoader or a list of batches: list(batches), for example."
        raise InvalidValue("batches", "readable more than once", type(source).__name__, hint)
    return Batches.of(batches)


def first(batches: Batches) -> Any:
    """Return the first batch; the next pass over the batches still gives it.

    Raises:
        InvalidValue: there is none.
    """
    batch = batches.first()
    batch_size(batch, "batch 0")
    return batch


# --- Passes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Both:
    """A model and its teacher, which run on the same batches.

    Args:
        job: Model, teacher and batches.
        pairs: Sites of both.
        targets: The projections that are compared, in the order of the network.
        run: Runs a model on a batch.
    """

    job: Job
    pairs: Sequence[SitePair]
    targets: Sequence[Target]
    run: RunBatch

    @property
    def teacher(self) -> nn.Module:
        """The model that was not cut; whoever compares has checked that there is one."""
        assert self.job.teacher is not None
        return self.job.teacher


def side_by_side(
    both: Both,
) -> Iterator[tuple[Any, list[list[FollowedCall]], list[list[FollowedCall]]]]:
    """Run model and teacher on every batch.

    Yields:
        The batch, the model's calls by target, and the teacher's calls by target.
    """
    sites, teacher_sites = sites_of(both.pairs)
    modules, teacher_modules = modules_of(both.targets), teacher_modules_of(both.targets)
    for batch in both.job.batches:
        model_calls = _calls(both.job.model, sites, modules, batch, both.run)
        teacher_calls = _calls(both.teacher, teacher_sites, teacher_modules, batch, both.run)
        yield batch, model_calls, teacher_calls


def _calls(
    model: nn.Module,
    bound: Sequence[BoundSite],
    projections: Sequence[nn.Module],
    batch: Any,
    run: RunBatch,
    expected: int | None = None,
) -> list[list[FollowedCall]]:
    """Run a pass on a batch, ended after ``expected`` calls; return the calls by projection."""
    batch = to_device(batch, device_of(model))
    by_projection: list[list[FollowedCall]] = [[] for _ in projections]
    with inputs_of(model, bound) as inputs:
        inputs.begin(batch)
        calls = follow(
            lambda: run(model, batch),
            dict(enumerate(projections)),
            expected or None,
            lambda: inputs.now,
        )
    for call in calls:
        by_projection[call.number].append(call)
    return by_projection


@dataclass(frozen=True)
class ComparedCall:
    """One call of a target on a batch, and the teacher's stream after it.

    Args:
        call: The model's call.
        teacher_stream: The teacher's stream.
        sensitivity: How strongly the teacher's output depends on each token, ``[..., 1]``; None if
            not asked for.
        begins: Number of examples in the batches before.
        size: Number of examples in the batch.
    """

    call: FollowedCall
    teacher_stream: Tensor
    sensitivity: Tensor | None
    begins: int
    size: int


@dataclass(frozen=True)
class PassCaches:
    """Results of earlier passes, so that later ones do less.

    Args:
        teacher: Of the teacher.
        playback: Of the model's layers.
    """

    teacher: TeacherCache
    playback: Playback


def compared_calls(both: Both, number: int, caches: PassCaches) -> Iterator[ComparedCall]:
    """Run every batch and yield the calls of one target. Each pass ends at its last call.

    Args:
        both: Model, teacher and batches.
        number: The target.
        caches: What earlier passes found.
    """
    target, cache, run = both.targets[number], caches.teacher, both.run
    sites, teacher_sites = sites_of(both.pairs)
    playback_is_exact = False
    begins = 0
    for batch in both.job.batches:
        size, key = batch_size(batch, "batches"), key_of(batch)
        expected = cache.calls(key, number)

        # 1. The model's calls. The first pass that uses kept outputs is compared with a full one.
        full_pass = functools.partial(
            _only_calls, both.job.model, sites, target.module, batch, run, expected
        )
        uses_playback = caches.playback.helps(key, number)
        with caches.playback.before(key, number):
            model_calls = full_pass()
        if uses_playback and not playback_is_exact:
            model_calls, playback_is_exact = _verified(model_calls, full_pass, caches.playback)

        # 2. The teacher's streams, kept or from a pass of its own.
        streams = cache.streams(key, number)
        if streams is None:
            teacher_calls = _only_calls(
                both.teacher, teacher_sites, target.teacher_module, batch, run, expected
            )
            streams = [call.stream(target.summed) for call in teacher_calls]
            hidden = _hidden(teacher_calls)
        else:
            hidden = cache.hidden(key, number)
        check_as_often(target, model_calls, streams)
        _share_hidden(model_calls, hidden)

        # 3. How strongly the teacher's output depends on the tokens.
        slopes: Sequence[Tensor | None] = [None] * len(model_calls)
        if cache.mean_sensitivities:
            kept = cache.sensitivities(key, number)
            slopes = kept or _slopes(both.teacher, [target], batch, run, [len(model_calls)])[0]

        for call, stream, slope in zip(model_calls, streams, slopes, strict=True):
            yield ComparedCall(call, stream, slope, begins, size)
        begins += size


def _only_calls(
    model: nn.Module,
    bound: Sequence[BoundSite],
    projection: nn.Module,
    batch: Any,
    run: RunBatch,
    expected: int | None,
) -> list[FollowedCall]:
    """Return the calls of a single projection."""
    (calls,) = _calls(model, bound, [projection], batch, run, expected)
    return calls


def _verified(
    played: list[FollowedCall], full_pass: Callable[[], list[FollowedCall]], playback: Playback
) -> tuple[list[FollowedCall], bool]:
    """Compare the calls of a pass that used kept outputs with those of a full pass.

    Returns:
        The calls to use, and whether the kept outputs led to the same. If not, they are dropped.
    """
    calls = full_pass()
    if len(played) == len(calls) and all(map(_equal, played, calls)):
        return played, True
    playback.forget()
    return calls, False


def _equal(a: FollowedCall, b: FollowedCall) -> bool:
    """Whether two calls read and led to exactly the same."""
    pairs = [(a.input, b.input), (a.output, b.output), (a.stream(a.summed), b.stream(b.summed))]
    for x, y in pairs:
        if x.shape != y.shape or not torch.allclose(x, y, rtol=0, atol=0, equal_nan=True):
            return False
    return True


def _slopes(
    teacher: nn.Module,
    targets: Sequence[Target],
    batch: Any,
    run: RunBatch,
    n_calls: Sequence[int],
) -> list[list[Tensor]]:
    """Return, by target and call, how strongly the teacher's output depends on each token.

    Args:
        teacher: The teacher.
        targets: The projections.
        batch: The batch, as the user gave it.
        run: Runs a model on a batch.
        n_calls: How often each target was seen to run.

    Raises:
        UnsupportedModel: other code adds the bias of a projection that reads no head, without a
            call that could be differentiated.
    """
    slopes = sensitivities(teacher, teacher_modules_of(targets), batch, run)
    for target, of_target, expected in zip(targets, slopes, n_calls, strict=True):
        if len(of_target) != expected:
            must = f'called as a module, {expected} times on a batch, for token_weights="output"'
            where, got = f"the teacher's {target.name}", f"{len(of_target)} calls"
            raise UnsupportedModel(where, must, got, _NO_SLOPES)
    return slopes


def _hidden(calls: Sequence[FollowedCall]) -> list[HiddenPositions]:
    return [call.padding_info.stream for call in calls]


def _share_hidden(
    model_calls: Sequence[FollowedCall], teacher_hidden: Sequence[HiddenPositions]
) -> None:
    """Take the padding from the teacher's attention where the model's has no head to show it."""
    for call, stream in zip(model_calls, teacher_hidden, strict=True):
        if not call.padding_info.stream:
            call.padding_info = replace(call.padding_info, stream=stream)


def difference(
    model: nn.Module, target: Target, call: FollowedCall, teacher_stream: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what a projection read and what its output lacks compared with the teacher.

    Returns:
        The input ``[tokens, in]``, the difference of the streams ``[tokens, out]``, and which
        tokens count, ``[tokens]`` or None for all.
    """
    stream, padding_info = call.stream(target.summed), call.padding_info
    e = teacher_stream.to(stream.device, wide(stream)) - stream.to(wide(stream))
    counted = target.counted(model, call.output, padding_info)
    batch = padding_info.batch
    return target.tokens(call.input, batch), target.tokens(e, batch), counted


# --- Errors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamErrors:
    """The distances of the streams after each target.

    Args:
        errors: By target, divided by its scale.
        scales: By target the sum of squares that its error is divided by.
        examples: Number of examples.
    """

    errors: list[float]
    scales: list[float]
    examples: int


class _TargetSums:
    """Sums over the tokens of one target.

    Args:
        dtype: The type to add up in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.missing = LeastSquaresSums(dtype)  # the teacher's stream minus ours
        self.written = LeastSquaresSums(dtype)  # the teacher's output
        self.sensitivity: Tensor | None = None  # []

    def add(
        self,
        model: nn.Module,
        target: Target,
        ours: Sequence[FollowedCall],
        theirs: Sequence[FollowedCall],
        teacher_streams: Sequence[Tensor],
    ) -> None:
        """Add the calls of model and teacher on a batch, with the teacher's streams after them."""
        for call, their_call, stream in zip(ours, theirs, teacher_streams, strict=True):
            _, missing, counted = difference(model, target, call, stream)  # [tokens, width]
            written = target.tokens(their_call.output, call.padding_info.batch)
            # Only the outputs are summed: the inputs have no columns, [tokens, 0].
            self.missing.add(missing[:, :0], missing, counted)
            if counted is not None:
                counted = counted.to(written.device)
            self.written.add(written[:, :0], written, counted)

    def add_sensitivities(
        self,
        model: nn.Module,
        target: Target,
        calls: Sequence[FollowedCall],
        slopes: Sequence[Tensor],
    ) -> None:
        """Add up the sensitivities of the tokens that are no padding."""
        for call, slope in zip(calls, slopes, strict=True):
            values = target.tokens(slope.to(call.output.device), call.padding_info.batch)[:, 0]
            counted = target.counted(model, call.output, call.padding_info)
            if counted is not None:
                values = torch.where(counted, values, torch.zeros_like(values))
            total = values.sum()
            self.sensitivity = total if self.sensitivity is None else self.sensitivity + total


def errors(both: Both, cache: TeacherCache | None = None, sensitive: bool = False) -> StreamErrors:
    """Measure ``sum |T - S|² / sum |A - mean A|²`` after each target.

    T and S are the streams of teacher and model, A is what the teacher's projection writes; sums
    over tokens that are no padding. So 0 is the teacher, and 1 is as far off as if the projection
    always wrote its mean. Values of one site can be compared.

    Args:
        both: Model, teacher and batches.
        cache: Takes what later passes need not compute again.
        sensitive: Whether the cache takes the tokens' sensitivities, too.

    Raises:
        InvalidValue: no batches, nothing but padding, or values that are not finite.
    """
    targets = both.targets
    sums: dict[int, _TargetSums] = {}
    examples = 0
    for batch, model_calls, teacher_calls in side_by_side(both):
        examples += batch_size(batch, "batches")
        # 1. How strongly the teacher's output depends on the tokens.
        slopes: list[list[Tensor]] = []
        if sensitive:
            n_calls = list(map(len, teacher_calls))
            slopes = _slopes(both.teacher, targets, batch, both.run, n_calls)
        # 2. The sums of each target.
        streams: list[list[Tensor]] = []
        for number, target in enumerate(targets):
            ours, theirs = model_calls[number], teacher_calls[number]
            check_as_often(target, ours, theirs)
            _share_hidden(ours, _hidden(theirs))
            streams.append([call.stream(target.summed) for call in theirs])
            of_target = sums.setdefault(number, _TargetSums(wide(ours[0].output)))
            of_target.add(both.job.model, target, ours, theirs, streams[number])
            if sensitive:
                of_target.add_sensitivities(both.job.model, target, ours, slopes[number])
        # 3. What later passes use.
        if cache is not None:
            hidden = list(map(_hidden, teacher_calls))
            cache.learn(key_of(batch), streams, hidden, slopes)
    if not examples:
        raise InvalidValue(*EMPTY)
    by_target = [sums[number] for number in range(len(targets))]
    return _stream_errors(targets, by_target, examples, cache if sensitive else None)


def _stream_errors(
    targets: Sequence[Target],
    sums: Sequence[_TargetSums],
    examples: int,
    sensitivity_cache: TeacherCache | None,
) -> StreamErrors:
    """Check and divide the sums; keep the mean sensitivities in the cache."""
    # 1. On the devices, so that Python waits for a few copies, not for each number.
    counts: list[Tensor] = []
    reached: list[Tensor] = []
    finite: list[Tensor] = []  # two per target
    totals: list[Tensor] = []
    divisors: list[Tensor] = []
    for of_target in sums:
        missing, written = of_target.missing.done(), of_target.written.done()
        counts.append(missing.tokens.clamp(min=1))
        reached.append(missing.n > 0)
        finite += [missing.finite, written.finite]
        totals.append(missing.total)
        divisors.append(written.ee)
    if sensitivity_cache is not None:
        means = []
        for of_target, count in zip(sums, counts, strict=True):
            assert of_target.sensitivity is not None
            means.append(of_target.sensitivity / count)
        sensitivity_cache.mean_sensitivities = means
        _check_sensitivities(targets, means)
    _check_sums(targets, in_main_memory(reached), in_main_memory(finite))

    # 2. In main memory.
    errors_of_targets, scales = [], []
    for total, divisor in zip(in_main_memory(totals), in_main_memory(divisors), strict=True):
        # A projection that always writes the same has nothing to divide by.
        scale = float(divisor) or 1.0
        scales.append(scale)
        errors_of_targets.append(float(total) / scale)
    return StreamErrors(errors_of_targets, scales, examples)


def _check_sensitivities(targets: Sequence[Target], means: Sequence[Tensor]) -> None:
    """Refuse slopes that are not finite."""
    for target, mean in zip(targets, in_main_memory(means), strict=True):
        if not bool(mean.isfinite()):
            where = f"slopes of the teacher's output at {target.name}"
            raise InvalidValue(where, "finite", "NaN or infinite", _NO_SLOPES)


def _check_sums(
    targets: Sequence[Target], reached: Sequence[Tensor], finite: Sequence[Tensor]
) -> None:
    """Refuse batches of padding alone, and values that are not finite.

    Args:
        targets: The projections.
        reached: Per target whether any token counts.
        finite: Two per target, for the streams and for the teacher's outputs.
    """
    for number, target in enumerate(targets):
        if not bool(reached[number]):
            raise only_padding(target.name)
        if not bool(finite[2 * number] & finite[2 * number + 1]):
            raise not_finite(f"what model and teacher write at {target.name}")


def summary(
    targets: Sequence[Target], before: Sequence[float], after: Sequence[float]
) -> dict[str, Any]:
    """Return errors for a report: their means, and those of every projection."""
    each = {}
    for target, error_before, error_after in zip(targets, before, after, strict=True):
        each[target.name] = {"before": error_before, "after": error_after}
    return {
        "error_before": sum(before) / len(before),
        "error_after": sum(after) / len(after),
        "errors": FrozenDict(each),
    }
