"""Refits output projections layer by layer: from what the recovered model writes so far to what the
teacher has."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from tqdm.auto import tqdm

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.model.contexts import wide
from headprune.model.running import call, device_of, to_device
from headprune.model.transfers import in_main_memory, sent
from headprune.recovery._base import Job, Outcome, Recovery
from headprune.recovery._blocks import blocks_around
from headprune.recovery._held_out import (
    BIAS_ALONE,
    FOLDS,
    NO_CHANGE,
    Choice,
    best,
    choices,
    held_out_errors,
    notes,
)
from headprune.recovery._least_squares import Moments, Normal, pooled
from headprune.recovery._playback import Playback
from headprune.recovery._replaced import Replaced
from headprune.recovery._side_by_side import (
    Call,
    Known,
    difference,
    errors,
    first,
    quiet,
    repeatable,
    streams_of,
    summary,
)
from headprune.recovery._targets import (
    Found,
    Pair,
    Run,
    Target,
    find,
    sites_as_targets,
    without_columns,
)
from headprune.recovery._taught import Taught
from headprune.recovery._teacher import paired

Precision: TypeAlias = Literal["float64", "float32"]
PRECISIONS = ("float64", "float32")
#: Of its weight that a token has however little the output feels it.
SHARE = 0.1


@dataclass(frozen=True)
class Change:
    """What a fit adds to a projection.

    Args:
        weight: ``[in, out]``.
        note: What a user should know; the projection's name is put in front.
    """

    weight: Tensor
    note: str = ""


@dataclass
class Refits:
    """What became of the projections.

    Args:
        errors: By projection the error that remains, not yet divided by its scale.
        chosen: By projection the ridge that was chosen, where one was.
        tokens: By projection how many tokens it was fitted to, and how many channels it reads.
        notes: What a user should know.
    """

    errors: list[Tensor] = field(default_factory=list)
    chosen: dict[str, Choice] = field(default_factory=dict)
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def parts(self, name: str, bias: bool) -> tuple[str, ...]:
        """The parameters of a projection that were refitted."""
        choice = self.chosen.get(name)
        if choice == NO_CHANGE:
            return ()
        return (*["weight"] * (choice != BIAS_ALONE), *["bias"] * bias)


class LayerwiseRecovery(Recovery):
    """A recovery that changes one projection after the other by least squares, in the order of the
    network.

    With T the teacher's stream after a sub-layer and S the model's, as recovered so far, a
    projection ``y = x W' + b`` that is added to the stream should be changed by ``E = T - S``,
    whatever it is added to. A subclass solves for the change from the sums of products of x and E.
    """

    #: The ridge; None is one chosen for each projection by the error on held-out examples.
    ridge: float | None
    #: Whether tokens count as much as the teacher's output feels them.
    sensitive: bool = False
    #: Whether it also refits feed-forwards.
    feed_forward: bool = False
    #: The type to add up in.
    precision: Precision = "float64"
    #: Bytes that the teacher's streams may take, and again those that layers' outputs may.
    max_bytes: int = 2**30

    @property
    def needs_teacher(self) -> bool:
        return True

    @property
    @abc.abstractmethod
    def adds_biases(self) -> bool:
        """Whether it changes biases, and adds them where there are none."""

    @abc.abstractmethod
    def change(self, target: Target, normal: Normal, ridge: float) -> Change:
        """What to add to a projection."""

    def right(self, target: Target, normal: Normal, ridge: float) -> Tensor:
        """``[in, out]``: the right side of its normal equations, for the choice of a ridge; weights
        are drawn to what they are."""
        return normal.xe

    def recover_(self, job: Job) -> Outcome:
        """Raises:
        PlanMismatch: the teacher is not what the model was cut from.
        UnsupportedModel: see ``_targets.find``.
        InvalidValue: no data, data that can be read only once, or numbers that are not finite. The
            model is as it was, here as in every other case.
        """
        batches = repeatable(job.batches)
        job = replace(job, batches=batches)
        model, run = job.model, job.loss or call
        assert job.teacher is not None
        pairs = paired(model, job.teacher, job.sites)
        targets = sites_as_targets(pairs)
        if not any(t.gone for t in targets):
            return Outcome(
                (),
                0,
                {"heads": 0},
                ("Nothing to refit: the model lacks no head of its teacher's.",),
            )
        with Replaced(model, job.undo, self.adds_biases) as replaced:
            replaced.open_(t.ours for t in without_columns(targets))
            with quiet(model, job.teacher, pairs):
                found = find(model, job.teacher, pairs, first(batches), run, self.feed_forward)
            replaced.open_(t.ours for t in found.targets)
            with quiet(model, job.teacher, pairs):
                taught = Taught(self.max_bytes)
                before = errors(job, pairs, found.targets, run, taught, self.sensitive)
                layers = [
                    block.module for block in blocks_around(model, [ours for ours, _ in pairs])
                ]
                playback = Playback(layers, [t.ours for t in found.targets], self.max_bytes)
                playback.learn(lambda: run(model, to_device(first(batches), device_of(model))))
                known = Known(taught, playback)
                done = self._refit_(job, pairs, found, run, replaced, known)
                if self.sensitive:  # the errors of the fit are weighted
                    after = errors(job, pairs, found.targets, run).errors
                else:
                    remaining = in_main_memory(done.errors)
                    after = [
                        float(x) / scale for x, scale in zip(remaining, before.scales, strict=True)
                    ]
            refitted = [t for t in found.targets if done.parts(t.name, self.adds_biases)]
            replaced.close_(refitted)
        metrics = {
            "heads": sum(len(t.gone) for t in refitted),
            "projections": len(refitted),
            "biases_added": replaced.added,
            **summary(found.targets, before.errors, after),
            **({"ridges": FrozenDict(done.chosen)} if self.ridge is None else {}),
        }
        changed = [
            f"{t.name}.{part}"
            for t in refitted
            for part in done.parts(t.name, self.adds_biases)
            if t.weight.numel() or part == "bias"
        ]
        more = notes(done.chosen, done.tokens, before.examples)
        return Outcome(tuple(changed), before.examples, metrics, (*found.notes, *done.notes, *more))

    def _refit_(
        self,
        job: Job,
        pairs: Sequence[Pair],
        found: Found,
        run: Run,
        replaced: Replaced,
        known: Known,
    ) -> Refits:
        """Changes one projection after the other."""
        done = Refits()
        bar = tqdm(found.targets, disable=not job.progress, leave=False)
        for number, target in enumerate(bar):
            calls = streams_of(job, pairs, found.targets, number, run, known)
            parts = self._gathered(job, calls, target, known.taught.felt_mean(number))
            known.taught.forget(number)
            normal = pooled(parts)
            choice = self._chosen(target, parts, normal, replaced, done)
            del parts  # the sums of a feed-forward are large
            weight, bias = torch.zeros_like(normal.xe), torch.zeros_like(normal.e_mean)
            if not isinstance(choice, str):
                change = self.change(target, normal, choice)
                done.notes += [f"{target.name}: {change.note}"] if change.note else []
                weight = replaced.add_(target, "weight", change.weight)
            if self.adds_biases and choice != NO_CHANGE:  # for the weight as it is after rounding
                bias = replaced.add_(target, "bias", normal.e_mean - normal.x_mean @ weight)
            done.errors.append(normal.left(weight, bias))
        return done

    def _chosen(
        self,
        target: Target,
        parts: Sequence[Normal],
        normal: Normal,
        replaced: Replaced,
        done: Refits,
    ) -> Choice:
        """The ridge, or what takes its place; noted where it was chosen. One look at the device.

        Raises:
            InvalidValue: sums that are not finite.
        """
        numbers = [normal.finite.to(normal.xx), normal.tokens.to(normal.xx)]
        if self.ridge is None:
            if len(parts) < 2:
                hint = "Give more examples, or set a ridge: ridge=0.3."
                raise InvalidValue(
                    "batches", "at least 2 examples, one to be held out, for ridge=None", "1", hint
                )
            errors_of = held_out_errors(
                parts, functools.partial(self.right, target), self.adds_biases
            )
            numbers += errors_of.to(normal.xx).unbind()
        finite, tokens, *held_out = torch.stack(numbers).tolist()
        if not finite:
            replaced.check()
            hint = "Look for NaN or infinite values in the batches."
            raise InvalidValue(
                f"what model and teacher write at {target.name}", "finite", "NaN or infinite", hint
            )
        if self.ridge is not None:
            return self.ridge
        width = len(normal.xx)
        done.tokens[target.name] = int(tokens), width
        done.chosen[target.name] = best(held_out, choices(self.adds_biases, width))
        return done.chosen[target.name]

    def _gathered(
        self, job: Job, calls: Iterable[Call], target: Target, felt_mean: Tensor | None
    ) -> list[Normal]:
        """The sums over all tokens, in several parts where some are to be held out."""
        folds = 1 if self.ridge is not None else FOLDS
        moments: list[Moments] = []
        for one in calls:
            moments = moments or [Moments(self._dtype(one.mine.given)) for _ in range(folds)]
            x, e, counted = difference(job.model, target, one.mine, one.theirs)
            weights = None
            if one.felt is not None and felt_mean is not None:
                felt = target.tokens(one.felt.to(x.device), one.mine.inputs.batch)[:, 0]
                weights = _weights(felt, felt_mean.to(x.device))
            if folds == 1:
                moments[0].add(x, e, counted, weights)
                continue
            examples = (
                target.examples(one.mine.output, one.mine.inputs.batch, one.size) + one.begins
            )
            for fold, of_fold in enumerate(moments):
                rows = sent((examples % folds == fold).nonzero()[:, 0], x.device)
                if len(rows):
                    of_fold.add(x[rows], e[rows], _rows(counted, rows), _rows(weights, rows))
        return [of_fold.done() for of_fold in moments if of_fold.begun]

    def _dtype(self, x: Tensor) -> torch.dtype:
        return wide(x) if self.precision == "float64" else torch.float32


def _rows(x: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if x is None else x[rows]


def _weights(felt: Tensor, mean: Tensor) -> Tensor:
    """``[tokens]``, 1 on average; all 1 where nothing is felt."""
    relative = felt / torch.where(mean > 0, mean, torch.ones_like(mean))
    return torch.where(mean > 0, SHARE + (1 - SHARE) * relative, torch.ones_like(felt))


def check_ridge(where: str, ridge: object) -> None:
    if (
        not isinstance(ridge, (int, float))
        or isinstance(ridge, bool)
        or not 0 <= ridge < float("inf")
    ):
        raise InvalidValue(where, "a share >= 0", repr(ridge))


def check_max_bytes(where: str, max_bytes: object) -> None:
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 0:
        raise InvalidValue(where, "a count of bytes >= 0", repr(max_bytes))


def check_precision(where: str, precision: object) -> None:
    if precision not in PRECISIONS:
        raise InvalidValue(where, f"one of {', '.join(PRECISIONS)}", repr(precision))
