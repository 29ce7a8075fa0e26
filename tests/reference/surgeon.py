"""Greedy removal of heads by predicted loss: one example a pass, every set of heads solved from
scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: What an output projection read and the slopes at its output, rows of tokens that count: one pair
#: a target.
Tokens = list[tuple[np.ndarray, list[np.ndarray]]]


def tokens(
    projections: Sequence[nn.Module],
    examples: Iterable[Any],
    targets: Callable[[Any], list[Tensor]],
    counted: Callable[[Any], Tensor],
) -> tuple[list[Tokens], int]:
    """By projection and example what it read, and the slopes of every target at what it put out."""
    found: list[Tokens] = [[] for _ in projections]
    n = 0
    for example in examples:
        n += 1
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        handles = [
            p.register_forward_hook(_keeping(number, seen)) for number, p in enumerate(projections)
        ]
        with torch.enable_grad():
            numbers = targets(example)
        here = counted(example)
        for number in range(len(projections)):
            x, out = seen[number]
            slopes = [
                torch.autograd.grad(t, out, retain_graph=True)[0][0][here].numpy() for t in numbers
            ]
            found[number].append((x[0][here].numpy(), slopes))
        for handle in handles:
            handle.remove()
    return found, n


def _keeping(number: int, seen: dict[int, tuple[Tensor, Tensor]]) -> Any:
    def keep(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        seen[number] = (
            args[0].detach(),
            out if out.requires_grad else out.detach().requires_grad_(),
        )
        return seen[number][1]

    return keep


def prices(
    weights: Sequence[np.ndarray],
    found: Sequence[Tokens],
    n: int,
    units: Sequence[Sequence[Sequence[int]]],
    ridge: float = 1e-2,
) -> list[list[float]]:
    """What the loss rises by at each removal, the cheapest of all sites first; ``units`` are lists
    of columns."""
    sites = [
        (_read(w, of_site, ridge), _wrote(of_site, n))
        for w, of_site in zip(weights, found, strict=True)
    ]
    gone: list[list[int]] = [[] for _ in units]
    rise = [0.0 for _ in units]
    result: list[dict[int, float]] = [{} for _ in units]
    highest = 0.0
    while any(len(g) < len(u) for g, u in zip(gone, units, strict=True)):
        best: tuple[float, int, int] | None = None
        for site, of_site in enumerate(units):
            for unit in range(len(of_site)):
                if unit in gone[site]:
                    continue
                columns = [c for u in (*gone[site], unit) for c in of_site[u]]
                price = _rise(weights[site], *sites[site], columns) - rise[site]
                if best is None or (price, site, unit) < best:
                    best = (price, site, unit)
        assert best is not None
        price, site, unit = best
        gone[site].append(unit)
        rise[site] += price
        highest = max(price, highest)
        result[site][unit] = highest
    return [[by_unit[u] for u in sorted(by_unit)] for by_unit in result]


def _wrote(of_site: Tokens, n: int) -> np.ndarray:
    """The slopes' products at the output, mean over examples."""
    slopes = [
        np.concatenate([s[target] for _, s in of_site]) for target in range(len(of_site[0][1]))
    ]
    return np.sum([g.T @ g for g in slopes], axis=0) / n


def _read(weight: np.ndarray, of_site: Tokens, ridge: float) -> np.ndarray:
    """The damped covariance of what was read: tokens weigh by ``|W' g|^2``."""
    x = np.concatenate([x for x, _ in of_site])
    slopes = [
        np.concatenate([s[target] for _, s in of_site]) for target in range(len(of_site[0][1]))
    ]
    w = np.sum([np.square(g @ weight).sum(1) for g in slopes], axis=0)
    centred = x - np.average(x, axis=0, weights=w)
    a = (centred * w[:, None]).T @ centred / w.sum()
    return a + ridge * np.trace(a) / len(a) * np.eye(len(a))


def _rise(weight: np.ndarray, a: np.ndarray, m: np.ndarray, columns: Sequence[int]) -> float:
    """``min over V, V without the columns, of 1/2 tr(M (W - V) A (W - V)')``."""
    left = [c for c in range(weight.shape[1]) if c not in columns]
    change = np.zeros_like(weight)  # W - V
    change[:, columns] = weight[:, columns]
    if left:
        change[:, left] = -np.linalg.solve(
            a[np.ix_(left, left)], a[np.ix_(left, columns)] @ weight[:, columns].T
        ).T
    return float(np.trace(m @ change @ a @ change.T) / 2)
