"""Attention of all heads at once: a fast path, and one that returns its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from headprune.attention.compatibility import ScaledDotProduct
from headprune.attention.masks import KeyMask
from headprune.core.errors import InvalidValue


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compatibility: Callable[..., Tensor],
    mask: KeyMask,
    heads: tuple[int, ...],
    dropout: float = 0.0,
    need_weights: bool = False,
    group: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``softmax(a(q, k)) v`` for every head; zeros for a query that sees no key.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        key: ``[batch, kv_heads, keys, head_dim]``; consecutive query heads share one.
        value: ``[batch, kv_heads, keys, value_dim]``.
        compatibility: The function a, see ``Compatibility``.
        mask: Which keys may be seen.
        heads: Original indices of the heads.
        dropout: Probability that a weight is dropped.
        need_weights: Return the weights before dropout too.
        group: Query heads per key/value head.

    Returns:
        ``[batch, heads, queries, value_dim]``, and the weights ``[batch, heads, queries, keys]`` or
        None.

    Raises:
        InvalidValue: the compatibility function returned another shape.
    """
    # Without keys the kernels disagree. In a trace sizes are tensors, which cannot be compared.
    if not torch.jit.is_tracing() and key.shape[2] == 0:
        context = query.new_zeros(*query.shape[:3], value.shape[-1])
        weights = query.new_zeros(*query.shape[:3], 0)
    elif isinstance(compatibility, ScaledDotProduct) and not need_weights:
        return _fast(query, key, value, compatibility, mask, dropout, group), None
    else:
        # One key per query head, because the function takes all heads in one call.
        key = _repeat(key, group)
        value = _repeat(value, group)
        context, weights = _with_weights(query, key, value, compatibility, mask, heads, dropout)
    return context, weights if need_weights else None


def repeated(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """Repeat every head of ``[batch, kv_heads, length, width]`` once per query head that reads it.

    >>> repeated(torch.arange(2.0).reshape(1, 2, 1, 1), (1, 2)).flatten().tolist()
    [0.0, 1.0, 1.0]
    """
    # Slices, because an index would be copied to the GPU in every call, which waits for the GPU.
    heads = [x[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(repeats)]
    return torch.cat(heads, 1)


def _repeat(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _fast(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compatibility: ScaledDotProduct,
    mask: KeyMask,
    dropout: float,
    group: int,
) -> Tensor:
    # On a GPU the kernels that take a mask do not take grouped heads. With both, PyTorch falls back
    # to a slow one.
    grouped = group > 1 and mask.allowed is None
    if not grouped:
        key = _repeat(key, group)
        value = _repeat(value, group)
    context = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask.allowed,
        dropout_p=dropout,
        is_causal=mask.is_causal,
        scale=compatibility.scale,
        enable_gqa=grouped,
    )
    if mask.empty is None:
        return context
    return context.masked_fill(mask.empty, 0)


def _with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compatibility: Callable[..., Tensor],
    mask: KeyMask,
    heads: tuple[int, ...],
    dropout: float,
) -> tuple[Tensor, Tensor]:
    scores = compatibility(query, key, heads)  # [batch, heads, queries, keys]
    shape = (*query.shape[:3], key.shape[2])
    _check_scores(scores, shape)
    allowed = mask.tensor(shape[2], shape[3], query.device)
    # Every row of `allowed` has a True, so no row of the softmax is NaN.
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights = scores.softmax(dim=-1)
    # Rows that may see no key saw every key until here.
    if mask.empty is not None:
        weights = weights.masked_fill(mask.empty, 0)
    return F.dropout(weights, dropout, training=dropout > 0) @ value, weights


def _check_scores(scores: object, shape: tuple[int, ...]) -> None:
    """Check the result of a compatibility function, which may be the user's."""
    got: object = type(scores).__name__
    if isinstance(scores, Tensor):
        if torch.jit.is_tracing() or tuple(scores.shape) == shape:
            return
        got = list(scores.shape)
    must = f"a tensor [batch, heads, queries, keys] = {list(shape)}"
    raise InvalidValue("what the compatibility function returns", must, got)
