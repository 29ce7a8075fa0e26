"""Sizes before and after: heads, parameters, bytes on disk, multiply-adds, KV-cache bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headprune.core.heads import HeadCounts
from headprune.core.record import SizeRow
from headprune.model.costs import measure_costs
from headprune.model.losses import Loss
from headprune.model.sites import Sites, bind, find_sites, has_cut_neurons


def sizes(
    original: nn.Module,
    pruned: nn.Module,
    batch: Any,
    sites: Sites | None = None,
    loss: Loss | None = None,
) -> tuple[SizeRow, ...]:
    """Count the sizes of both models on one batch.

    Args:
        original: The model before the cut.
        pruned: The model after it.
        batch: Any batch for both; multiply-adds are for one example of its length.
        sites: Of the original; default its attention, and its feed-forwards if neurons were cut.
        loss: Calls the models, where a batch is not simply their arguments.

    Returns:
        Rows for heads, neurons of feed-forwards that are sites, parameters, bytes on disk,
        multiply-adds and, where there is a cache, its bytes per token.
    """
    if sites is None:
        sites = find_sites(original, feed_forward=has_cut_neurons(pruned))
    bound_before = bind(original, sites)
    bound_after = bind(pruned, sites)
    costs = measure_costs(original, bound_before, batch, loss)
    before = costs.total
    length = costs.length
    after = measure_costs(pruned, bound_after, batch, loss, length).total
    counts_before = HeadCounts.present(b.site for b in bound_before)
    counts_after = HeadCounts.present(b.site for b in bound_after)
    rows = [_row("heads", counts_before.heads, counts_after.heads)]
    if counts_before.neurons is not None:
        rows.append(_row("neurons", counts_before.neurons, counts_after.neurons or 0))
    rows += [
        _row("parameters", before.params, after.params),
        _row("bytes on disk", stored_bytes(original), stored_bytes(pruned)),
        _row(f"MACs an example of {length} tokens", before.macs(length), after.macs(length)),
    ]
    if before.kv_bytes:
        rows.append(_row("KV-cache bytes per token", before.kv_bytes, after.kv_bytes))
    return tuple(rows)


def stored_bytes(model: nn.Module) -> int:
    """Count the bytes of the weights in a checkpoint; tied ones are stored once."""
    stored = set(model.state_dict())
    tensors: list[Tensor] = [*model.parameters()]
    # Buffers that are computed again, such as positions, are not stored.
    tensors += [buffer for name, buffer in model.named_buffers() if name in stored]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _row(name: str, original: float, pruned: float) -> SizeRow:
    return SizeRow(name, float(original), float(pruned))
