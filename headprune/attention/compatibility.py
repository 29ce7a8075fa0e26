"""How well a query and a key fit: the function f of multi-head attention, given as a value.

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
    """Anything that can be called as ``compatibility(query, key, heads)`` and returns one number a
    pair.

    It is called once a forward pass with all present heads side by side; masks, softmax and dropout
    follow. An ``nn.Module`` becomes a submodule, so its parameters train and are saved.

    Shapes: ``query [batch, heads, queries, head_dim]``, ``key [batch, heads, keys, head_dim]``
    (already repeated for grouped queries) to finite numbers ``[batch, heads, queries, keys]``.
    ``heads`` are the ORIGINAL indices of the present heads: a table with one row a head, indexed
    with them, stays right after heads are pruned. With a KV cache there are more keys than queries;
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
    """``a(q, k) = scale · qᵀk``; Vaswani et al. 2017, section 3.2.1. The fast path knows it.

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

    The paper's two matrices before the tanh are the heads' own W_q and W_k. Because w belongs to f
    and not to a head, pruning leaves it whole. Needs memory for
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
        self.weight = nn.Parameter(
            torch.empty(head_dim, device=device, dtype=dtype).uniform_(-bound, bound)
        )

    def forward(self, query: Tensor, key: Tensor, heads: tuple[int, ...]) -> Tensor:
        return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ self.weight


_NAMES = ("scaled_dot_product", "additive")


def resolve_compatibility(
    value: str | Callable[..., Tensor],
    head_dim: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[..., Tensor]:
    """A compatibility function by name, or the callable that was given.

    Raises:
        UnknownName: a name that is not known.
        InvalidValue: neither a name nor a callable.

    >>> resolve_compatibility("scaled_dot_product", 4)
    ScaledDotProduct(scale=None)
    """
    if isinstance(value, str):
        if value not in _NAMES:
            raise UnknownName(
                "compatibility",
                "a known name or a callable",
                repr(value),
                did_you_mean(value, _NAMES),
            )
        return (
            ScaledDotProduct()
            if value == "scaled_dot_product"
            else Additive(head_dim, device, dtype)
        )
    if not callable(value) or isinstance(value, type):
        hint = "See headprune.attention.Compatibility for what is called with what."
        raise InvalidValue(
            "compatibility", "a name or a callable (query, key, heads) -> Tensor", repr(value), hint
        )
    return value
