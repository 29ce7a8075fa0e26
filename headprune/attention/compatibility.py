"""How well a query and a key fit: the function a(q, k) of attention, as a callable.

(The literature says *scoring function*; in this library *score* is the importance of a head.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean


class Compatibility(Protocol):
    """A callable ``compatibility(query, key, heads)`` that returns one number per pair.

    It is called once per forward pass with all present heads; masks, softmax and dropout follow. An
    ``nn.Module`` becomes a submodule, so its parameters train and are saved.

    Shapes: ``query [batch, heads, queries, head_dim]``, ``key [batch, heads, keys, head_dim]``
    (already repeated for grouped queries) to finite numbers ``[batch, heads, queries, keys]``.
    ``heads`` are the ORIGINAL indices of the present heads, so a table with one row per head,
    indexed with them, stays right after pruning. With a KV cache there are more keys than queries;
    query ``i`` has the position ``keys - queries + i``.

    >>> def nearer_is_better(query, key, heads):
    ...     i = torch.arange(query.shape[-2])[:, None] + key.shape[-2] - query.shape[-2]
    ...     distance = (i - torch.arange(key.shape[-2])).abs()
    ...     slope = 2.0 ** -torch.tensor(heads)[:, None, None]
    ...     return query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5 - slope * distance
    >>> nearer_is_better(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), (0, 5))[0, 0, 2]
    tensor([-2., -1.,  0.])
    """

    def __call__(self, query: Tensor, key: Tensor, heads: tuple[int, ...], /) -> Tensor: ...


@final
@dataclass(frozen=True)
class ScaledDotProduct:
    """``a(q, k) = scale · qᵀk``; Vaswani et al. 2017, section 3.2.1. It runs on fused kernels.

    Args:
        scale: None is ``1 / sqrt(head_dim)``.
    """

    scale: float | None = None

    def __call__(self, query: Tensor, key: Tensor, heads: tuple[int, ...]) -> Tensor:
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        return (query * scale) @ key.transpose(-2, -1)


@final
class Additive(nn.Module):
    """``a(q, k) = wᵀ tanh(q + k)``, one ``w`` for all heads; Bahdanau et al. 2015, appendix A.1.2.

    The paper's two matrices before the tanh are the heads' own W_q and W_k. Pruning does not change
    w, because it belongs to no head. Needs memory for
    ``[batch, heads, queries, keys, head_dim]``.

    Args:
        head_dim: Width of a query or key head.
    """

    def __init__(
        self,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        bound = 1 / math.sqrt(head_dim)
        weight = torch.empty(head_dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight.uniform_(-bound, bound))

    def forward(self, query: Tensor, key: Tensor, heads: tuple[int, ...]) -> Tensor:
        # [batch, heads, queries, keys, head_dim]
        pairs = query.unsqueeze(-2) + key.unsqueeze(-3)
        return torch.tanh(pairs) @ self.weight


_NAMES = ("scaled_dot_product", "additive")


def resolve_compatibility(
    value: str | Callable[..., Tensor],
    head_dim: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[..., Tensor]:
    """Return a compatibility function by its name, or the given callable.

    Raises:
        UnknownName: a name that is not known.
        InvalidValue: neither a name nor a callable.

    >>> resolve_compatibility("scaled_dot_product", 4)
    ScaledDotProduct(scale=None)
    """
    if isinstance(value, str):
        if value == "scaled_dot_product":
            return ScaledDotProduct()
        if value == "additive":
            return Additive(head_dim, device, dtype)
        must = "a known name or a callable"
        hint = did_you_mean(value, _NAMES)
        raise UnknownName("compatibility", must, repr(value), hint)
    # A class is callable too, but its instances are meant.
    if not callable(value) or isinstance(value, type):
        must = "a name or a callable (query, key, heads) -> Tensor"
        hint = "See headprune.attention.Compatibility for its arguments."
        raise InvalidValue("compatibility", must, repr(value), hint)
    return value
