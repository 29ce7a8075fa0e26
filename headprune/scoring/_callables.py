"""What selectors ask of a model while they choose, as callables: ``loss=`` and ``rescore=`` of
``hp.select``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headprune.attention.sharded import check_whole
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.samples import Curvature
from headprune.core.scores import HeadScores
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

#: Changes a cut copy of a model before it is looked at, in place: a recovery.
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
    """What masks do to the model's loss, for ``hp.select(loss=)``: masks in, ``[masks, examples]``
    out.

    Each number is by how much an example's loss rises above that of the model with all heads. The
    masks of one call are run as in ``mask_losses``, with the first of them as the base: layers
    before the first one where another mask differs from it are played back. So put first what the
    others are neighbours of.

    Args:
        model: The model; left as it was found. It must not change while the callable is used.
        batches: Batches with labels; read again in every call, and refused when they are not the
            same.
        loss: Per-example loss.
        sites: Default ``find_sites(model)``.
        after_cut: Measures each mask on a copy that is cut to it and then changed by this, such as
            by ``lambda small: hp.recover_(small, batches, "mean_fold", model)``: selection that
            knows the recovery, at the price of one for every mask.
        max_bytes: Bound on the memory for masks that run at once, about.
        progress: Show a progress bar; None shows it on a terminal.

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
    problem.keep()
    problem.judge()
    replay, whole = Replay(max_bytes), _Whole()

    def played(masks: Sequence[HeadMask]) -> Tensor:
        settings = mask_rows(model, masks, bound)
        losses, found = replay.of(problem), []
        with undisturbed(model):
            for number, batch in problem.passes("losses of masks"):
                others, first = losses(batch, settings[1:], settings[0], number=number)
                found.append(torch.cat([first[None], others]))
        return torch.cat(found, 1).double().cpu()

    def recovered(masks: Sequence[HeadMask]) -> Tensor:
        assert after_cut is not None
        return torch.stack(
            [_losses(problem, _cut(model, sites_of(bound), mask, after_cut)) for mask in masks]
        )

    def rise(masks: Sequence[HeadMask]) -> NDArray[np.float64]:
        if not masks:
            raise InvalidValue("masks", "at least one", "none")
        with problem.explained():
            start = whole.of(lambda: _losses(problem, model))
            difference: NDArray[np.float64] = (
                (recovered if after_cut else played)(masks) - start
            ).numpy()
        return difference

    return rise


class _Whole:
    """The losses of the model with all heads, measured once."""

    def __init__(self) -> None:
        self._losses: Tensor | None = None

    def of(self, make: Callable[[], Tensor]) -> Tensor:
        if self._losses is None:
            self._losses = make()
        return self._losses


def _losses(problem: ScoringProblem, model: nn.Module) -> Tensor:
    """``[examples]``, fp64 on the CPU: the losses of a model, on the problem's data."""
    with undisturbed(model), torch.no_grad():
        found = []
        for number, batch in problem.passes("losses"):
            found.append(shaped_losses(problem.loss, model, batch, number))
            problem.see(number, found[-1])
    return torch.cat(found).double().cpu()


def rescorer(
    model: nn.Module,
    batches: Iterable[Any] | None,
    scorer: str | Scorer = "taylor",
    *,
    loss: Loss | None = None,
    sites: Iterable[AttentionSite] | None = None,
    after_cut: Change | None = None,
    progress: bool | None = None,
) -> Callable[[HeadMask], HeadScores]:
    """Scores of the model with fewer heads, for ``hp.select(rescore=)``: a mask in, HeadScores out.

    A copy of the model is cut to the mask and scored; gates would not do, because what a head that
    is gone would have put out is still there for scorers that look at activations. The scores are
    for all of the model's sites; units that are gone have 0 and no meaning.

    Args:
        model: The model; left as it was found.
        batches: As for ``hp.score``; read again in every call.
        scorer: A registered name or a configured scorer.
        loss: Per-example loss.
        sites: Default ``find_sites(model)``.
        after_cut: Changes the cut copy before it is scored, in place: a recovery between the steps,
            such as ``lambda small: hp.recover_(small, batches, "mean_fold", model)``.
        progress: Show a progress bar; None shows it on a terminal.

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
        batches = Batches.of(batches)  # one for all calls: it knows what those before have read
        batches.keep()
    seen: dict[str | None, None] = {}

    def rescore(mask: HeadMask) -> HeadScores:
        small = _cut(model, located, mask, after_cut)
        found = score(
            small,
            batches,
            scorer,
            loss=loss,
            sites=sites_of(bind(small, located)),
            progress=progress,
        )
        seen[found.data] = None
        if len(seen) > 1:
            hint = "Pass a list, or a DataLoader that does not shuffle or augment."
            raise InvalidValue(
                "batches", "the same in every call, in the same order", "others than before", hint
            )
        return _over(found, tuple(located))

    return rescore


def _cut(model: nn.Module, located: Sites, mask: HeadMask, after_cut: Change | None) -> nn.Module:
    """A copy of the model with only the mask's heads."""
    check_whole(model, "one whose weights are whole in this process, to be copied and cut")
    small = copy.deepcopy(model)
    cut_(small, bind(small, located), mask)
    if after_cut is not None:
        after_cut(small)
    return small


def _over(found: HeadScores, sites: tuple[AttentionSite, ...]) -> HeadScores:
    """Scores of what is left in the shape of all sites, 0 for what is gone."""
    left = {(unit.name, unit.heads): i for i, unit in enumerate(found.units())}
    flat = [(site.name, unit) for site in sites for unit in site.units]
    place = torch.zeros(len(flat), len(left), dtype=torch.float64)
    for i, unit in enumerate(flat):
        if unit in left:
            place[i, left[unit]] = 1

    def rows(values: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        spread = place @ torch.tensor([v for row in values for v in row], dtype=torch.float64)
        return tuple(
            tuple(map(float, part)) for part in spread.split([len(site.units) for site in sites])
        )

    bent = None if found.curvature is None else torch.tensor(found.curvature.matrix)
    return replace(
        found,
        sites=sites,
        values=rows(found.values),
        standard_errors=None if found.standard_errors is None else rows(found.standard_errors),
        costs=None,
        samples=None,
        curvature=None if bent is None else Curvature.of((place @ bent @ place.T).numpy()),
    )
