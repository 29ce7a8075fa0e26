"""Multi-head attention written out literally, head by head and query by query; an oracle, slow on
purpose.

    h_i = g_i · f(W_i^q q, W_i^k k, W_i^v v)          output = W_o [h_1; ...; h_h]

with f the attention pooling: a softmax over the keys that may be seen, zeros where there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Fit = Callable[[Tensor, Tensor], Tensor]


def scaled_dot_product(query: Tensor, key: Tensor) -> Tensor:
    """``qᵀk / sqrt(d)`` of one query and one key."""
    return torch.dot(query, key) / math.sqrt(len(query))


def additive(weight: Tensor) -> Fit:
    """``wᵀ tanh(q + k)`` of one query and one key."""
    return lambda query, key: torch.dot(weight, torch.tanh(query + key))


def affine(projection: nn.Linear, x: Tensor, rows: slice) -> Tensor:
    """One head's part of a projection, applied to one vector."""
    y = projection.weight[rows] @ x
    return y if projection.bias is None else y + projection.bias[rows]


def may_see(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    valid_lens: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    hide_self: bool = False,
) -> Tensor:
    """``[batch, heads, queries, keys]`` by asking every single pair."""
    allowed = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    full = None if mask is None else mask.broadcast_to(batch, heads, queries, keys)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                position = keys - queries + i
                for j in range(keys):
                    sees = True
                    if valid_lens is not None:
                        sees &= j < int(
                            valid_lens[b] if valid_lens.dim() == 1 else valid_lens[b, i]
                        )
                    if full is not None:
                        sees &= bool(full[b, h, i, j])
                    if causal:
                        sees &= j <= position
                    if hide_self:
                        sees &= j != position
                    allowed[b, h, i, j] = sees
    return allowed


def multi_head(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    fit: Fit = scaled_dot_product,
    gates: Tensor | None = None,
    order: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output ``[batch, queries, output]`` and weights ``[batch, heads, queries, keys]`` of a
    batch-first module.

    Args:
        module: Holds ``W_q W_k W_v W_o``, ``n_heads``, ``n_kv_heads``, ``head_dim`` and
            ``value_dim``.
        query: ``[batch, queries, width]``.
        key: ``[batch, keys, width]``.
        value: ``[batch, keys, width]``.
        allowed: ``[batch, heads, queries, keys]``, True may be seen.
        fit: How well one query and one key of a head fit.
        gates: ``[batch, heads]``.
        order: The order in which heads are computed and summed.
    """
    n_heads, d, dv = module.n_heads, module.head_dim, module.value_dim
    group = n_heads // module.n_kv_heads
    outputs, all_weights = [], []
    for b in range(query.shape[0]):
        rows = []
        weights = torch.zeros(n_heads, query.shape[1], key.shape[1], dtype=query.dtype)
        for i in range(query.shape[1]):
            total = torch.zeros(module.W_o.weight.shape[0], dtype=query.dtype)
            for h in order or range(n_heads):
                own, shared = slice(h * d, (h + 1) * d), slice(h // group * d, (h // group + 1) * d)
                shared_v = slice(h // group * dv, (h // group + 1) * dv)
                q = affine(module.W_q, query[b, i], own)
                seen = [j for j in range(key.shape[1]) if allowed[b, h, i, j]]
                pooled = torch.zeros(dv, dtype=query.dtype)
                if seen:
                    numbers = torch.stack(
                        [fit(q, affine(module.W_k, key[b, j], shared)) for j in seen]
                    )
                    share = torch.exp(numbers) / torch.exp(numbers).sum()
                    for s, j in zip(share, seen, strict=True):
                        pooled = pooled + s * affine(module.W_v, value[b, j], shared_v)
                        weights[h, i, j] = s.detach()
                if gates is not None:
                    pooled = gates[b, h] * pooled
                total = total + module.W_o.weight[:, h * dv : (h + 1) * dv] @ pooled
            rows.append(total if module.W_o.bias is None else total + module.W_o.bias)
        outputs.append(torch.stack(rows))
        all_weights.append(weights)
    return torch.stack(outputs), torch.stack(all_weights)
