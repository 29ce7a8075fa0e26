"""Masks of keys: every kind of mask, checked and joined into one.

A query that may see no key gets zeros. Softmax alone would give NaN there, in the output or in the
gradient, and the kernels behind PyTorch's attention disagree about it. So such a row sees every
key, and its result is replaced by zeros afterwards, which also cuts its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headprune.attention.tracing import has_numbers, is_recorded
from headprune.core.errors import InvalidValue

#: batch, heads, queries, keys
Shape = tuple[int, int, int, int]

# Dtypes of lengths.
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class KeyMask:
    """The joined mask of one forward pass.

    Args:
        allowed: Boolean, broadcastable to ``[batch, heads, queries, keys]``, True in every row at
            least once; None where every key may be seen, or where ``is_causal`` is the whole mask.
        empty: Boolean ``[..., queries, 1]``, the rows whose result is zero; None if there can be
            none.
        is_causal: The square causal mask and nothing else; the kernels need no tensor for it.
    """

    allowed: Tensor | None = None
    empty: Tensor | None = None
    is_causal: bool = False

    def tensor(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return ``allowed``, with the causal mask as a tensor."""
        if self.is_causal:
            return _before(queries, keys, device)
        return self.allowed


def join_masks(
    shape: Shape,
    device: torch.device,
    valid_lens: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    hide_self: bool = False,
    to_itself: bool = False,
) -> KeyMask:
    """Check the masks of a forward pass and join them.

    Args:
        shape: ``(batch, heads, queries, keys)``.
        device: Where the result lives.
        valid_lens: Integers ``[batch]`` or ``[batch, queries]``: how many keys are seen, from the
            first; 0 to ``keys``.
        mask: Boolean, broadcastable to ``shape``; True may be seen.
        causal: A query sees its own position and earlier ones. The queries are the LAST positions
            of the keys.
        hide_self: A query does not see its own position.
        to_itself: The keys are the queries' own positions. Equal sizes do not show that while a
            pass is recorded.

    Raises:
        InvalidValue: a wrong shape, dtype or length.

    >>> join_masks(
    ...     (1, 1, 2, 3), torch.device("cpu"), valid_lens=torch.tensor([2]), hide_self=True
    ... ).allowed[0, 0]
    tensor([[ True, False, False],
            [ True,  True, False]])
    """
    # 1. Masks that are given as tensors.
    _, _, queries, keys = shape
    parts = _given(valid_lens, mask, shape, device)

    # 2. Masks by position. A recorded pass is for other sizes too, so nothing depends on them.
    recorded = is_recorded()
    square = to_itself if recorded else _equal(queries, keys)
    if not recorded:
        _check_positions(causal, hide_self, queries, keys)
    if causal and not parts and not hide_self and (square or not recorded):
        return _only_causal(square, queries, keys, device)
    if causal:
        parts.append(_before(queries, keys, device))
    if hide_self:
        # [queries, 1], the position of each query among the keys
        own = torch.arange(queries, device=device)[:, None] + (keys - queries)
        parts.append((torch.arange(keys, device=device) != own)[None, None])
    return _joined(parts, queries, keys)


def _given(
    valid_lens: Tensor | None, mask: Tensor | None, shape: Shape, device: torch.device
) -> list[Tensor]:
    """Check the masks that are tensors; each result is boolean with four dimensions."""
    parts = []
    if valid_lens is not None:
        parts.append(_within(valid_lens, shape, device))
    if mask is not None:
        parts.append(_checked(mask, shape))
    return parts


def _joined(parts: list[Tensor], queries: int, keys: int) -> KeyMask:
    """Join masks: a key is seen where all of them allow it."""
    if not parts:
        return KeyMask()
    allowed = parts[0]
    for part in parts[1:]:
        allowed = allowed & part
    allowed = allowed.expand(*allowed.shape[:2], queries, keys)
    # Rows without a key see every key, and their result is set to zero afterwards.
    empty = ~allowed.any(dim=-1, keepdim=True)
    return KeyMask(allowed | empty, empty)


def _check_positions(causal: bool, hide_self: bool, queries: int, keys: int) -> None:
    if (causal or hide_self) and keys < queries:
        name = "causal" if causal else "hide_self"
        must = f"used with at least {queries} keys for {queries} queries"
        hint = "The queries are taken for the last positions of the keys."
        raise InvalidValue(f"{name}=True", must, keys, hint)


def _only_causal(square: bool, queries: int, keys: int, device: torch.device) -> KeyMask:
    """Return the causal mask alone, without a tensor where the kernels need none."""
    # A single query is the last position and sees every key: a decoder's step needs no mask.
    if square or queries == 1:
        return KeyMask(is_causal=square)
    return KeyMask(_before(queries, keys, device))


def _equal(a: int, b: int) -> bool:
    """Compare sizes as a plain bool, the only kind that kernels accept."""
    # Sizes are symbols while a pass is compiled; the branch makes the result a plain bool.
    if a == b:  # noqa: SIM103
        return True
    return False


def _before(queries: int, keys: int, device: torch.device) -> Tensor:
    """Make the causal mask, ``[1, 1, queries, keys]``."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return every.tril(keys - queries)[None, None]


def _within(valid_lens: Tensor, shape: Shape, device: torch.device) -> Tensor:
    """Check ``valid_lens`` and make its mask, ``[batch, 1, 1 or queries, keys]``."""
    batch, _, queries, keys = shape
    if not isinstance(valid_lens, Tensor) or valid_lens.dtype not in _INTEGERS:
        got = getattr(valid_lens, "dtype", type(valid_lens).__name__)
        raise InvalidValue("valid_lens", "a tensor of integers", got)
    if not torch.jit.is_tracing() and tuple(valid_lens.shape) not in ((batch,), (batch, queries)):
        must = f"of shape [batch] = {[batch]} or [batch, queries] = {[batch, queries]}"
        raise InvalidValue("valid_lens", must, list(valid_lens.shape))
    if has_numbers(valid_lens) and valid_lens.numel():
        lowest, highest = valid_lens.aminmax()
        low = int(lowest)
        high = int(highest)
        if low < 0 or high > keys:
            must = f"between 0 and the number of keys {keys}"
            raise InvalidValue("valid_lens", must, f"{low} to {high}")
    lens = valid_lens.to(device)
    if lens.dim() == 1:
        lens = lens[:, None]  # [batch, 1]
    lens = lens[:, None, :, None]
    return torch.arange(keys, device=device) < lens


def _checked(mask: Tensor, shape: Shape) -> Tensor:
    """Check a boolean mask and return it with four dimensions."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = getattr(mask, "dtype", type(mask).__name__)
        hint = "True may be seen; for a mask of 0 and -inf pass `mask == 0`."
        raise InvalidValue("mask", "a boolean tensor", got, hint)
    # Missing dimensions are the first ones, as in broadcasting.
    full = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    fits = len(full) == 4
    # In a trace sizes are tensors, which cannot be compared.
    if fits and not torch.jit.is_tracing():
        fits = all(have in (1, want) for have, want in zip(full, shape, strict=True))
    if not fits:
        must = f"broadcastable to [batch, heads, queries, keys] = {list(shape)}"
        hint = "A mask of [batch, keys] is written mask[:, None, None, :]."
        raise InvalidValue("mask", must, list(mask.shape), hint)
    return mask.reshape(full)
