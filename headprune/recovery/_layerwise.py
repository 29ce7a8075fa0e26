"""Refits output projections layer by layer, so that the recovered model's stream approaches the
teacher's."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from headprune.core.bars import bar
from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.model.contexts import not_finite, wide
from headprune.model.running import call, device_of, to_device
from headprune.model.transfers import in_main_memory, sent
from headprune.recovery._base import Job, Outcome, Recovery
from headprune.recovery._blocks import blocks_around
from headprune.recovery._held_out import (
    BIAS_ALONE,
    FALLBACK,
    NO_CHANGE,
    Choice,
    best,
    choices,
    held_out_errors,
    is_held_out,
    notes,
)
from headprune.recovery._least_squares import LeastSquaresSums, Normal, pooled
from headprune.recovery._playback import Playback
from headprune.recovery._replaced import Replaced
from headprune.recovery._side_by_side import (
    Both,
    ComparedCall,
    PassCaches,
    StreamErrors,
    compared_calls,
    difference,
    errors,
    first,
    quiet,
    repeatable,
    sites_of,
    summary,
)
from headprune.recovery._targets import (
    Target,
    counts_by_kind,
    find_targets,
    modules_of,
    sites_as_targets,
    without_columns,
)
from headprune.recovery._taught import TeacherCache
from headprune.recovery._teacher import paired

Precision: TypeAlias = Literal["float64", "float32"]
PRECISIONS = ("float64", "float32")
#: The part of a token's weight that does not depend on its sensitivity.
SHARE = 0.1


@dataclass(frozen=True)
class WeightChange:
    """A change of a projection's weight.

    Args:
        weight: What is added, ``[in, out]``.
        note: For the user; the projection's name is put in front.
    """

    weight: Tensor
    note: str = ""


@dataclass
class RefitResults:
    """The results of all projections.

    Args:
        errors: By projection the error that remains, not yet divided by its scale.
        chosen: By projection the ridge that was chosen, if it was not set.
        tokens: By projection how many tokens it was fitted to, and how many numbers were fitted
            per output channel.
        undivided: Projections for which nothing could be held out.
        notes: For the user.
    """

    errors: list[Tensor] = field(default_factory=list)
    chosen: dict[str, Choice] = field(default_factory=dict)
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    undivided: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def parts(self, name: str, bias: bool) -> tuple[str, ...]:
        """Return which parameters of a projection were refitted, with its ``bias`` or without."""
        choice = self.chosen.get(name)
        parts = []
        # None where the ridge was set: then everything is refitted.
        if choice not in (NO_CHANGE, BIAS_ALONE):
            parts.append("weight")
        if choice != NO_CHANGE and bias:
            parts.append("bias")
        return tuple(parts)


@dataclass(frozen=True)
class _Refit:
    """What all steps of one refit need.

    Args:
        both: Model, teacher and batches.
        replaced: Changes the projections.
        caches: Results of earlier passes.
        before: The errors before the refit.
    """

    both: Both
    replaced: Replaced
    caches: PassCaches
    before: StreamErrors


class LayerwiseRecovery(Recovery):
    """A recovery that changes one projection after the other by least squares.

    In the order of the network. Let T be the teacher's stream after a sub-layer, and S the model's
    as recovered so far. A projection ``y = x W' + b`` that is added to the stream should change by
    ``E = T - S``, whatever it is added to. A subclass solves for the change from the sums of
    products of x and E.
    """

    #: The ridge; None chooses one for each projection by the error on held-out examples.
    ridge: float | None
    #: Whether tokens are weighted by how strongly the teacher's output depends on them.
    sensitive: bool = False
    #: Whether it also refits feed-forwards that lost no neurons.
    feed_forward: bool = False
    #: The type to add up in.
    precision: Precision = "float64"
    #: Bytes that the teacher's streams may take, and again those that layers' outputs may.
    max_bytes: int = 2**30

    @property
    def needs_teacher(self) -> bool:
        return True

    @abc.abstractmethod
    def change(self, target: Target, normal: Normal, ridge: float) -> WeightChange:
        """Solve for the change of a projection."""

    def fitted_numbers(self, target: Target) -> int:
        """Return how many numbers are fitted per output channel: one per input channel."""
        return target.weight.shape[1]

    def right(self, target: Target, normal: Normal, ridge: float) -> Tensor:
        """Return the right side of the normal equations, ``[in, out]``, for the choice of a ridge.

        The default draws the weights to their current values.
        """
        return normal.xe

    def recover_(self, job: Job) -> Outcome:
        """Refit the projections from the first site on that lost heads or neurons.

        Raises:
            PlanMismatch: the teacher is not what the model was cut from.
            UnsupportedModel: see ``_targets.find_targets``.
            InvalidValue: no data, data that can be read only once, or numbers that are not finite.
                The model is as it was, here as in every other case.
        """
        batches = repeatable(job.batches)
        job = replace(job, batches=batches)
        model, teacher, run = job.model, job.teacher, job.loss or call
        assert teacher is not None
        pairs = paired(model, teacher, job.sites)
        of_sites = sites_as_targets(pairs)
        if not any(target.removed for target in of_sites):
            note = "Nothing to refit: the model lacks no head or neuron of its teacher's."
            return Outcome((), 0, {"heads": 0}, (note,))
        with Replaced(model, job.undo, self.adds_biases) as replaced:
            # 1. Find the projections. Only a bias shows that one without columns runs.
            replaced.open_(modules_of(without_columns(of_sites)))
            with quiet(model, teacher, pairs):
                chosen = find_targets(model, teacher, pairs, first(batches), run, self.feed_forward)
            replaced.open_(modules_of(chosen.targets))

            # 2. Refit one after the other.
            with quiet(model, teacher, pairs):
                refit = self._prepared(Both(job, pairs, chosen.targets, run), replaced)
                results = self._refit_(refit)
                after = self._errors_after(refit, results)

            # 3. Keep the biases of those that changed.
            refitted = [t for t in chosen.targets if results.parts(t.name, self.adds_biases)]
            replaced.close_(refitted)
        return self._outcome(refit, refitted, results, after, chosen.notes)

    def _prepared(self, both: Both, replaced: Replaced) -> _Refit:
        """Measure the errors before, and see which layers' outputs can be kept."""
        model, batches = both.job.model, repeatable(both.job.batches)
        teacher_cache = TeacherCache(self.max_bytes)
        before = errors(both, teacher_cache, self.sensitive)
        sites, _ = sites_of(both.pairs)
        layers = [block.module for block in blocks_around(model, sites)]
        playback = Playback(layers, modules_of(both.targets), self.max_bytes)
        playback.learn(lambda: both.run(model, to_device(first(batches), device_of(model))))
        return _Refit(both, replaced, PassCaches(teacher_cache, playback), before)

    def _refit_(self, refit: _Refit) -> RefitResults:
        """Change one projection after the other."""
        results = RefitResults()
        both = refit.both
        for number, target in enumerate(bar(both.targets, "refit", both.job.progress)):
            # 1. The sums over all tokens, with all projections before it refitted.
            calls = compared_calls(both, number, refit.caches)
            mean = refit.caches.teacher.mean_sensitivity(number)  # []
            parts = self._sums(both.job, calls, target, mean)
            refit.caches.teacher.forget(number)
            normal = pooled(parts)
            choice = self._choice(target, parts, normal, refit.replaced, results)
            del parts  # the sums of a feed-forward are large

            # 2. The weight, unless the choice is to keep it.
            weight, bias = torch.zeros_like(normal.xe), torch.zeros_like(normal.e_mean)
            if not isinstance(choice, str):
                # A ridge; the other choices are words.
                change = self.change(target, normal, choice)
                if change.note:
                    results.notes.append(f"{target.name}: {change.note}")
                weight = refit.replaced.add_(target, "weight", change.weight)

            # 3. The bias, for the weight after rounding.
            if self.adds_biases and choice != NO_CHANGE:
                shift = normal.e_mean - normal.x_mean @ weight
                bias = refit.replaced.add_(target, "bias", shift)
            results.errors.append(normal.remaining_error(weight, bias))
        return results

    def _sums(
        self, job: Job, calls: Iterable[ComparedCall], target: Target, mean: Tensor | None
    ) -> list[Normal]:
        """Sum over all tokens; in two parts if some are held out, which are then the second part.

        Args:
            job: The model.
            calls: The target's calls on all batches.
            target: The projection.
            mean: Its mean sensitivity; None weights all tokens equally.
        """
        n_parts = 2 if self.ridge is None else 1
        sums: list[LeastSquaresSums] = []
        for compared in calls:
            own, batch = compared.call, compared.call.padding_info.batch
            if not sums:
                dtype = wide(own.input) if self.precision == "float64" else torch.float32
                sums = [LeastSquaresSums(dtype) for _ in range(n_parts)]
            x, e, counted = difference(job.model, target, own, compared.teacher_stream)
            weights = _token_weights(target, compared, mean, x.device)
            if n_parts == 1:
                sums[0].add(x, e, counted, weights)
                continue
            # Tokens of one example belong to one part.
            examples = target.examples(own.output, batch, compared.size) + compared.begins
            held = is_held_out(examples)
            for is_of_part, of_part in zip((~held, held), sums, strict=True):
                rows = sent(is_of_part.nonzero()[:, 0], x.device)
                if len(rows):
                    of_part.add(x[rows], e[rows], _rows(counted, rows), _rows(weights, rows))
        return [of_part.done() for of_part in sums if of_part.begun]

    def _choice(
        self,
        target: Target,
        parts: Sequence[Normal],
        normal: Normal,
        replaced: Replaced,
        results: RefitResults,
    ) -> Choice:
        """Return the ridge or what takes its place; the results note it if it was chosen.

        Python waits for the device once.

        Raises:
            InvalidValue: sums that are not finite.
        """
        # 1. All numbers in one tensor, for one copy to main memory.
        numbers = [normal.finite.to(normal.xx), normal.tokens.to(normal.xx)]
        # A part may have nothing but padding.
        fewest = torch.stack([part.tokens for part in parts]).min()
        numbers.append(fewest.to(normal.xx))
        if len(parts) == 2:
            rest, held = parts
            right = functools.partial(self.right, target)
            held_out = held_out_errors(rest, held, right, self.adds_biases)
            numbers += held_out.to(normal.xx).unbind()
        finite, tokens, fewest_tokens, *held_out_numbers = torch.stack(numbers).tolist()
        if not finite:
            # An earlier change beyond the range of its type may be the cause; it is named then.
            replaced.check()
            raise not_finite(f"what model and teacher write at {target.name}")
        results.tokens[target.name] = (int(tokens), self.fitted_numbers(target))
        if self.ridge is not None:
            return self.ridge
        # 2. The ridge with the least error.
        choice: Choice = FALLBACK
        if not held_out_numbers or not fewest_tokens:
            results.undivided.append(target.name)
        else:
            choice = best(held_out_numbers, choices(self.adds_biases, len(normal.xx)))
        results.chosen[target.name] = choice
        return choice

    def _errors_after(self, refit: _Refit, results: RefitResults) -> list[float]:
        """Return the errors that remain, comparable with those before."""
        if self.sensitive:
            # The errors of the fit are weighted, so the unweighted ones take another pass.
            return errors(refit.both).errors
        remaining = in_main_memory(results.errors)
        scales = refit.before.scales
        return [float(error) / scale for error, scale in zip(remaining, scales, strict=True)]

    def _outcome(
        self,
        refit: _Refit,
        refitted: Sequence[Target],
        results: RefitResults,
        after: Sequence[float],
        target_notes: Sequence[str],
    ) -> Outcome:
        changed: list[str] = []
        for target in refitted:
            parts = results.parts(target.name, self.adds_biases)
            if not target.weight.numel():
                # The weight of a projection without columns has no numbers to change.
                parts = tuple(part for part in parts if part == "bias")
            changed += [f"{target.name}.{part}" for part in parts]
        metrics: dict[str, Any] = {
            **counts_by_kind((target, target.removed) for target in refitted),
            "projections": len(refitted),
            "biases_added": refit.replaced.added,
            **summary(refit.both.targets, refit.before.errors, after),
        }
        if self.ridge is None:
            metrics["ridges"] = FrozenDict(results.chosen)
        examples = refit.before.examples
        choice_notes = notes(results.chosen, results.tokens, examples, results.undivided)
        all_notes = (*target_notes, *results.notes, *choice_notes)
        return Outcome(tuple(changed), examples, metrics, all_notes)


def _rows(x: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if x is None else x[rows]


def _token_weights(
    target: Target, compared: ComparedCall, mean: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return the weights of a call's tokens, ``[tokens]``; None if all are equal."""
    if compared.sensitivity is None or mean is None:
        return None
    batch = compared.call.padding_info.batch
    slopes = target.tokens(compared.sensitivity.to(device), batch)[:, 0]
    return _weights(slopes, mean.to(device))


def _weights(sensitivity: Tensor, mean: Tensor) -> Tensor:
    """Return weights of mean 1, ``[tokens]``; all 1 if the output depends on no token."""
    # A slope describes small changes only, so a token with slope 0 still has the weight SHARE.
    relative = sensitivity / torch.where(mean > 0, mean, torch.ones_like(mean))
    return torch.where(mean > 0, SHARE + (1 - SHARE) * relative, torch.ones_like(sensitivity))


def check_ridge(where: str, ridge: object) -> None:
    """Refuse a ridge that is no finite number >= 0."""
    is_number = isinstance(ridge, (int, float)) and not isinstance(ridge, bool)
    if not is_number or not 0 <= ridge < float("inf"):  # type: ignore[operator]
        raise InvalidValue(where, "a number >= 0", repr(ridge))


def check_max_bytes(where: str, max_bytes: object) -> None:
    """Refuse what is no count of bytes."""
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 0:
        raise InvalidValue(where, "a count of bytes >= 0", repr(max_bytes))
