"""Losses of whole masks, for selectors that judge a choice by what the model then does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import PruningPlan
from headprune.gating.context import gate_tensors
from headprune.model.losses import Loss, default_loss
from headprune.model.running import undisturbed
from headprune.model.sites import BoundSite, bind, unwrap
from headprune.model.transfers import in_main_memory
from headprune.scoring._ablation import Replay, differences, nothing
from headprune.scoring._base import ScoringProblem


def mask_losses(
    model: nn.Module,
    batches: Iterable[Any],
    masks: Sequence[HeadMask | PruningPlan],
    *,
    base: HeadMask | PruningPlan | None = None,
    loss: Loss | None = None,
    sites: Iterable[AttentionSite] | None = None,
    max_bytes: int = 2**30,
    progress: bool | None = None,
) -> Tensor:
    """Measure how much each mask raises each example's loss, as passes with ``gated`` would.

    Layers before the first one where a mask differs from the base are played back, and several
    masks run as one batch. Masks that differ from the base by a swap of heads cost little more than
    half a pass each.

    Args:
        model: The model; not changed.
        batches: Batches with labels.
        masks: Masks or plans.
        base: What they are compared with; default all heads.
        loss: Per-example loss.
        sites: Default ``find_sites(model)``.
        max_bytes: Bound on the memory for masks that run at once, about.
        progress: Show a progress bar; None shows it on a terminal.

    Returns:
        ``[masks, examples]`` in fp64 on the CPU.

    >>> from headprune import MultiHeadAttention, find_sites
    >>> model = nn.Sequential(MultiHeadAttention(8, 2))
    >>> mask = HeadMask.from_keep({"0": [1]}, {"0": 2})
    >>> mask_losses(
    ...     model, [torch.randn(4, 5, 8)], [mask], loss=lambda m, x: m(x).square().mean((1, 2))
    ... ).shape
    torch.Size([1, 4])
    """
    model = unwrap(model)
    bound = bind(model, sites)

    problem = ScoringProblem(model, bound, batches, loss or default_loss, progress)
    with undisturbed(model), problem.explained():
        problem.choose_loss()
        settings = mask_rows(model, masks, bound)  # [masks, heads]
        start = torch.ones_like(settings[0])
        if base is not None:
            start = mask_rows(model, [base], bound)[0]
        rows = differences(problem, "losses of masks", settings, start, Replay(max_bytes), nothing)
        return rows.T


def mask_rows(
    model: nn.Module, masks: Sequence[HeadMask | PruningPlan], bound: list[BoundSite]
) -> Tensor:
    """``[masks, heads]``, on the CPU: the gates of all present heads, site after site."""
    # By mask and site, [heads of the site] on its device.
    gates = []
    n_sites = 0
    for mask in masks:
        of_mask = [gate for _, gate in gate_tensors(model, mask, bound)]
        n_sites = len(of_mask)
        gates += of_mask
    on_cpu = in_main_memory(gates)  # of all masks in one copy
    starts = range(0, len(on_cpu), n_sites)
    return torch.stack([torch.cat(on_cpu[start : start + n_sites]) for start in starts])
