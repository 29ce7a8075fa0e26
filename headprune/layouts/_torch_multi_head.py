"""The attention of `torch.nn.MultiheadAttention` with its output projection called as a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headprune.core.layout import STATE_ATTRIBUTE
from headprune.layouts._transformers import present_heads


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What ``nn.MultiheadAttention.forward`` returns, also for a module that was cut and for nested
    tensors.

    A mask for each head, ``[batch * heads, queries, keys]``, may be for the uncut module's heads.
    """
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    nested, lengths = query.is_nested, None
    if nested:
        if (
            query is not key
            or key is not value
            or key_padding_mask is not None
            or attn_mask is not None
        ):
            raise RuntimeError("A nested tensor attends to itself and without masks.")
        lengths = torch.tensor(
            [example.shape[0] for example in query.unbind()], device=query.device
        )
        query = key = value = query.to_padded_tensor(0.0)
        key_padding_mask = torch.arange(query.shape[1], device=query.device) >= lengths[:, None]
    batched = query.dim() == 3
    if not batched:
        query, key, value = _each(lambda x: x.unsqueeze(0), query, key, value)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not (module.batch_first or nested):
        query, key, value = _each(lambda x: x.transpose(0, 1), query, key, value)

    q, k, v = _projected(module, query, key, value)
    hinted = (
        is_causal and key_padding_mask is None and not need_weights
    )  # the kernel then makes the mask itself
    mask = (
        None
        if hinted
        else _merged(module, attn_mask, key_padding_mask, query, k.shape[2] - key.shape[1])
    )
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        weights = functional.dropout(
            torch.softmax(scores if mask is None else scores + mask, -1), dropout
        )
        heads = weights @ v
        weights = weights.sum(1) / max(module.num_heads, 1) if average_attn_weights else weights
        weights = weights if batched else weights.squeeze(0)
    else:
        heads = functional.scaled_dot_product_attention(q, k, v, mask, dropout, hinted)
    out = module.out_proj(heads.transpose(1, 2).flatten(2))
    if lengths is not None:
        kept = torch.arange(out.shape[1], device=out.device) < lengths[:, None]
        return torch._nested_tensor_from_mask(out, kept, mask_check=False), weights
    if not batched:
        return out.squeeze(0), weights
    return (out if module.batch_first else out.transpose(0, 1)), weights


def _each(change: Callable[[Tensor], Tensor], *inputs: Tensor) -> Iterator[Tensor]:
    """The changed inputs; those that are one tensor stay one, so that their projections stay one
    product."""
    made = {id(x): change(x) for x in inputs}
    return (made[id(x)] for x in inputs)


def _projected(module: Any, *inputs: Tensor) -> list[Tensor]:
    """Queries, keys and values, ``[batch, heads, length, head_dim]``, with the keys that the module
    adds.

    A fused weight is multiplied once for all neighbours that read the same tensor, as in PyTorch's
    code.
    """
    fused = module.in_proj_weight is not None
    runs = [list(run) for _, run in groupby(inputs, key=id)] if fused else [[x] for x in inputs]
    sizes = [len(run) * module.num_heads * module.head_dim for run in runs]
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if fused:
        weights = module.in_proj_weight.split(sizes)
    biases = [None] * len(runs) if module.in_proj_bias is None else module.in_proj_bias.split(sizes)
    projected: list[Tensor] = []
    for run, weight, bias in zip(runs, weights, biases, strict=True):
        projected += functional.linear(run[0], weight, bias).chunk(len(run), -1)
    split = []
    for x, more in zip(projected, (None, module.bias_k, module.bias_v), strict=True):
        x = x if more is None else torch.cat([x, more.expand(len(x), -1, -1)], 1)
        split.append(x.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2))
    if module.add_zero_attn:
        split[1:] = [functional.pad(x, (0, 0, 0, 1)) for x in split[1:]]
    return split


def _merged(
    module: Any,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    query: Tensor,
    added: int,
) -> Tensor | None:
    """Both masks as one that is added to the scores,
    ``[batch or 1, heads or 1, queries or 1, keys]``."""
    merged = None
    if attn_mask is not None:
        merged = _additive(attn_mask, query.dtype)
        merged = (
            merged[None, None]
            if merged.dim() == 2
            else _of_heads(module, merged.unflatten(0, (len(query), -1)))
        )
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, query.dtype)[:, None, None]
        merged = padding if merged is None else merged + padding
    return (
        functional.pad(merged, (0, added)) if merged is not None and added else merged
    )  # without any, pad copies


def _of_heads(module: Any, mask: Tensor) -> Tensor:
    """The rows of the present heads of ``[batch, heads, queries, keys]`` for the present or the
    original heads."""
    state = getattr(module, STATE_ATTRIBUTE, None)
    if state is None or mask.shape[1] == module.num_heads:
        return mask
    if mask.shape[1] != state.n_query_heads:
        must = f"a mask for {module.num_heads} present or {state.n_query_heads} original heads"
        raise RuntimeError(f"attn_mask must be {must}, got {mask.shape[1]}.")
    return present_heads(module, mask, 1)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
