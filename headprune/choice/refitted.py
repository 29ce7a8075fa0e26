"""The loss of masks after a refit that is predicted, not made: for ``hp.select(loss=)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headprune.choice._meter import (
    TEMPERATURE,
    Meter,
    Prediction,
    check_projections,
    check_settings,
    two_parts,
)
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.model.fingerprint import check_plan
from headprune.model.losses import Loss, default_loss
from headprune.model.running import undisturbed
from headprune.model.sites import bind, sites_of, unwrap
from headprune.scoring._base import ScoringProblem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def refitted_loss_of(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    sites: Iterable[AttentionSite] | None = None,
    examples: int = 256,
    ridge: float = 0.3,
    temperature: float = TEMPERATURE,
    progress: bool | None = None,
) -> Callable[[Sequence[HeadMask]], NDArray[np.float64]]:
    """Measure how far masks move the model once it is refitted, for ``hp.select(loss=)``.

    Nothing is cut: what removed heads and neurons would write is predicted from the kept ones of
    their site by least squares over all rows; the rise of ``KL(whole model || model)`` is measured
    on at most half of them. Of one call, the first mask is the one that the others are near: layers
    before the first difference do not run again.

    Args:
        model: It must not change while the callable is used.
        batches: Batches; labels are not needed.
        loss: Per-example loss whose rise is measured in place of KL.
        sites: Default ``find_sites(model)``.
        examples: The most rows that rises are measured on.
        ridge: As ``Ladder.ridge``.
        temperature: As ``Ladder.temperature``.
        progress: Show a bar; None shows it on a terminal.

    Returns:
        From masks to ``[masks, examples]``.

    Raises:
        InvalidValue: a setting out of range, or outputs without logits.
        UnsupportedModel: a site without an output projection, or that no batch reaches.

    >>> from headprune import MultiHeadAttention
    >>> model = nn.Sequential(MultiHeadAttention(8, 2))
    >>> rows = [torch.randn(4, 5, 8)]
    >>> rise = refitted_loss_of(model, rows, loss=lambda m, x: m(x).square().mean((1, 2)))
    >>> rise([HeadMask.from_keep({"0": kept}, {"0": 2}) for kept in ([1], [0, 1])]).shape
    (2, 2)
    """
    check_settings("refitted_loss_of", examples, ridge, temperature)
    model = unwrap(model)
    bound = bind(model, sites)
    check_projections(bound)
    located = sites_of(bound)
    problem = ScoringProblem(model, bound, batches, loss or default_loss, progress)
    problem.keep_batches()
    with undisturbed(model), problem.explained(), torch.no_grad():
        problem.choose_loss()
        meter = Meter(problem, two_parts(problem), examples, ridge, temperature)

    def predictions_of(mask: HeadMask) -> dict[int, Prediction]:
        found = {}
        for number in meter.sums:
            site = bound[number].site
            kept = mask.kept(site.name)
            if set(kept) != set(site.heads):
                found[number] = meter.prediction(number, kept)
        return found

    def rise(masks: Sequence[HeadMask]) -> NDArray[np.float64]:
        if not masks:
            raise InvalidValue("masks", "at least one", "none")
        for mask in masks:
            check_plan(model, located, mask)
        rows = []
        with undisturbed(model), problem.explained(), torch.no_grad():
            for place, mask in enumerate(masks):
                predictions = predictions_of(mask)
                if place == 0:  # the others are near it
                    meter.start_from(predictions)
                rows.append(meter.rises(predictions))
        found: NDArray[np.float64] = torch.stack(rows).double().cpu().numpy()
        return found

    return rise
