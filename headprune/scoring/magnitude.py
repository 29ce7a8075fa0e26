"""Size of a head's weights: norm of its value rows times norm of its output columns; needs no
data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headprune.attention.linear import effective_weight
from headprune.attention.sharded import whole
from headprune.core.slabs import rows_of, used_groups
from headprune.model.offloaded import fetched
from headprune.model.sites import BoundSite, lookup
from headprune.model.transfers import in_main_memory, sent
from headprune.scoring._base import Estimate, Scorer, ScoringProblem


@dataclass(frozen=True)
class Magnitude(Scorer):
    """``I_h = |W_V,h| |W_O,h|`` (Frobenius norms), a bound on what the head can write for a unit
    input; no data.

    A baseline that every report shows. Where a layout has no value slab the output columns stand
    alone.

    When: there are no data at all, or as a baseline; it can be worse than chance.
    """

    needs_data: ClassVar[bool] = False

    def estimate(self, problem: ScoringProblem) -> Estimate:
        sizes = []
        for b in problem.bound:
            with fetched(b.module):
                sizes += [_size(b, unit) for unit in b.site.units]
        return Estimate(torch.stack(in_main_memory(sizes)))


def _size(bound: BoundSite, unit: tuple[int, ...]) -> Tensor:
    site = bound.site
    positions = [site.heads.index(h) for h in unit]
    groups = used_groups(site.geometry, positions)
    size = torch.ones((), dtype=torch.float64)
    apart = any("value" in slab.units for slab in bound.slabs)
    for slab in bound.slabs:
        target = lookup(bound.module, slab.path)
        if isinstance(
            target, nn.ModuleList
        ):  # one module a head: its value's weights are among its own
            if apart and "value" not in slab.units:
                continue
            heads = groups if apart else positions
            weights = [
                whole(p.detach()).double().flatten() for h in heads for p in target[h].parameters()
            ]
            size = size * torch.cat(weights).norm()
            continue
        weight = whole(target) if isinstance(target, Tensor) else effective_weight(target)
        if weight.ndim != 2:  # a bias
            continue
        dimension = ("out", "in").index(slab.axis) if isinstance(slab.axis, str) else slab.axis
        for kind, heads in (("value", groups), ("context", positions)):
            if kind in slab.units:
                rows = rows_of(site.geometry, slab.units, slab.packing, kind, heads)
                index = sent(rows, weight.device, torch.long)
                size = size * weight.detach().index_select(dimension, index).double().norm()
    return size
