"""Attention of `torch.nn.MultiheadAttention`, with its output projection called as a module."""

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
    """Compute ``nn.MultiheadAttention.forward``, also for cut modules and nested tensors.

    A mask per head, ``[batch * heads, queries, keys]``, may be for the uncut module's heads.

    Raises:
        RuntimeError: options that PyTorch refuses too.
    """
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if query.is_nested:
        _check_nested(query, key, value, key_padding_mask, attn_mask)
        return _attend_nested(module, query, need_weights, average_attn_weights)

    # 1. Bring the inputs into the form [batch, length, width].
    unbatched = query.dim() != 3
    sequence_first = not unbatched and not module.batch_first
    if unbatched:
        query, key, value = _each(lambda x: x.unsqueeze(0), query, key, value)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
    elif sequence_first:
        query, key, value = _each(lambda x: x.transpose(0, 1), query, key, value)

    # 2. Attend.
    out, weights = _attend_batch(
        module,
        (query, key, value),
        key_padding_mask,
        attn_mask,
        need_weights=need_weights,
        average=average_attn_weights,
        is_causal=is_causal,
    )

    # 3. Bring the results into the caller's form.
    if unbatched:
        out = out.squeeze(0)
        if weights is not None:
            weights = weights.squeeze(0)
    elif sequence_first:
        out = out.transpose(0, 1)
    return out, weights


def _check_nested(
    query: Tensor, key: Tensor, value: Tensor, *attention_masks: Tensor | None
) -> None:
    """Refuse cross-attention and masks for nested tensors, as PyTorch does."""
    one_input = query is key and key is value
    if not one_input or any(mask is not None for mask in attention_masks):
        raise RuntimeError("Nested tensors allow only self-attention without masks.")


def _attend_nested(
    module: Any, nested: Tensor, need_weights: bool, average: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend with a nested tensor, ``[batch, (length), width]``, by padding it."""
    x, padding = padded(nested)
    out, weights = _attend_batch(
        module, (x, x, x), padding, None, need_weights=need_weights, average=average
    )
    return torch._nested_tensor_from_mask(out, ~padding, mask_check=False), weights


def padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Pad a nested tensor ``[batch, (length), width]`` with zeros.

    Returns:
        ``[batch, length, width]``, and where it is padding, ``[batch, length]``.
    """
    sizes = [example.shape[0] for example in nested.unbind()]
    lengths = torch.tensor(sizes, device=nested.device)[:, None]
    x = nested.to_padded_tensor(0.0)
    return x, torch.arange(x.shape[1], device=x.device) >= lengths


def _attend_batch(
    module: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    *,
    need_weights: bool,
    average: bool,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend with queries, keys and values, each ``[batch, length, width]``.

    Returns:
        The output, ``[batch, queries, width]``, and the weights, ``[batch, queries, keys]`` if
        averaged, else ``[batch, heads, queries, keys]``; None where they are not needed.
    """
    query, key, _ = inputs
    q, k, v = _projected(module, *inputs)  # [batch, heads, length, head_dim]
    n_added = k.shape[2] - key.shape[1]  # keys that the module adds to its input's
    dropout = module.dropout if module.training else 0.0

    weights = None
    if is_causal and key_padding_mask is None and not need_weights:
        # The kernel makes the causal mask itself.
        heads = functional.scaled_dot_product_attention(q, k, v, None, dropout, True)
    else:
        mask = _merged_masks(module, attn_mask, key_padding_mask, query, n_added)
        if need_weights:
            heads, weights = _weighted(q, k, v, mask, dropout)
        else:
            heads = functional.scaled_dot_product_attention(q, k, v, mask, dropout, False)
    if weights is not None and average:
        # A module without heads has a sum over nothing, zero, instead of a division by zero.
        weights = weights.sum(1) / max(module.num_heads, 1)
    # [batch, queries, heads * head_dim] -> [batch, queries, width]
    return module.out_proj(heads.transpose(1, 2).flatten(2)), weights


def _weighted(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attend step by step; return the heads' outputs and their weights."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # [batch, heads, queries, keys]
    if mask is not None:
        scores = scores + mask
    weights = functional.dropout(torch.softmax(scores, -1), dropout)
    return weights @ v, weights


def _each(change: Callable[[Tensor], Tensor], *inputs: Tensor) -> Iterator[Tensor]:
    """Change each input; one tensor that is passed twice remains one tensor."""
    changed = {id(x): change(x) for x in inputs}
    return (changed[id(x)] for x in inputs)


def _projected(module: Any, *inputs: Tensor) -> list[Tensor]:
    """Compute queries, keys and values, ``[batch, heads, length, head_dim]``."""
    split = []
    extra = (None, module.bias_k, module.bias_v)  # one learned key and value, [1, 1, width]
    for x, added in zip(_linear(module, inputs), extra, strict=True):
        if added is not None:
            x = torch.cat([x, added.expand(len(x), -1, -1)], 1)
        split.append(x.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2))
    if module.add_zero_attn:
        # One more key and value of zeros.
        split[1:] = [functional.pad(x, (0, 0, 0, 1)) for x in split[1:]]
    return split


def _linear(module: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Project queries, keys and values, each to ``[batch, length, heads * head_dim]``."""
    # A fused weight is multiplied once per run of equal inputs, as in PyTorch's code.
    fused = module.in_proj_weight is not None
    runs = [[x] for x in inputs]
    if fused:
        runs = [list(run) for _, run in groupby(inputs, key=id)]
    sizes = [len(run) * module.num_heads * module.head_dim for run in runs]

    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if fused:
        weights = module.in_proj_weight.split(sizes)
    biases = [None] * len(runs)
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.split(sizes)

    projected: list[Tensor] = []
    for run, weight, bias in zip(runs, weights, biases, strict=True):
        projected += functional.linear(run[0], weight, bias).chunk(len(run), -1)
    return projected


def _merged_masks(
    module: Any,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    query: Tensor,
    n_added: int,
) -> Tensor | None:
    """Merge both masks into one that is added to scores.

    Returns:
        ``[batch or 1, heads or 1, queries or 1, keys]``, or None where there is no mask.
    """
    merged = None
    if attn_mask is not None:
        merged = _additive(attn_mask, query.dtype)
        if merged.dim() == 2:  # [queries, keys]
            merged = merged[None, None]
        else:  # [batch * heads, queries, keys]
            merged = _mask_of_heads(module, merged.unflatten(0, (len(query), -1)))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, query.dtype)[:, None, None]
        merged = padding if merged is None else merged + padding
    # Added keys are visible to all. Padding by nothing would copy.
    if merged is not None and n_added:
        merged = functional.pad(merged, (0, n_added))
    return merged


def _mask_of_heads(module: Any, mask: Tensor) -> Tensor:
    """Take the kept heads of a mask, ``[batch, heads, queries, keys]``.

    Its heads are the kept heads already, or all original heads.
    """
    state = getattr(module, STATE_ATTRIBUTE, None)
    if state is None or mask.shape[1] == module.num_heads:
        return mask
    if mask.shape[1] != state.n_query_heads:
        must = f"a mask for {module.num_heads} present or {state.n_query_heads} original heads"
        raise RuntimeError(f"attn_mask must be {must}, got {mask.shape[1]}.")
    return present_heads(module, mask, 1)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask, True for a hidden key, into what is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
