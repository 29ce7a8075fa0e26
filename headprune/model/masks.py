"""Which keys a mask hides from every query; nothing here waits for an accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

#: Scores below this hide a key: masks add -10,000 or less, scores of trained models are some
#: hundreds.
HIDDEN = -1000.0

#: ``[rows or rows * heads, keys]``, or ``[1, keys]`` for all rows: True where some query may see a
#: key. A number of keys where nothing is hidden.
Visible: TypeAlias = Tensor | int


def visible(pairs: Tensor) -> Tensor:
    """Find the keys that some query may see.

    If no query of a row may see itself, the mask shows something else than padding, or the whole
    row is padding. All its keys count then.

    Args:
        pairs: Booleans ``[rows, ..., queries or 1, keys]``, or without rows: True where a query may
            see a key.

    >>> import torch
    >>> causal = torch.ones(3, 3, dtype=torch.bool).tril()
    >>> visible(causal & torch.tensor([True, True, False])).tolist()
    [[True, True, False]]
    """
    if pairs.ndim == 2:
        pairs = pairs.unsqueeze(0)
    n_queries, n_keys = pairs.shape[-2:]
    seen = pairs.any(-2)  # [rows, ..., keys]
    if seen.ndim > 2:
        seen = seen.flatten(1, -2).any(1)  # [rows, keys]
    if n_queries not in (1, n_keys):
        return seen
    # Which query may see itself; with a single row of queries, any key stands for itself.
    itself = pairs if n_queries == 1 else pairs.diagonal(dim1=-2, dim2=-1)
    keys: Tensor = seen | ~itself.flatten(1).any(1, keepdim=True)
    return keys


def unmasked(mask: Any) -> Tensor | None:
    """Find the keys that count by an ``attention_mask`` of a Transformers model.

    Args:
        mask: With two axes ``[batch, keys]``, keys count that are not 0. With three or four,
            ``[batch, (heads,) queries, keys]``, keys count that any query may see. Booleans and
            integers are 1 there. Floats are added to scores, and are not large and negative there.

    Returns:
        ``[batch, keys]`` as booleans; None if it is no such mask.
    """
    if not isinstance(mask, Tensor) or not 2 <= mask.ndim <= 4:
        return None
    if mask.ndim > 2 and mask.is_floating_point():  # added to the scores
        return visible(mask > HIDDEN)
    return mask.bool() if mask.ndim == 2 else visible(mask.bool())


def token_mask(batch: Any, shape: tuple[int, int]) -> Tensor | None:
    """Find the tokens that are no padding by a batch's ``attention_mask``.

    Returns:
        ``[batch, tokens]``: True where a token is no padding; None where nothing is known.
    """
    mask: Any = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    tokens = unmasked(mask)
    if tokens is None or tokens.shape[1] != shape[1]:
        return None
    if len(tokens) == 1 and mask.ndim > 2:  # one for all examples
        return tokens.expand(shape)
    return tokens if len(tokens) == shape[0] else None


def unhidden(visibles: Sequence[Visible], shape: tuple[int, int]) -> tuple[bool, Tensor | None]:
    """Combine what several softmaxes or kernels hide.

    Args:
        visibles: The keys that each of them does not hide.
        shape: ``(rows, keys)``; those of another shape do not count.

    Returns:
        Whether any has this shape; and the keys ``[rows, keys]`` that none hides, None where
        nothing is hidden.
    """
    n_rows, n_keys = shape
    fits = False
    combined: Tensor | None = None
    for keys in visibles:
        if isinstance(keys, int):
            fits = fits or keys == n_keys
            continue
        if keys.shape[1] != n_keys or (len(keys) != 1 and len(keys) % n_rows):
            continue
        fits = True
        if len(keys) == 1:
            by_row = keys.expand(n_rows, -1)
        else:  # [rows * heads, keys]: what any head may see
            by_row = keys.reshape(n_rows, -1, n_keys).any(1)
        if combined is not None:
            by_row = by_row & combined
        combined = by_row
    # To read the numbers of an accelerator would wait for it.
    if combined is not None and combined.device.type == "cpu" and bool(combined.all()):
        return fits, None
    return fits, combined
