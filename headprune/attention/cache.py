"""The keys and values that a decoder has already seen."""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue


class Cache(Protocol):
    """The methods of a cache that ``MultiHeadAttention`` uses; see ``KVCache``."""

    @property
    def length(self) -> int:
        """Positions held."""
        ...

    def append_(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add one step and return all keys and values so far."""
        ...


@final
class KVCache:
    """Keys and values of earlier steps, for one attention module.

    Pass the same cache to every call; each call's keys and values are appended, and its queries see
    all of them. Grouped heads are stored once.

    >>> from headprune.attention import MultiHeadAttention
    >>> attention, cache = MultiHeadAttention(8, 2).eval(), KVCache()
    >>> x = torch.randn(1, 3, 8)
    >>> steps = [attention(x[:, t : t + 1], causal=True, cache=cache) for t in range(3)]
    >>> torch.allclose(torch.cat(steps, 1), attention(x, causal=True), atol=1e-6), cache.length
    (True, 3)
    """

    def __init__(self) -> None:
        #: ``[batch, kv_heads, keys, head_dim]``, None before the first step.
        self.keys: Tensor | None = None
        #: ``[batch, kv_heads, keys, value_dim]``, None before the first step.
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of positions; they are counted even if the module has no heads."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append_(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add one step and return all keys and values so far.

        Raises:
            InvalidValue: another batch size or number of heads.
        """
        if self.keys is not None and keys.shape[:2] != self.keys.shape[:2]:
            held = f"of the cached batch size and key/value heads {tuple(self.keys.shape[:2])}"
            hint = "Start a new KVCache for new examples and after heads were pruned."
            raise InvalidValue("the step", held, tuple(keys.shape[:2]), hint)
        if self.keys is not None and self.values is not None:
            # [batch, kv_heads, keys, width]: positions are appended.
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys = keys
        self.values = values
        return keys, values
