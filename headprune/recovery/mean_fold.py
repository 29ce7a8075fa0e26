"""Folds the mean output of the removed heads into the output projection's bias; needs no
training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from headprune.attention.linear import cut_features, feature_count
from headprune.core.layout import FOLDED_ATTRIBUTE
from headprune.core.slabs import rows_of
from headprune.model.batches import Batches
from headprune.model.running import call
from headprune.model.sites import BoundSite
from headprune.recovery._base import Job, Outcome, Recovery
from headprune.recovery._replaced import Replaced
from headprune.recovery._side_by_side import errors, first, quiet, summary
from headprune.recovery._targets import (
    Pair,
    Target,
    check_apart,
    check_own_parameters,
    find,
    sites_as_targets,
    without_columns,
)
from headprune.recovery._teacher import mean_contexts, paired


@dataclass(frozen=True)
class _Fold:
    """One output projection of the model, with the heads to fold and the teacher's site that has
    them."""

    target: Target
    teacher: BoundSite
    heads: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True)
class MeanFold(Recovery):
    """Folds the mean output of the removed heads into the output projection's bias; needs no
    training.

    ``b_o += W_O[:, removed] · mean(ctx[removed])`` with the teacher's weights and the mean of the
    teacher's head outputs over every token that is no padding (``attention_mask``). What remains
    equals the teacher whose removed heads always give their mean: a mean ablation. The bias
    compensation of FLAP (An et al. 2024).

    A projection without a bias gets one, an ordinary parameter named ``bias``. A head is folded
    once: a projection remembers what it holds, also in our checkpoints, so that cut, fold, cut,
    fold works with one teacher. What `Lstsq` and `HeadRescale` made good counts as folded, too;
    heads that leave afterwards are folded as the teacher has them, so `Lstsq` once more is the
    better end there.

    Cost: a pass of the teacher, and two of model and teacher for the report.

    Args:
        measure: Report the error at each projection before and after; takes batches that can be
            read more than once.

    >>> MeanFold().needs_teacher
    True
    """

    measure: bool = True

    @property
    def needs_teacher(self) -> bool:
        return True

    def recover_(self, job: Job) -> Outcome:
        """Raises:
        PlanMismatch: the teacher is not what the model was cut from.
        UnsupportedModel: no output projection, one that is no plain one, or one whose bias belongs
            to another module.
        InvalidValue: no data; the model is as it was, here as in every other case.
        """
        job = replace(job, batches=Batches.of(job.batches))
        assert job.teacher is not None
        pairs = paired(job.model, job.teacher, job.sites)
        folds, held = _folds(job.model, pairs)
        notes = (
            (f"{held} removed heads had been folded before and were not folded again.",)
            if held
            else ()
        )
        if not folds:
            return Outcome(
                (), 0, {"heads": 0}, (*notes, "Nothing to fold: the model lacks no other head.")
            )
        check_apart(job.teacher, [f.target for f in folds], ("bias",))
        wanted = [(f.teacher, f.columns) for f in folds]
        means, examples = mean_contexts(
            job.teacher, wanted, job.batches, job.loss or call, job.progress
        )
        changes = [_change(fold, mean) for fold, mean in zip(folds, means, strict=True)]
        with Replaced(job.model, job.undo, adds_biases=True) as replaced:
            replaced.open_(
                t.ours
                for t in (*without_columns(sites_as_targets(pairs)), *(f.target for f in folds))
            )
            measured, more = self._folded_(
                job, pairs, replaced, list(zip(folds, changes, strict=True))
            )
            replaced.close_(f.target for f in folds)
        metrics = {
            "heads": sum(len(f.heads) for f in folds),
            "biases_added": replaced.added,
            **measured,
        }
        return Outcome(
            tuple(f"{f.target.name}.bias" for f in folds), examples, metrics, (*notes, *more)
        )

    def _folded_(
        self, job: Job, pairs: list[Pair], replaced: Replaced, changes: list[tuple[_Fold, Tensor]]
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Changes the biases; returns the errors before and after, and notes."""
        assert job.teacher is not None
        run, batches = job.loss or call, Batches.of(job.batches)
        repeatable = self.measure and batches.again()
        with quiet(job.model, job.teacher, pairs):
            if repeatable:
                found = find(job.model, job.teacher, pairs, first(batches), run, refit=False)
                before = errors(job, pairs, found.targets, run)
            for fold, change in changes:
                replaced.add_(fold.target, "bias", change)
            replaced.check()
            if repeatable:
                after = errors(job, pairs, found.targets, run)
                return summary(found.targets, before.errors, after.errors), found.notes
        unread = self.measure and not repeatable
        return {}, ("No errors are reported: the batches can be read only once.",) if unread else ()


def _folds(model: nn.Module, pairs: list[Pair]) -> tuple[list[_Fold], int]:
    """What is to be folded, each projection once, and how many heads had been folded before."""
    folds: list[_Fold] = []
    held = 0
    theirs = {ours.site.name: their for ours, their in pairs}
    for target in sites_as_targets(pairs):
        assert target.bound is not None
        teacher = theirs[target.bound.site.name]
        heads = tuple(h for h in target.gone if h not in getattr(target.ours, FOLDED_ATTRIBUTE, ()))
        held += len(target.gone) - len(heads)
        if heads:
            slab = next(s for s in teacher.layout.slabs if s.path == teacher.layout.gate)
            positions = [teacher.site.heads.index(h) for h in heads]
            columns = rows_of(teacher.site.geometry, slab.units, slab.packing, "context", positions)
            feature_count(target.ours, "in", target.name)
            check_own_parameters(model, target, ("bias",))
            folds.append(_Fold(target, teacher, heads, tuple(columns)))
    return folds, held


def _change(fold: _Fold, mean: Tensor) -> Tensor:
    """What the bias grows by."""
    source = fold.teacher.gate
    weight = cut_features(source, "in", fold.columns, fold.target.name)["weight"].to(mean)
    return (weight if isinstance(source, nn.Linear) else weight.T) @ mean  # Conv1D keeps [in, out]
