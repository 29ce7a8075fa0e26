"""Which keys masks hide from every query, whatever their form; nothing here waits for an
accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

#: Scores below this were put there to hide a key: masks add -10,000 or less; trained models' scores
#: are some hundreds.
HIDDEN = -1000.0

#: ``[rows or rows * heads, keys]``, or ``[1, keys]`` for all rows: True where some query may see a
#: key. A number of keys where nothing is hidden.
Visible: TypeAlias = Tensor | int


def visible(pairs: Tensor) -> Tensor:
    """Which keys some query may see.

    Where no query of a row may see itself, that hides keys too, or the row is hidden as a whole:
    all count then.

    Args:
        pairs: Booleans ``[rows, ..., queries or 1, keys]``, or without rows: True where a query may
            see a key.

    >>> import torch
    >>> causal = torch.ones(3, 3, dtype=torch.bool).tril()
    >>> visible(causal & torch.tensor([True, True, False])).tolist()
    [[True, True, False]]
    """
    pairs = pairs if pairs.ndim > 2 else pairs.unsqueeze(0)
    queries, keys = pairs.shape[-2:]
    seen = pairs.any(-2)
    seen = seen if seen.ndim == 2 else seen.flatten(1, -2).any(1)
    if queries not in (1, keys):
        return seen
    own = pairs if queries == 1 else pairs.diagonal(dim1=-2, dim2=-1)
    found: Tensor = seen | ~own.flatten(1).any(1, keepdim=True)
    return found


def unmasked(mask: Any) -> Tensor | None:
    """Which keys count by an ``attention_mask`` of Transformers' models; None for anything else.

    Two axes ``[batch, keys]``: those that are not 0. Three or four,
    ``[batch, (heads,) queries, keys]``: those that any query may see, which booleans and integers
    say by 1, and floats, which are added to scores, by not being large and negative.
    """
    if not isinstance(mask, Tensor) or not 2 <= mask.ndim <= 4:
        return None
    if mask.ndim == 2:
        return mask.bool()
    return visible(mask > HIDDEN if mask.is_floating_point() else mask.bool())


def token_mask(batch: Any, shape: tuple[int, int]) -> Tensor | None:
    """``[batch, tokens]``: True where a token is no padding, from ``attention_mask``; None where
    nothing is known."""
    mask: Any = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    found = unmasked(mask)
    if found is None or found.shape[1] != shape[1]:
        return None
    if len(found) == 1 and mask.ndim > 2:  # one for all examples
        return found.expand(shape)
    return found if len(found) == shape[0] else None


def unhidden(found: Sequence[Visible], shape: tuple[int, int]) -> tuple[bool, Tensor | None]:
    """Whether any of what was found is of this shape; and ``[rows, keys]``, what none of those
    hides, None where nothing is hidden."""
    rows, n_keys = shape
    fits, whole = False, None
    for one in found:
        if isinstance(one, int):
            fits |= one == n_keys
        elif one.shape[1] == n_keys and (len(one) == 1 or len(one) % rows == 0):
            by_row = one.expand(rows, -1) if len(one) == 1 else one.reshape(rows, -1, n_keys).any(1)
            fits, whole = True, by_row if whole is None else whole & by_row
    nothing = (
        whole is not None and whole.device.type == "cpu" and bool(whole.all())
    )  # elsewhere a look would wait
    return fits, None if nothing else whole
