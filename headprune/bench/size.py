"""Sizes before and after: heads, parameters, multiply-adds, KV-cache bytes."""

from __future__ import annotations

from typing import Any

from torch import nn

from headprune.core.record import SizeRow
from headprune.model.costs import measure_costs
from headprune.model.losses import Loss
from headprune.model.sites import Sites, bind, find_sites


def sizes(
    original: nn.Module,
    pruned: nn.Module,
    batch: Any,
    sites: Sites | None = None,
    loss: Loss | None = None,
) -> tuple[SizeRow, ...]:
    """Counts both models on one batch.

    Args:
        original: The model before the cut.
        pruned: The model after it.
        batch: Any batch that both take; multiply-adds are for one example of its length.
        sites: Default ``find_sites(original)``.
        loss: How the models are called, where a batch is not simply their arguments.

    Returns:
        Rows for heads, parameters, multiply-adds and, where there is a cache, its bytes a token.
    """
    located = sites if sites is not None else find_sites(original)
    before, after = bind(original, located), bind(pruned, located)
    a, b = measure_costs(original, before, batch, loss), measure_costs(pruned, after, batch, loss)
    rows = [
        ("heads", sum(len(s.site.heads) for s in before), sum(len(s.site.heads) for s in after)),
        ("parameters", a.total.params, b.total.params),
        (f"MACs an example of {a.length} tokens", a.total.macs(a.length), b.total.macs(a.length)),
    ]
    if a.total.kv_bytes:
        rows.append(("KV-cache bytes a token", a.total.kv_bytes, b.total.kv_bytes))
    return tuple(SizeRow(name, float(x), float(y)) for name, x, y in rows)
