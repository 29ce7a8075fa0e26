"""Proofs that a module's code computes textbook attention, or puts its heads side by side, for any number of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headprune.core.errors import InvalidValue
from headprune.layouts._once import once
from headprune.layouts._stand_in import agree, linear, stand_in, wave

WIDTH, _MODEL = 3, 5


def is_attention(
    module: nn.Module,
    build: Callable[[int, tuple[nn.Linear, ...]], Any],
    call: Callable[[Any, Tensor, Tensor, Tensor], Any],
    values_are_keys: bool = False,
) -> bool:
    """Whether a module's code is scaled dot-product attention for any number of heads, whatever else it is made of.

    Args:
        module: The module.
        build: Makes the stand-in, given a number of heads and the four projections.
        call: Calls it with queries, keys and values, ``[batch, length, width]``, and returns the same.
        values_are_keys: Whether it takes one input for both.
    """
    q, k, v = wave(2, 4, _MODEL), wave(2, 6, _MODEL, start=1), wave(2, 6, _MODEL, start=2)
    v = k if values_are_keys else v
    for n_heads in (1, 2, 3):
        ways = [linear(_MODEL, n_heads * WIDTH, seed) for seed in range(3)]
        ways.append(linear(n_heads * WIDTH, _MODEL, 3))

        def expected(ways: list[nn.Linear] = ways, n_heads: int = n_heads) -> Tensor:
            split = [
                way(x).unflatten(-1, (n_heads, WIDTH)).transpose(1, 2) for way, x in zip(ways, (q, k, v), strict=False)
            ]
            out: Tensor = ways[3](scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))
            return out

        if not agree(expected, lambda ways=ways, n=n_heads: call(build(n, tuple(ways)), q, k, v)):  # type: ignore[misc]
            return False
    return True


@once
def is_concatenation(module: Any, projection: str) -> bool:
    """Whether a module puts the outputs of its ``heads`` side by side, and through ``projection`` if there is one."""
    x, heads = wave(2, 4, _MODEL), nn.ModuleList(linear(_MODEL, WIDTH, seed) for seed in range(3))
    children: dict[str, nn.Module | None] = {"heads": heads}
    if projection:
        children[projection] = linear(3 * WIDTH, _MODEL, 3)

    def expected() -> Tensor:
        out = torch.cat([head(x) for head in heads], -1)
        return children[projection](out) if projection else out  # type: ignore[misc]

    return agree(expected, lambda: stand_in(module, children).forward(x))


def value_width(heads: nn.ModuleList) -> int:
    """Width of what each head returns, which is that of all its projections.

    Raises:
        InvalidValue: heads that are not of one width.
    """
    widths = {p.shape[0] for head in heads for p in head.parameters() if p.ndim == 2}
    if len(widths) != 1:
        raise InvalidValue("heads", "made of projections to one width", sorted(widths))
    return widths.pop()
