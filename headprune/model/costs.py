"""What a model and each of its prune units cost: parameters, multiply-adds for any length, KV-cache bytes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from headprune.core.errors import UnsupportedModel
from headprune.core.scores import Cost, CostTable
from headprune.core.slabs import freed_groups, kept_rows
from headprune.model.expose import exposed
from headprune.model.losses import Loss
from headprune.model.running import batch_size, call, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, bind, find_sites, lookup, slab_length, unwrap


def measure_costs(model: nn.Module, bound: list[BoundSite], batch: Any, loss: Loss | None = None) -> CostTable:
    """Runs the model once on ``batch`` and counts, from the shapes that pass through it.

    Multiply-adds are those of linear layers (also Transformers' Conv1D), convolutions, and the two products inside
    each located attention, ``heads * (head_dim + value_dim)`` a pair of tokens, causal ones counted whole. Element-wise
    work, norms and embeddings count nothing. A linear layer that sees a multiple of the sequence length in rows is
    counted a token, any other an example.

    Args:
        model: The model.
        bound: The sites whose units are costed; the totals are the whole model's.
        batch: Any batch that the model takes; its longest site gives the length.
        loss: How the model is called, where a batch is not simply its arguments.
    """
    everywhere = [*bound, *_others(model, bound)]
    batch = to_device(batch, device_of(model))
    size = batch_size(batch)
    rows: list[tuple[int, int]] = []  # (rows an example, multiply-adds a row) of every call of a linear layer
    fixed = [0]
    lengths: list[int] = []
    calls: Counter[str] = Counter()
    windows: dict[str, int] = {}

    def linear(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        weight: Any = module.weight
        if weight.numel():
            rows.append((output.numel() // (output.shape[-1] or 1) // size, weight.numel()))

    def convolution(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        weight: Any = module.weight
        fixed[0] += output.numel() // size * weight[0].numel()

    def gate(site: BoundSite) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            length = args[0].shape[1 - site.layout.batch_axis]
            calls[site.site.name] += 1
            if site.layout.windows:  # tokens attend within their window: the pairs are as many for every length
                windows[site.site.name] = windows.get(site.site.name, 0) + args[0].shape[0] // size * length**2
            else:
                lengths.append(length)

        return count

    handles = [site.gate.register_forward_pre_hook(gate(site)) for site in everywhere]
    for module in unwrap(model).modules():
        if isinstance(module, nn.Linear) or hasattr(module, "nf"):
            handles.append(module.register_forward_hook(linear))
        elif isinstance(module, _ConvNd):
            handles.append(module.register_forward_hook(convolution))
    try:
        with undisturbed(model), torch.no_grad(), exposed(everywhere):
            (loss or call)(unwrap(model), batch)
    finally:
        for handle in handles:
            handle.remove()
    length = max(lengths, default=max((r for r, _ in rows), default=1))
    per_token = sum(n // length * macs for n, macs in rows if n % length == 0)
    fixed[0] += sum(n * macs for n, macs in rows if n % length)
    units = tuple(unit_costs(s, max(calls[s.site.name], 1), windows.get(s.site.name)) for s in everywhere)
    total = Cost(
        params=sum(p.numel() for p in unwrap(model).parameters()),
        macs_fixed=fixed[0] + sum(c.macs_fixed for row in units for c in row),
        macs_per_token=per_token,
        macs_per_pair=sum(c.macs_per_pair for row in units for c in row),
        kv_bytes=sum(c.kv_bytes for row in units for c in row),
    )
    return CostTable(total, units[: len(bound)], length)


def _others(model: nn.Module, bound: list[BoundSite]) -> list[BoundSite]:
    """The model's sites that were not asked for: their attention is a part of the whole model's cost."""
    try:
        found = bind(model, find_sites(model))
    except UnsupportedModel:
        return []
    names = {b.site.name for b in bound}
    return [b for b in found if b.site.name not in names]


def unit_costs(bound: BoundSite, calls: int = 1, pairs_an_example: int | None = None) -> tuple[Cost, ...]:
    """What leaves the model with each unit of a site, in the order of ``AttentionSite.units``.

    Args:
        bound: The site.
        calls: How often the module runs in one pass of the model.
        pairs_an_example: Pairs of tokens that attend to each other, where that is not the square of the length.
    """
    site = bound.site
    itemsize = next(bound.module.parameters()).element_size()
    costs = []
    for unit in site.units:
        positions = [site.heads.index(h) for h in unit]
        groups = freed_groups(site.geometry, positions)
        params = macs = 0
        for slab in bound.slabs:
            target = lookup(bound.module, slab.path)
            if isinstance(target, nn.ModuleList):
                leaving = [p for h in positions for p in target[h].parameters()]
                params += sum(p.numel() for p in leaving)
                macs += sum(p.numel() for p in leaving if p.ndim == 2)
                continue
            n_rows = len(kept_rows(site.geometry, slab.units, slab.packing, positions, groups))
            weight = target if isinstance(target, Tensor) else target.weight
            length = slab_length(bound.module, slab)
            params += n_rows * math.prod(weight.shape) // length
            if isinstance(target, nn.Module):
                macs += n_rows * weight.numel() // length
                params += n_rows if slab.axis == "out" and target.bias is not None else 0
        kv = len(groups) * (site.head_dim + site.value_dim) * itemsize if site.kind == "causal" else 0
        pairs = len(unit) * (site.head_dim + site.value_dim)
        if pairs_an_example is None:
            costs.append(Cost(params, 0, macs * calls, pairs * calls, kv))
        else:
            costs.append(Cost(params, pairs * pairs_an_example, macs * calls, 0, kv))
    return tuple(costs)
