"""Folds the mean output of the removed heads and neurons into the output projection's bias; needs
no training."""

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
from headprune.recovery._side_by_side import Both, errors, first, quiet, summary
from headprune.recovery._targets import (
    SitePair,
    Target,
    check_apart,
    check_own_parameters,
    counts_by_kind,
    find_targets,
    modules_of,
    sites_as_targets,
    without_columns,
)
from headprune.recovery._teacher import mean_contexts, paired


@dataclass(frozen=True)
class _Fold:
    """An output projection whose bias takes the mean output of some heads.

    Args:
        target: The model's projection.
        teacher: The teacher's site, which has the heads.
        heads: The heads to fold.
        columns: Their columns of the teacher's projection.
    """

    target: Target
    teacher: BoundSite
    heads: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True)
class MeanFold(Recovery):
    """Folds the mean output of the removed heads and neurons into the output projection's bias.

    A neuron counts as a head of width 1.
    ``b_o += W_O[:, removed] · mean(ctx[removed])`` with the teacher's weights and the mean of the
    teacher's head outputs over all tokens that are no padding (``attention_mask``). The result
    equals the teacher with its removed heads fixed to their mean: a mean ablation. It is the bias
    compensation of FLAP (An et al. 2024).

    A projection without a bias gets one, an ordinary parameter named ``bias``. Each projection
    remembers which heads its bias stands for, also in our checkpoints, and a head is folded once.
    So cut, fold, cut, fold works with one teacher. Heads that `Lstsq` and `HeadRescale` made up for
    count as folded, too. Heads removed after those are folded with the teacher's weights: there,
    `Lstsq` once more is the better choice.

    Cost: a pass of the teacher, and two of model and teacher for the report.

    Args:
        measure: Report the error at each projection before and after, for batches that can be read
            more than once.

    >>> MeanFold().needs_teacher
    True
    """

    measure: bool = True

    @property
    def needs_teacher(self) -> bool:
        return True

    @property
    def adds_biases(self) -> bool:
        return True

    def recover_(self, job: Job) -> Outcome:
        """Add the mean outputs of the removed heads to the biases.

        Raises:
            PlanMismatch: the teacher is not what the model was cut from.
            UnsupportedModel: no output projection, one that is no plain linear layer, or one whose
                bias belongs to another module.
            InvalidValue: no data. The model is as it was, here as in every other case.
        """
        job = replace(job, batches=Batches.of(job.batches))
        assert job.teacher is not None
        pairs = paired(job.model, job.teacher, job.sites)

        # 1. Which heads to fold.
        folds, folded_before = _folds(job.model, pairs)
        notes = [
            f"{number} removed {kind} had been folded before and were not folded again."
            for kind, number in folded_before.items()
            if number
        ]
        if not folds:
            notes.append("Nothing to fold: nothing else was removed from the model.")
            return Outcome((), 0, {"heads": 0}, tuple(notes))
        folded = [fold.target for fold in folds]
        check_apart(job.teacher, folded, ("bias",))

        # 2. Their mean outputs.
        wanted = [(fold.teacher, fold.columns) for fold in folds]
        run = job.loss or call
        means, examples = mean_contexts(job.teacher, wanted, job.batches, run, job.progress)

        # 3. Into the biases.
        changes = [_bias_change(fold, mean) for fold, mean in zip(folds, means, strict=True)]
        with Replaced(job.model, job.undo, adds_biases=True) as replaced:
            # Without columns, only a bias shows that a projection runs, so it gets one.
            measured_only = without_columns(sites_as_targets(pairs))
            replaced.open_(modules_of([*measured_only, *folded]))
            metrics, more_notes = self._fold_(job, pairs, replaced, folded, changes)
            replaced.close_(folded)
        counts = counts_by_kind((fold.target, fold.heads) for fold in folds)
        counts["biases_added"] = replaced.added
        changed = tuple(f"{target.name}.bias" for target in folded)
        return Outcome(changed, examples, {**counts, **metrics}, (*notes, *more_notes))

    def _fold_(
        self,
        job: Job,
        pairs: list[SitePair],
        replaced: Replaced,
        targets: list[Target],
        changes: list[Tensor],
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Change the biases; return the errors before and after, and notes."""
        assert job.teacher is not None
        run, batches = job.loss or call, Batches.of(job.batches)
        measures = self.measure and batches.again()
        # Both errors come from the same batches, so they can be compared.
        with quiet(job.model, job.teacher, pairs):
            if measures:
                compared = find_targets(
                    job.model, job.teacher, pairs, first(batches), run, refit=False
                )
                both = Both(job, pairs, compared.targets, run)
                before = errors(both)
            for target, change in zip(targets, changes, strict=True):
                replaced.add_(target, "bias", change)
            replaced.check()
            if measures:
                after = errors(both)
                return summary(compared.targets, before.errors, after.errors), compared.notes
        if self.measure:
            return {}, ("No errors are reported: the batches can be read only once.",)
        return {}, ()


def _folds(model: nn.Module, pairs: list[SitePair]) -> tuple[list[_Fold], dict[str, int]]:
    """Return what to fold, each projection once, and by kind how much was folded before."""
    folds: list[_Fold] = []
    folded_before: list[tuple[Target, list[int]]] = []
    teacher_sites = {ours.site.name: theirs for ours, theirs in pairs}
    for target in sites_as_targets(pairs):
        assert target.bound is not None
        folded = frozenset(getattr(target.module, FOLDED_ATTRIBUTE, ()))
        # A head that the bias stands for already would be added twice.
        heads = tuple(head for head in target.removed if head not in folded)
        folded_before.append((target, [head for head in target.removed if head in folded]))
        if heads:
            teacher = teacher_sites[target.bound.site.name]
            feature_count(target.module, "in", target.name)
            check_own_parameters(model, target, ("bias",))
            folds.append(_Fold(target, teacher, heads, _columns_of(teacher, heads)))
    return folds, counts_by_kind(folded_before)


def _columns_of(b: BoundSite, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the columns of the output projection that read these heads."""
    slab = next(slab for slab in b.layout.slabs if slab.path == b.layout.gate)
    # A site keeps the original numbers of its heads; columns follow their positions.
    positions = b.site.positions(heads)
    return tuple(rows_of(b.site.geometry, slab.units, slab.packing, "context", positions))


def _bias_change(fold: _Fold, mean: Tensor) -> Tensor:
    """Return what the bias grows by, ``[out]``."""
    projection = fold.teacher.gate
    weight = cut_features(projection, "in", fold.columns, fold.target.name)["weight"].to(mean)
    # Conv1D keeps [in, out].
    return (weight if isinstance(projection, nn.Linear) else weight.T) @ mean
