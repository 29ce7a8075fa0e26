"""Scores from gate gradients written out literally: one example, one head, one token, one label at
a time.

Slow on purpose. Gates are hooks of ``tests.reference.scores``; derivatives are finite differences
wherever that is affordable, else the product of a context and its gradient in a batch of one.
Nothing of ``headprune.scoring`` is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.scores import Loss, columns, example, n_examples, projection, times

#: A function of a model and a batch of one.
Function = Callable[[nn.Module, Any], float]


def with_gates(
    model: nn.Module, sites: Any, gates: Sequence[Sequence[float]], run: Callable[[], Any]
) -> Any:
    """Runs with one gate for every head of every site."""
    with ExitStack() as stack:
        for site, row in zip(sites, gates, strict=True):
            for head, gate in zip(site.heads, row, strict=True):
                if gate != 1:
                    stack.enter_context(times(model, site, [head], gate))
        return run()


def all_gates(sites: Any, at: float) -> list[list[float]]:
    return [[at] * len(site.heads) for site in sites]


def units_of(sites: Any) -> list[tuple[int, list[int]]]:
    """Every unit as the number of its site and its heads' positions."""
    return [
        (s, [site.heads.index(h) for h in unit])
        for s, site in enumerate(sites)
        for unit in site.units
    ]


def moved(gates: list[list[float]], unit: tuple[int, list[int]], step: float) -> list[list[float]]:
    site, positions = unit
    copy = [list(row) for row in gates]
    for position in positions:
        copy[site][position] += step
    return copy


def contexts(
    model: nn.Module, one: Any, loss: Loss, sites: Any, backward: bool = True
) -> list[Tensor]:
    """What every output projection read, with its gradient."""
    read: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            read[name] = args[0]
            if backward:
                args[0].retain_grad()

        return note

    handles = [projection(model, s).register_forward_pre_hook(keep(s.name)) for s in sites]
    model.zero_grad()
    try:
        losses = loss(model, one)
        if backward:
            losses.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return [read[s.name] for s in sites]


def alone(model: nn.Module, batch: Any, loss: Loss, sites: Any) -> list[list[float]]:
    """``[examples][units]``: signed ``sum_t sum_h <ctx, dl/dctx>`` over a unit's heads, one example
    a batch."""
    rows = []
    for number in range(n_examples(batch)):
        row = []
        for site, x in zip(
            sites, contexts(model, example(batch, number), loss, sites), strict=True
        ):
            assert x.grad is not None
            for unit in site.units:
                parts = [
                    float(
                        torch.dot(
                            x.detach()[0, t, columns(site, h)], x.grad[0, t, columns(site, h)]
                        )
                    )
                    for h in unit
                    for t in range(x.shape[1])
                ]
                row.append(math.fsum(parts))
        rows.append(row)
    return rows


def fisher_matrix(gradients: Sequence[Sequence[float]], block: int = 1) -> list[list[float]]:
    """``mean over blocks of g g'`` with ``g`` the mean gradient of a block of examples."""
    n_units = len(gradients[0])
    means = []
    for start in range(0, len(gradients), block):
        rows = gradients[start : start + block]
        means.append([math.fsum(row[u] for row in rows) / len(rows) for u in range(n_units)])
    return [
        [math.fsum(m[h] * m[k] for m in means) / len(means) for k in range(n_units)]
        for h in range(n_units)
    ]


def taylor2(gradients: Sequence[Sequence[float]]) -> list[float]:
    n = len(gradients)
    return [
        math.fsum(row[u] ** 2 / 2 - row[u] for row in gradients) / n
        for u in range(len(gradients[0]))
    ]


def hessian(
    model: nn.Module,
    one: Any,
    function: Function,
    sites: Any,
    diagonal: bool = False,
    step: float = 1e-3,
) -> list[list[float]]:
    """Second derivatives with respect to the units' gates at 1, by differences of a function with a
    minimum there."""
    units = units_of(sites)

    def at(*moves: tuple[tuple[int, list[int]], float]) -> float:
        gates = all_gates(sites, 1.0)
        for unit, by in moves:
            gates = moved(gates, unit, by)
        result: float = with_gates(model, sites, gates, lambda: function(model, one))
        return result

    middle = at()
    found = [[0.0] * len(units) for _ in units]
    for h, unit in enumerate(units):
        found[h][h] = (at((unit, step)) - 2 * middle + at((unit, -step))) / step**2
        for k in range(0 if diagonal else h):
            ends = [
                a * b * at((unit, a * step), (units[k], b * step)) for a in (1, -1) for b in (1, -1)
            ]
            found[h][k] = found[k][h] = math.fsum(ends) / (4 * step**2)
    return found


def divergence(logits: Callable[[nn.Module, Any], Tensor], whole: Tensor) -> Function:
    """``KL(p_full || p_m)``, the mean over positions; logits are ``[positions, classes]``."""

    def of(model: nn.Module, one: Any) -> float:
        with torch.no_grad():
            log_p, log_q = whole.log_softmax(-1), logits(model, one).log_softmax(-1)
        rows = []
        for p, q in zip(log_p.tolist(), log_q.tolist(), strict=True):
            rows.append(
                math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True) if a > -math.inf)
            )
        return math.fsum(rows) / len(rows)

    return of


def bernoulli_divergence(logits: Callable[[nn.Module, Any], Tensor], whole: Tensor) -> Function:
    """The mean over outputs of the divergences of two answers, yes and no."""

    def of(model: nn.Module, one: Any) -> float:
        with torch.no_grad():
            p = whole.sigmoid().flatten().tolist()
            q = logits(model, one).sigmoid().flatten().tolist()
        each = [
            a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))
            for a, b in zip(p, q, strict=True)
        ]
        return math.fsum(each) / len(each)

    return of


def squared_difference(outputs: Callable[[nn.Module, Any], Tensor], whole: Tensor) -> Function:
    """The mean over outputs of ``(output - full output) ** 2``."""

    def of(model: nn.Module, one: Any) -> float:
        with torch.no_grad():
            found = outputs(model, one).flatten().tolist()
        return math.fsum(
            (a - b) ** 2 for a, b in zip(found, whole.flatten().tolist(), strict=True)
        ) / len(found)

    return of


def patched(
    model: nn.Module, batch: Any, loss: Loss, sites: Any, base: Callable[[int, int, int], Tensor]
) -> list[list[float]]:
    """``[examples][units]``: ``sum_t <base - ctx, dl/dctx>``.

    Args:
        model: The model.
        batch: The batch.
        loss: The loss.
        sites: The sites.
        base: ``(example, number of the site, token) -> [width of the projection's input]``.
    """
    rows = []
    for number in range(n_examples(batch)):
        row = []
        for s, (site, x) in enumerate(
            zip(sites, contexts(model, example(batch, number), loss, sites), strict=True)
        ):
            assert x.grad is not None
            for unit in site.units:
                parts = []
                for t in range(x.shape[1]):
                    for h in unit:
                        place = columns(site, h)
                        parts.append(
                            float(
                                torch.dot(
                                    base(number, s, t)[place] - x.detach()[0, t, place],
                                    x.grad[0, t, place],
                                )
                            )
                        )
                row.append(math.fsum(parts))
        rows.append(row)
    return rows
