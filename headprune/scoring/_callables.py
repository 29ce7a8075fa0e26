"""Callables through which selectors ask a model while they choose: ``loss=`` and ``rescore=`` of
``hp.select``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune.attention.sharded import check_whole
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.samples import Curvature
from headprune.core.scores import HeadScores
from headprune.core.units import by_site
from headprune.model.batches import Batches
from headprune.model.cut import cut_
from headprune.model.losses import Loss, default_loss, shaped_losses
from headprune.model.running import undisturbed
from headprune.model.sites import Sites, bind, sites_of, unwrap
from headprune.scoring._ablation import Replay
from headprune.scoring._api import score
from headprune.scoring._base import Scorer, ScoringProblem
from headprune.scoring._masks import mask_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Changes a cut copy of a model in place before it is measured: a recovery.
Change = Callable[[nn.Module], object]


def loss_of(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    sites: Iterable[AttentionSite] | None = None,
    after_cut: Change | None = None,
    max_bytes: int = 2**30,
    progress: bool | None = None,
) -> Callable[[Sequence[HeadMask]], NDArray[np.float64]]:
    """Measure how much masks raise the model's loss, for ``hp.select(loss=)``.

    The masks of one call are run as in ``mask_losses``, with the first of them as the base: layers
    before the first one where another mask differs from it are played back. So put a mask first
    from which the others differ little.

    Args:
        model: The model; not changed. It must not change while the callable is used.
        batches: Batches with labels; read again in every call, and refused when they differ.
        loss: Per-example loss.
        sites: Default ``find_sites(model)``.
        after_cut: Measures each mask on a copy, cut to it and then changed by this, such as
            by ``lambda small: hp.recover_(small, batches, "mean_fold", model)``. It runs once per
            mask.
        max_bytes: Bound on the memory for masks that run at once, about.
        progress: Show a progress bar; None shows it on a terminal.

    Returns:
        From masks to ``[masks, examples]``: the loss above that of the model with all heads.

    >>> from headprune import MultiHeadAttention
    >>> model = nn.Sequential(MultiHeadAttention(8, 2))
    >>> rise = loss_of(model, [torch.randn(4, 5, 8)], loss=lambda m, x: m(x).square().mean((1, 2)))
    >>> found = rise([HeadMask.from_keep({"0": kept}, {"0": 2}) for kept in ([1], [0, 1])])
    >>> found.shape, bool((abs(found[1]) < 1e-6).all())
    ((2, 4), True)
    """
    model = unwrap(model)
    bound = bind(model, sites)
    problem = ScoringProblem(model, bound, batches, loss or default_loss, progress)
    problem.keep_batches()
    problem.choose_loss()
    # What the first call finds about the model serves all later ones.
    replay = Replay(max_bytes)
    whole: Tensor | None = None  # [examples], losses with all heads

    # The two ways to measure masks: [masks, examples], fp64 on the CPU.

    def with_gates(masks: Sequence[HeadMask]) -> Tensor:
        settings = mask_rows(model, masks, bound)  # [masks, heads]
        losses_of = replay.of(problem)
        batches_losses = []  # [masks, examples] each
        with undisturbed(model):
            for number, batch in problem.passes("losses of masks"):
                others, first = losses_of(batch, settings[1:], settings[0], number=number)
                batches_losses.append(torch.cat([first[None], others]))
        return torch.cat(batches_losses, 1).double().cpu()

    def with_cuts(masks: Sequence[HeadMask]) -> Tensor:
        located = sites_of(bound)
        return torch.stack(
            [_losses(problem, _cut(model, located, mask, after_cut)) for mask in masks]
        )

    def rise(masks: Sequence[HeadMask]) -> NDArray[np.float64]:
        nonlocal whole
        if not masks:
            raise InvalidValue("masks", "at least one", "none")
        with problem.explained():
            if whole is None:
                whole = _losses(problem, model)
            losses = with_gates(masks) if after_cut is None else with_cuts(masks)
            difference: NDArray[np.float64] = (losses - whole).numpy()
        return difference

    return rise


def _losses(problem: ScoringProblem, model: nn.Module) -> Tensor:
    """``[examples]``, fp64 on the CPU: the losses of a model, on the problem's data."""
    batches_losses = []
    with undisturbed(model), torch.no_grad():
        for number, batch in problem.passes("losses"):
            losses = shaped_losses(problem.loss, model, batch, number)
            problem.checks.add_losses(number, losses)
            batches_losses.append(losses)
    return torch.cat(batches_losses).double().cpu()


def rescorer(
    model: nn.Module,
    batches: Iterable[Any] | None,
    scorer: str | Scorer = "surgeon",
    *,
    loss: Loss | None = None,
    sites: Iterable[AttentionSite] | None = None,
    after_cut: Change | None = None,
    progress: bool | None = None,
) -> Callable[[HeadMask], HeadScores]:
    """Score the model with fewer heads, for ``hp.select(rescore=)``.

    A copy of the model is cut to the mask and scored. Gates would not do: scorers that read
    activations would still see the output of a removed head. The scores are for all of the model's
    sites; those of removed units are 0 and mean nothing.

    Args:
        model: The model; not changed.
        batches: As for ``hp.score``; read again in every call.
        scorer: A registered name or a configured scorer.
        loss: Per-example loss.
        sites: Default ``find_sites(model)``.
        after_cut: Changes the cut copy before it is scored, in place: a recovery between the steps,
            such as ``lambda small: hp.recover_(small, batches, "mean_fold", model)``.
        progress: Show a progress bar; None shows it on a terminal.

    Returns:
        From a mask to HeadScores.

    >>> from headprune import MultiHeadAttention
    >>> model = nn.Sequential(MultiHeadAttention(8, 2))
    >>> rescore = rescorer(model, [torch.randn(4, 5, 8)], "magnitude")
    >>> scores = rescore(HeadMask.from_keep({"0": [1]}, {"0": 2}))
    >>> scores.values[0][0], scores.values[0][1] > 0
    (0.0, True)
    """
    model = unwrap(model)
    located = sites_of(bind(model, sites))
    if batches is not None:
        # One object for all calls: it knows which batches earlier calls have read.
        batches = Batches.of(batches)
        batches.keep()
    digests: set[str | None] = set()  # of the data of all calls

    def rescore(mask: HeadMask) -> HeadScores:
        small = _cut(model, located, mask, after_cut)
        present = sites_of(bind(small, located))
        scores = score(small, batches, scorer, loss=loss, sites=present, progress=progress)
        # Scores of other data would be compared with those of the call before.
        digests.add(scores.data)
        if len(digests) > 1:
            must = "the same in every call, in the same order"
            hint = "Pass a list, or a DataLoader that does not shuffle or augment."
            raise InvalidValue("batches", must, "others than before", hint)
        return _over(scores, tuple(located))

    return rescore


def _cut(model: nn.Module, located: Sites, mask: HeadMask, after_cut: Change | None) -> nn.Module:
    """A copy of the model with only the mask's heads."""
    # Other processes may hold parts of the weights.
    check_whole(model, "one whose weights are whole in this process, to be copied and cut")
    small = copy.deepcopy(model)
    cut_(small, bind(small, located), mask)
    if after_cut is not None:
        after_cut(small)
    return small


def _over(scores: HeadScores, sites: tuple[AttentionSite, ...]) -> HeadScores:
    """Scores of the kept units as scores of all units, 0 for removed ones."""
    # 1. Where each kept unit is among all units.
    units = [(site.name, unit) for site in sites for unit in site.units]
    place_of = {unit: i for i, unit in enumerate(units)}
    places = [place_of[unit.name, unit.heads] for unit in scores.units()]

    # 2. Move all numbers to their places.
    values = _moved(scores.values, places, sites)
    errors = curvature = None
    if scores.standard_errors is not None:
        errors = _moved(scores.standard_errors, places, sites)
    if scores.curvature is not None:
        matrix = np.zeros((len(units), len(units)))
        matrix[np.ix_(places, places)] = scores.curvature.matrix
        curvature = Curvature.of(matrix)
    return replace(
        scores,
        sites=sites,
        values=values,
        standard_errors=errors,
        costs=None,
        samples=None,
        curvature=curvature,
    )


def _moved(
    values: tuple[tuple[float, ...], ...], places: list[int], sites: tuple[AttentionSite, ...]
) -> tuple[tuple[float, ...], ...]:
    """Numbers of the kept units, by site, as numbers of all units."""
    sizes = [len(site.units) for site in sites]
    moved = [0.0] * sum(sizes)
    for place, value in zip(places, chain.from_iterable(values), strict=True):
        moved[place] = value
    return by_site(moved, sizes)
