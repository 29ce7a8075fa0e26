"""Folds the mean output of the removed heads into the output projection's bias; needs no training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headprune.attention.linear import cut_features, feature_count
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.layout import FOLDED_ATTRIBUTE
from headprune.core.slabs import rows_of
from headprune.model.running import call
from headprune.model.sites import BoundSite
from headprune.recovery._base import Job, Outcome, Recovery
from headprune.recovery._teacher import mean_contexts, paired


@dataclass(frozen=True)
class _Fold:
    """One output projection of the model, with the heads to fold and the teacher's site that has them."""

    bound: BoundSite
    teacher: BoundSite
    heads: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def name(self) -> str:
        return ".".join(filter(None, (self.bound.site.name, self.bound.layout.gate)))


@dataclass(frozen=True)
class MeanFold(Recovery):
    """Folds the mean output of the removed heads into the output projection's bias; needs no training.

    ``b_o += W_O[:, removed] · mean(ctx[removed])`` with the teacher's weights and the mean of the teacher's head
    outputs over every token that is no padding (``attention_mask``). What remains equals the teacher whose removed
    heads always give their mean: a mean ablation. The bias compensation of FLAP (An et al. 2024).

    A projection without a bias gets one, an ordinary parameter named ``bias``. A head is folded once: a projection
    remembers what it holds, also in our checkpoints, so that cut, fold, cut, fold works with one teacher.

    >>> MeanFold().needs_teacher
    True
    """

    @property
    def needs_teacher(self) -> bool:
        return True

    def recover_(self, job: Job) -> Outcome:
        """Raises:
        PlanMismatch: the teacher is not what the model was cut from.
        UnsupportedModel: no output projection, one that is no plain one, or one whose bias belongs to another module.
        InvalidValue: no data; the model is as it was, here as in every other case.
        """
        assert job.teacher is not None
        folds, held = _folds(job.model, paired(job.model, job.teacher, job.sites))
        notes = (f"{held} removed heads had been folded before and were not folded again.",) if held else ()
        if not folds:
            return Outcome((), 0, {"heads": 0}, (*notes, "Nothing to fold: the model lacks no other head."))
        wanted = [(f.teacher, f.columns) for f in folds]
        means, examples = mean_contexts(job.teacher, wanted, job.batches, job.loss or call, job.progress)
        biases = [_bias(fold, mean) for fold, mean in zip(folds, means, strict=True)]
        added = [_install_(fold, bias) for fold, bias in zip(folds, biases, strict=True)]
        metrics = {"heads": sum(len(f.heads) for f in folds), "biases_added": sum(added)}
        return Outcome(tuple(f"{f.name}.bias" for f in folds), examples, metrics, notes)


def _folds(model: nn.Module, pairs: list[tuple[BoundSite, BoundSite]]) -> tuple[list[_Fold], int]:
    """What is to be folded, each projection once, and how many heads had been folded before."""
    folds: list[_Fold] = []
    seen: set[int] = set()
    held = 0
    for ours, theirs in pairs:
        gate = ours.gate
        gone = [h for h in theirs.site.heads if h not in ours.site.heads]
        heads = tuple(h for h in gone if h not in getattr(gate, FOLDED_ATTRIBUTE, ()))
        if id(gate) in seen:
            continue
        seen.add(id(gate))
        held += len(gone) - len(heads)
        if heads and not theirs.layout.gate:
            raise UnsupportedModel(ours.site.name, "an attention with an output projection", "one without")
        if heads:
            slab = next(s for s in theirs.layout.slabs if s.path == theirs.layout.gate)
            positions = [theirs.site.heads.index(h) for h in heads]
            columns = rows_of(theirs.site.geometry, slab.units, slab.packing, "context", positions)
            folds.append(_Fold(ours, theirs, heads, tuple(columns)))
            _check(model, folds[-1])
    return folds, held


def _check(model: nn.Module, fold: _Fold) -> None:
    feature_count(fold.bound.gate, "in", fold.name)
    bias = fold.bound.gate._parameters.get("bias")
    owners = [n for n, m in model.named_modules() if bias is not None and m._parameters.get("bias") is bias]
    if len(owners) > 1:
        hint = "Give each of them a bias of its own first."
        raise UnsupportedModel(f"{fold.name}.bias", "the bias of one projection", f"shared by {owners}", hint)


def _bias(fold: _Fold, mean: Tensor) -> Tensor:
    """The new bias, in the dtype and on the device of the model's projection."""
    gate, source = fold.bound.gate, fold.teacher.gate
    weight = cut_features(source, "in", fold.columns, fold.name)["weight"].to(mean)
    moved = (weight if isinstance(source, nn.Linear) else weight.T) @ mean  # Conv1D keeps [in, out]
    own = gate.get_parameter("weight")
    bias = gate._parameters.get("bias")
    new = (moved if bias is None else bias.detach().to(mean) + moved).to(own.device, own.dtype)
    if not bool(torch.isfinite(new).all()):
        raise InvalidValue(f"{fold.name}.bias", f"within the range of {own.dtype}", "an infinite value")
    return new


def _install_(fold: _Fold, new: Tensor) -> bool:
    """Puts the bias in place; True where there was none before."""
    gate = fold.bound.gate
    old = gate._parameters.get("bias")
    if old is None:
        gate.bias = nn.Parameter(new, requires_grad=gate.get_parameter("weight").requires_grad)
    else:
        with torch.no_grad():
            old.copy_(new)
    gate.__dict__[FOLDED_ATTRIBUTE] = tuple(sorted({*getattr(gate, FOLDED_ATTRIBUTE, ()), *fold.heads}))
    return old is None
