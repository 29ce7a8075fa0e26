"""Decide from the pairs that one run hides whether an attention is causal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headprune.model.masks import HIDDEN, token_mask
from headprune.model.running import batch_size


def shown_pairs(scores: Tensor) -> Tensor:
    """``[..., queries, keys]``: True where scores let a query see a key."""
    return scores > HIDDEN


def kernel_pairs(
    query: Tensor, key: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """``[..., queries, keys]``: which keys a query may see; None where it sees all.

    Args:
        query: ``[..., queries, head_dim]``.
        key: ``[..., keys, head_dim]``.
        args: Positional arguments of ``scaled_dot_product_attention``, query and key included.
        kwargs: Its keyword arguments.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    shape = (query.shape[-2], key.shape[-2])
    if arguments.get("is_causal"):
        return torch.ones(shape, dtype=torch.bool).tril()
    mask = arguments.get("attn_mask")
    if not isinstance(mask, Tensor):
        return None
    # Added to the scores, or True where a query may see a key; it may broadcast.
    pairs = mask if mask.dtype == torch.bool else shown_pairs(mask)
    return pairs.expand(*pairs.shape[:-2], *shape)


def is_causal(pairs: Tensor, example: Any) -> bool:
    """Whether tokens see themselves and earlier ones, and no later one.

    Every token must see itself, and at least one must see an earlier one.

    Padding is not compared, because padding at the end could pass for causality. A token is padding
    where no query may see it, where it may see nothing itself, or where the example's
    ``attention_mask`` is 0.

    Args:
        pairs: ``[..., queries, keys]``: True where a query may see a key; queries and keys must be
            one sequence. The first axis holds examples, or examples times heads.
        example: The batch.

    >>> masks = (
    ...     torch.ones(3, 3, dtype=torch.bool).tril(),
    ...     torch.tensor([True, True, False]).expand(3, 3),
    ... )
    >>> [is_causal(mask, torch.zeros(2, 3)) for mask in masks]
    [True, False]
    """
    length = pairs.shape[-1]
    if pairs.ndim < 2 or pairs.shape[-2] != length or length < 2:
        return False
    n_examples = batch_size(example)
    first = pairs.shape[0] if pairs.ndim > 2 else 1
    by_example = first > 1 and first % n_examples == 0

    # 1. One axis of examples (of length 1 where all share the pairs), one of all other rows.
    rows = n_examples if by_example else 1
    pairs = pairs.detach().cpu().reshape(rows, -1, length, length)

    # 2. Tokens that are no padding: [examples, rows, tokens].
    counted = pairs.any(-2) & pairs.any(-1)
    tokens = token_mask(example, (n_examples, length))
    if tokens is not None:
        counted = counted & tokens.cpu()[:, None]
        pairs = pairs.expand(len(counted), -1, -1, -1)

    # 3. Which of them see which: themselves, later ones, earlier ones.
    seen = pairs & counted.unsqueeze(-1) & counted.unsqueeze(-2)
    sees_itself = torch.equal(seen.diagonal(dim1=-2, dim2=-1), counted)
    return sees_itself and not bool(seen.triu(1).any()) and bool(seen.tril(-1).any())
