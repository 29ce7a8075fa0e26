"""Size of a head's weights: norm of its value rows times norm of its output columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headprune.attention.linear import effective_weight
from headprune.attention.sharded import whole
from headprune.core.layout import HeadSlab
from headprune.core.slabs import HeadGeometry, rows_of, used_groups
from headprune.model.contexts import wide
from headprune.model.offloaded import fetched
from headprune.model.sites import BoundSite, lookup
from headprune.model.transfers import in_main_memory, sent
from headprune.scoring._activations import has_unit_per_channel
from headprune.scoring._base import Estimate, Scorer, ScoringProblem


@dataclass(frozen=True)
class Magnitude(Scorer):
    """``I_h = |W_V,h| |W_O,h|`` (Frobenius norms), a bound on what the head can write for a unit
    input; no data.

    A baseline that every report shows. Where a layout has no value slab, the norm of the output
    columns is the whole score.

    When: there are no data at all, or as a baseline; it can be worse than chance.
    """

    needs_data: ClassVar[bool] = False

    def estimate(self, problem: ScoringProblem) -> Estimate:
        sizes = []
        for b in problem.bound:
            with fetched(b.module):
                if has_unit_per_channel(b):
                    sizes.append(_neuron_sizes(b))
                else:
                    sizes += [_size(b, unit).unsqueeze(0) for unit in b.site.units]
        return Estimate(torch.cat(in_main_memory(sizes)))


def _size(bound: BoundSite, unit: tuple[int, ...]) -> Tensor:
    """The product of the norms of a unit's weights in all slabs."""
    site = bound.site
    positions = site.positions(unit)
    groups = used_groups(site.geometry, positions)
    # Whether the values have a slab of their own.
    has_values = any("value" in slab.units for slab in bound.slabs)
    size = torch.ones(())
    for slab in bound.slabs:
        target = lookup(bound.module, slab.path)
        if not isinstance(target, nn.ModuleList):
            for norm in _norms(site.geometry, slab, target, groups, positions):
                size = size * norm
        elif not has_values:
            # One module per head, with the value's weights among its own.
            size = size * _norm_of_modules(target, positions)
        elif "value" in slab.units:
            size = size * _norm_of_modules(target, groups)
    return size


def _norms(
    geometry: HeadGeometry, slab: HeadSlab, target: Any, groups: list[int], positions: list[int]
) -> Iterator[Tensor]:
    """The norms of a unit's value rows and of its context columns, as far as a slab has them."""
    weight = whole(target) if isinstance(target, Tensor) else effective_weight(target)
    if weight.ndim != 2:  # a bias
        return
    dimension = slab.axis
    if isinstance(dimension, str):
        dimension = ("out", "in").index(dimension)
    for kind, heads in (("value", groups), ("context", positions)):
        if kind in slab.units:
            rows = rows_of(geometry, slab.units, slab.packing, kind, heads)
            index = sent(rows, weight.device, torch.long)
            of_unit = weight.detach().index_select(dimension, index)
            yield of_unit.to(wide(weight)).norm()


def _neuron_sizes(bound: BoundSite) -> Tensor:
    """For each neuron the product of the norms of its rows and its column, ``[neurons]``."""
    n_neurons = len(bound.site.heads)
    if not n_neurons:
        return torch.empty(0, dtype=torch.float64)
    size = torch.ones(())
    for slab in bound.slabs:
        weight = effective_weight(lookup(bound.module, slab.path)).detach()
        weight = weight.to(wide(weight))
        if slab.axis == "in":  # one column per neuron
            weight = weight.T
        # A fused projection has several rows per neuron: [parts, neurons, in]. As with projections
        # of their own, their norms are multiplied.
        size = size * weight.unflatten(0, (-1, n_neurons)).norm(dim=2).prod(0)
    return size


def _norm_of_modules(modules: nn.ModuleList, heads: list[int]) -> Tensor:
    """The norm of all parameters of some heads' modules."""
    weights = []
    for head in heads:
        parameters = modules[head].parameters()
        weights += [whole(p.detach()).to(wide(p)).flatten() for p in parameters]
    norm: Tensor = torch.cat(weights).norm()
    return norm
