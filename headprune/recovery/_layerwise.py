"""Refits output projections layer by layer: from what the recovered model writes so far to what the teacher has."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from tqdm.auto import tqdm

from headprune.core.errors import InvalidValue
from headprune.model.contexts import wide
from headprune.model.running import call, device_of, to_device
from headprune.model.transfers import in_main_memory
from headprune.recovery._base import Job, Outcome, Recovery
from headprune.recovery._blocks import blocks_around
from headprune.recovery._follow import Trail
from headprune.recovery._least_squares import Moments, Normal
from headprune.recovery._playback import Playback
from headprune.recovery._replaced import Replaced
from headprune.recovery._side_by_side import Known, difference, errors, first, quiet, repeatable, streams_of, summary
from headprune.recovery._targets import Found, Pair, Run, Target, find, sites_as_targets, without_columns
from headprune.recovery._taught import Taught
from headprune.recovery._teacher import paired

Precision: TypeAlias = Literal["float64", "float32"]
PRECISIONS = ("float64", "float32")


@dataclass(frozen=True)
class Change:
    """What a fit adds to a projection.

    Args:
        weight: ``[in, out]``.
        note: What a user should know; the projection's name is put in front.
    """

    weight: Tensor
    note: str = ""


class LayerwiseRecovery(Recovery):
    """A recovery that changes one projection after the other by least squares, in the order of the network.

    With T the teacher's stream after a sub-layer and S the model's, as recovered so far, a projection ``y = x W' + b``
    that is added to the stream should be changed by ``E = T - S``, whatever it is added to. A subclass solves for the
    change from the sums of products of x and E.
    """

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
    def change(self, target: Target, normal: Normal) -> Change:
        """What to add to a projection."""

    def recover_(self, job: Job) -> Outcome:
        """Raises:
        PlanMismatch: the teacher is not what the model was cut from.
        UnsupportedModel: see ``_targets.find``.
        InvalidValue: no data, data that can be read only once, or numbers that are not finite. The model is as it was,
            here as in every other case.
        """
        batches = repeatable(job.batches)
        job = replace(job, batches=batches)
        model, run = job.model, job.loss or call
        assert job.teacher is not None
        pairs = paired(model, job.teacher, job.sites)
        targets = sites_as_targets(pairs)
        if not any(t.gone for t in targets):
            return Outcome((), 0, {"heads": 0}, ("Nothing to refit: the model lacks no head of its teacher's.",))
        with Replaced(model, job.undo, self.adds_biases) as replaced:
            replaced.open_(t.ours for t in without_columns(targets))
            with quiet(model, job.teacher, pairs):
                found = find(model, job.teacher, pairs, first(batches), run, self.feed_forward)
            replaced.open_(t.ours for t in found.targets)
            with quiet(model, job.teacher, pairs):
                taught = Taught(self.max_bytes)
                before = errors(job, pairs, found.targets, run, taught)
                layers = [block.module for block in blocks_around(model, [ours for ours, _ in pairs])]
                playback = Playback(layers, [t.ours for t in found.targets], self.max_bytes)
                playback.learn(lambda: run(model, to_device(first(batches), device_of(model))))
                known = Known(taught, playback)
                after, notes = self._refit_(job, pairs, found, run, replaced, before.scales, known)
            replaced.close_(found.targets)
        metrics = {
            "heads": sum(len(t.gone) for t in found.targets),
            "projections": len(found.targets),
            "biases_added": replaced.added,
            **summary(found.targets, before.errors, after),
        }
        parts = ("weight", "bias") if self.adds_biases else ("weight",)
        changed = [f"{t.name}.{p}" for t in found.targets for p in parts if t.weight.numel() or p == "bias"]
        return Outcome(tuple(changed), before.examples, metrics, (*found.notes, *notes))

    def _refit_(
        self,
        job: Job,
        pairs: Sequence[Pair],
        found: Found,
        run: Run,
        replaced: Replaced,
        scales: Sequence[float],
        known: Known,
    ) -> tuple[list[float], list[str]]:
        """Changes one projection after the other; returns what is left of each error, and notes."""
        left: list[Tensor] = []
        notes: list[str] = []
        bar = tqdm(found.targets, disable=not job.progress, leave=False)
        for number, target in enumerate(bar):
            normal = self._gathered(job, streams_of(job, pairs, found.targets, number, run, known), target)
            known.taught.forget(number)
            if not bool(normal.finite):
                replaced.check()
                hint = "Look for NaN or infinite values in the batches."
                raise InvalidValue(f"what model and teacher write at {target.name}", "finite", "NaN or infinite", hint)
            change = self.change(target, normal)
            notes += [f"{target.name}: {change.note}"] if change.note else []
            weight = replaced.add_(target, "weight", change.weight)
            bias = torch.zeros_like(normal.e_mean)
            if self.adds_biases:  # for the weight as it is after rounding
                bias = replaced.add_(target, "bias", normal.e_mean - normal.x_mean @ weight)
            left.append(normal.left(weight, bias))
        return [float(x) / scale for x, scale in zip(in_main_memory(left), scales, strict=True)], notes

    def _gathered(self, job: Job, calls: Iterable[tuple[Trail, Tensor]], target: Target) -> Normal:
        moments: Moments | None = None
        for mine, theirs in calls:
            moments = moments or Moments(self._dtype(mine.given))
            moments.add(*difference(job.model, target, mine, theirs))
        assert moments is not None
        return moments.done()

    def _dtype(self, x: Tensor) -> torch.dtype:
        return wide(x) if self.precision == "float64" else torch.float32


def check_ridge(where: str, ridge: object) -> None:
    if not isinstance(ridge, (int, float)) or isinstance(ridge, bool) or not 0 <= ridge < float("inf"):
        raise InvalidValue(where, "a share >= 0", repr(ridge))


def check_max_bytes(where: str, max_bytes: object) -> None:
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 0:
        raise InvalidValue(where, "a count of bytes >= 0", repr(max_bytes))


def check_precision(where: str, precision: object) -> None:
    if precision not in PRECISIONS:
        raise InvalidValue(where, f"one of {', '.join(PRECISIONS)}", repr(precision))
