"""Which keys a query may look at: every kind of mask, checked and joined into one.

A query that may look at no key at all gets zeros. Softmax alone would give NaN there, in the output
or in the gradient, and the kernels behind PyTorch's attention disagree about it; so such a row is
let see every key and its result is replaced by zeros afterwards, which also cuts its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headprune.attention.tracing import has_numbers, is_recorded
from headprune.core.errors import InvalidValue

#: batch, heads, queries, keys
Shape = tuple[int, int, int, int]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class KeyMask:
    """The joined mask of one forward pass.

    Args:
        allowed: Boolean, broadcastable to ``[batch, heads, queries, keys]``, True in every row at
            least once; None where every key may be seen, or where ``is_causal`` says it all.
        empty: Boolean ``[..., queries, 1]``, the rows whose result is zero; None where no row can
            be.
        is_causal: The square causal mask and nothing else; the kernels know it without a tensor.
    """

    allowed: Tensor | None = None
    empty: Tensor | None = None
    is_causal: bool = False

    def tensor(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """``allowed``, with the causal mask written out."""
        return _before(queries, keys, device) if self.is_causal else self.allowed


def join_masks(
    shape: Shape,
    device: torch.device,
    valid_lens: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    hide_self: bool = False,
    to_itself: bool = False,
) -> KeyMask:
    """Checks the masks of a forward pass and joins them.

    Args:
        shape: ``(batch, heads, queries, keys)``.
        device: Where the result lives.
        valid_lens: Integers ``[batch]`` or ``[batch, queries]``: only the first so many keys are
            seen, 0 to ``keys``.
        mask: Boolean, broadcastable to ``shape``; True may be seen.
        causal: A query sees its own position and those before it. The queries are the LAST
            positions of the keys.
        hide_self: A query does not see its own position.
        to_itself: The keys are the queries' own positions; of a pass that is recorded, equal sizes
            do not say so.

    Raises:
        InvalidValue: a wrong shape, dtype or length.

    >>> join_masks(
    ...     (1, 1, 2, 3), torch.device("cpu"), valid_lens=torch.tensor([2]), hide_self=True
    ... ).allowed[0, 0]
    tensor([[ True, False, False],
            [ True,  True, False]])
    """
    _, _, queries, keys = shape
    parts: list[Tensor] = []
    if valid_lens is not None:
        parts.append(_within(valid_lens, shape, device))
    if mask is not None:
        parts.append(_checked(mask, shape))
    square = to_itself if is_recorded() else _equal(queries, keys)
    if (causal or hide_self) and not is_recorded() and keys < queries:
        name = "causal" if causal else "hide_self"
        hint = "The queries are taken for the last positions of the keys."
        raise InvalidValue(
            f"{name}=True", f"used with at least {queries} keys for {queries} queries", keys, hint
        )
    if causal and not parts and not hide_self and (square or not is_recorded()):
        # A single query is the last position and sees every key: the step of a decoder needs no
        # mask.
        allowed = None if square or queries == 1 else _before(queries, keys, device)
        return KeyMask(allowed, is_causal=square)
    if causal:
        parts.append(_before(queries, keys, device))
    if hide_self:
        own = torch.arange(queries, device=device)[:, None] + (keys - queries)
        parts.append((torch.arange(keys, device=device) != own)[None, None])
    if not parts:
        return KeyMask()
    allowed = parts[0]
    for part in parts[1:]:
        allowed = allowed & part
    allowed = allowed.expand(*allowed.shape[:2], queries, keys)
    empty = ~allowed.any(dim=-1, keepdim=True)
    return KeyMask(allowed | empty, empty)


def _equal(a: int, b: int) -> bool:
    """A plain bool, also of sizes that are symbols while a pass is compiled: kernels take no
    other."""
    if a == b:  # noqa: SIM103 (the branch is what makes it one)
        return True
    return False


def _before(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[
        None, None
    ]


def _within(valid_lens: Tensor, shape: Shape, device: torch.device) -> Tensor:
    batch, _, queries, keys = shape
    if not isinstance(valid_lens, Tensor) or valid_lens.dtype not in _INTEGERS:
        got = getattr(valid_lens, "dtype", type(valid_lens).__name__)
        raise InvalidValue("valid_lens", "a tensor of integers", got)
    if not torch.jit.is_tracing() and tuple(valid_lens.shape) not in ((batch,), (batch, queries)):
        must = f"of shape [batch] = {[batch]} or [batch, queries] = {[batch, queries]}"
        raise InvalidValue("valid_lens", must, list(valid_lens.shape))
    if has_numbers(valid_lens) and valid_lens.numel():
        low, high = (int(x) for x in valid_lens.aminmax())
        if low < 0 or high > keys:
            raise InvalidValue(
                "valid_lens", f"between 0 and the number of keys {keys}", f"{low} to {high}"
            )
    lens = valid_lens.to(device)
    lens = lens[:, None, None, None] if lens.dim() == 1 else lens[:, None, :, None]
    return torch.arange(keys, device=device) < lens


def _checked(mask: Tensor, shape: Shape) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = getattr(mask, "dtype", type(mask).__name__)
        hint = "True may be seen; for a mask of 0 and -inf pass `mask == 0`."
        raise InvalidValue("mask", "a boolean tensor", got, hint)
    full = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    known = not torch.jit.is_tracing()  # whose sizes are tensors
    if len(full) != 4 or (
        known and any(have not in (1, want) for have, want in zip(full, shape, strict=True))
    ):
        must = f"broadcastable to [batch, heads, queries, keys] = {list(shape)}"
        hint = "A mask of [batch, keys] is written mask[:, None, None, :]."
        raise InvalidValue("mask", must, list(mask.shape), hint)
    return mask.reshape(full)
