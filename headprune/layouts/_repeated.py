"""Run grouped queries in groups of different sizes; the cache stays compact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.attend import repeated
from headprune.core.mixin import Mixin, mix_in, mix_out


class Repeated(Mixin, nn.Module):
    """Put in front of an attention class: repeat each key/value head for its query heads.

    The module gets a cache that stores the compact heads and returns the repeated ones. So the
    heads are repeated after rotation, norms and cache, and before whichever attention kernel is
    set. The kernel sees one key head per query head.
    """

    headprune_repeats: tuple[int, ...]

    def forward(
        self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        cache = _RepeatingCache(past_key_values, self.headprune_repeats)
        return super().forward(hidden_states, *args, past_key_values=cache, **kwargs)


class Split(Mixin, nn.Module):
    """Put in front of Falcon's attention class: repeat heads when it splits its projection."""

    headprune_repeats: tuple[int, ...]

    def _split_heads(self, fused: Tensor) -> tuple[Tensor, ...]:
        heads = fused.unflatten(-1, (-1, self.head_dim))  # [batch, length, rows, head_dim]
        # Each group has its query heads, then one key and one value.
        groups = heads.split([n + 2 for n in self.headprune_repeats], 2)
        queries, keys, values = [], [], []
        for group, n in zip(groups, self.headprune_repeats, strict=True):
            queries.append(group[:, :, :n])
            keys.append(group[:, :, n].unsqueeze(2).expand(-1, -1, n, -1))
            values.append(group[:, :, n + 1].unsqueeze(2).expand(-1, -1, n, -1))
        # Each [batch, length, query heads, head_dim].
        return torch.cat(queries, 2), torch.cat(keys, 2), torch.cat(values, 2)


class _RepeatingCache:
    """A cache, or None, whose ``update`` repeats the heads that it returns."""

    def __init__(self, cache: Any, repeats: tuple[int, ...]) -> None:
        self.cache = cache
        self.repeats = repeats

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.cache is not None:
            keys, values = self.cache.update(keys, values, *args, **kwargs)
        return repeated(keys, self.repeats), repeated(values, self.repeats)

    def get_seq_length(self, *args: Any) -> Any:
        return 0 if self.cache is None else self.cache.get_seq_length(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def repeat_(module: Any, repeats: tuple[int, ...] | None, mixin: type[Mixin] = Repeated) -> None:
    """Let a module repeat its key/value heads in place.

    Args:
        module: The attention module.
        repeats: Query heads per key/value head; None takes the mixin out again.
        mixin: The class to put in front.
    """
    if repeats is not None:
        mix_in(module, mixin)
        module.headprune_repeats = repeats
    elif mixin in getattr(type(module), "headprune_mixins", ()):
        # A second cut may make the groups even again.
        mix_out(module, mixin)
        del module.headprune_repeats
