"""Grouped queries in groups of unlike size: keys and values stay compact in the cache and are
repeated after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.attend import repeated
from headprune.core.mixin import Mixin, mix_in, mix_out


class Repeated(Mixin, nn.Module):
    """Put in front of an attention class: every key/value head is repeated for each query head that
    reads it.

    The module sees a cache that stores the compact heads and returns the repeated ones. So this
    comes after rotation, norms and cache and before any attention kernel, whichever is set; the
    kernels see one key head a query head.
    """

    headprune_repeats: tuple[int, ...]

    def forward(
        self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        cache = _Repeating(past_key_values, self.headprune_repeats)
        return super().forward(hidden_states, *args, past_key_values=cache, **kwargs)


class Split(Mixin, nn.Module):
    """Put in front of Falcon's attention class, which repeats keys and values when it splits its
    fused projection."""

    headprune_repeats: tuple[int, ...]

    def _split_heads(self, fused: Tensor) -> tuple[Tensor, ...]:
        heads = fused.unflatten(
            -1, (-1, self.head_dim)
        )  # of every group its queries, a key and a value
        groups = heads.split([n + 2 for n in self.headprune_repeats], 2)
        sizes = list(zip(groups, self.headprune_repeats, strict=True))
        queries = [group[:, :, :n] for group, n in sizes]
        keys, values = (
            [group[:, :, n + i].unsqueeze(2).expand(-1, -1, n, -1) for group, n in sizes]
            for i in (0, 1)
        )
        return torch.cat(queries, 2), torch.cat(keys, 2), torch.cat(values, 2)


class _Repeating:
    """A cache, or none, whose ``update`` repeats the heads in what it returns."""

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
    """Puts ``mixin`` in front of ``module``; with None, for groups of one size, takes it away where
    it is."""
    if repeats is not None:
        mix_in(module, mixin)
        module.headprune_repeats = repeats
    elif mixin in getattr(type(module), "headprune_mixins", ()):
        mix_out(module, mixin)
        del module.headprune_repeats
