"""Ablations and Shapley values written out literally: every coalition, every order; oracles, slow
on purpose."""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.scores import Loss, columns, example, n_examples, projection, times, value


def units_of(sites: Any) -> list[tuple[Any, tuple[int, ...]]]:
    return [(site, unit) for site in sites for unit in site.units]


def worth(
    model: nn.Module, batch: dict[str, Any], loss: Loss, sites: Any, opened: set[int]
) -> list[float]:
    """``v`` of a set of units, for every example: minus the loss when only those are open."""
    found = []
    for number in range(n_examples(batch)):
        with ExitStack() as stack:
            for index, (site, unit) in enumerate(units_of(sites)):
                if index not in opened:
                    stack.enter_context(times(model, site, unit, 0.0))
            found.append(-value(model, example(batch, number), loss))
    return found


def coalitions(
    model: nn.Module, batch: dict[str, Any], loss: Loss, sites: Any
) -> dict[frozenset[int], list[float]]:
    """``v`` of every set of units, for every example."""
    n = len(units_of(sites))
    sets = (set(s) for size in range(n + 1) for s in itertools.combinations(range(n), size))
    return {frozenset(s): worth(model, batch, loss, sites, s) for s in sets}


def shapley(v: dict[frozenset[int], list[float]]) -> Tensor:
    """``[examples, units]``: ``sum_S |S|! (n - |S| - 1)! / n! (v(S + h) - v(S))``."""
    everyone = max(v, key=len)
    n, count = len(everyone), len(v[everyone])
    shares = torch.zeros(count, n, dtype=torch.float64)
    for s in v:
        weight = (
            math.factorial(len(s)) * math.factorial(n - len(s) - 1) / math.factorial(n)
            if len(s) < n
            else 0.0
        )
        for h in everyone - s:
            for i in range(count):
                shares[i, h] += weight * (v[s | {h}][i] - v[s][i])
    return shares


def in_place_of(
    model: nn.Module,
    one: dict[str, Any],
    loss: Loss,
    site: Any,
    unit: tuple[int, ...],
    stand: Tensor,
) -> float:
    """The loss of one example when a unit's outputs are replaced by ``stand``,
    ``[tokens or 1, heads * width]``."""

    def swap(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0].clone()
        for head in unit:
            for token in range(x.shape[1]):
                x[0, token, columns(site, head)] = stand[token % len(stand), columns(site, head)]
        return (x, *args[1:])

    handle = projection(model, site).register_forward_pre_hook(swap)
    try:
        return value(model, one, loss)
    finally:
        handle.remove()


def contexts(
    model: nn.Module, batch: dict[str, Any], loss: Loss, site: Any, mask: Tensor | None
) -> list[Tensor]:
    """What a site's output projection reads, ``[tokens, heads * width]`` an example, without
    padding."""
    found: list[Tensor] = []
    handle = projection(model, site).register_forward_pre_hook(
        lambda m, args: found.append(args[0][0].detach())
    )
    try:
        for number in range(n_examples(batch)):
            value(model, example(batch, number), loss)
    finally:
        handle.remove()
    return found if mask is None else [x[m.bool()] for x, m in zip(found, mask, strict=True)]
