"""Head scores written out literally: one example, one head, one token at a time; oracles, slow on
purpose.

Gates are put on by a hook on the output projection's input here, so that nothing of
``headprune.gating`` is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.heads import AttentionSite
from headprune.layouts import registry

Loss = Callable[[nn.Module, Any], Tensor]


def example(batch: dict[str, Any], number: int) -> dict[str, Any]:
    """A batch of one."""
    return {k: v[number : number + 1] for k, v in batch.items()}


def n_examples(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))


def projection(model: nn.Module, site: AttentionSite) -> Any:
    return model.get_submodule(site.name).get_submodule(registry.get(site.layout).gate)


def columns(site: AttentionSite, head: int) -> slice:
    """Where a head (original index) lies in the output projection's input."""
    position = site.heads.index(head)
    return slice(position * site.value_dim, (position + 1) * site.value_dim)


@contextmanager
def times(
    model: nn.Module, site: AttentionSite, heads: Sequence[int], factor: float
) -> Iterator[None]:
    """Multiplies some heads of one site."""

    def scale(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0].clone()
        for head in heads:
            x[..., columns(site, head)] *= factor
        return (x, *args[1:])

    handle = projection(model, site).register_forward_pre_hook(scale)
    try:
        yield
    finally:
        handle.remove()


def value(model: nn.Module, batch: dict[str, Any], loss: Loss) -> float:
    """The loss of a batch of one."""
    with torch.no_grad():
        losses = loss(model, batch)
    assert losses.shape == (1,)
    return float(losses[0])


def central_differences(
    model: nn.Module, batch: dict[str, Any], loss: Loss, sites: Any, step: float
) -> Tensor:
    """``[examples, heads]``: ``(l(m_h = 1 + step) - l(m_h = 1 - step)) / 2 step``."""
    rows = []
    for number in range(n_examples(batch)):
        one, row = example(batch, number), []
        for site in sites:
            for head in site.heads:
                ends = []
                for factor in (1 + step, 1 - step):
                    with times(model, site, [head], factor):
                        ends.append(value(model, one, loss))
                row.append((ends[0] - ends[1]) / (2 * step))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def by_unit(per_head: Tensor, sites: Any) -> Tensor:
    """Sums heads that go together; the last axis is heads before and units after."""
    parts, start = [], 0
    for site in sites:
        parts += [
            sum(per_head[..., start + site.heads.index(h)] for h in unit) for unit in site.units
        ]
        start += len(site.heads)
    return torch.stack(parts, -1)


def _backward(model: nn.Module, one: dict[str, Any], loss: Loss, sites: Any) -> list[Tensor]:
    """Runs one example backwards; the output projections' inputs, with their gradients."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            args[0].retain_grad()
            inputs[name] = args[0]

        return note

    handles = [projection(model, s).register_forward_pre_hook(keep(s.name)) for s in sites]
    model.zero_grad()
    try:
        loss(model, one).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return [inputs[s.name] for s in sites]


def context_route(model: nn.Module, batch: dict[str, Any], loss: Loss, sites: Any) -> Tensor:
    """``[examples, tokens, heads]``: ``<ctx_h, dl/dctx_h>`` at every token; all sites have the same
    tokens."""
    rows = []
    for number in range(n_examples(batch)):
        contexts = _backward(model, example(batch, number), loss, sites)
        row = [
            [
                float(
                    torch.dot(
                        x[0, token, columns(site, head)].detach(),
                        x.grad[0, token, columns(site, head)],
                    )
                )
                for site, x in zip(sites, contexts, strict=True)
                for head in site.heads
            ]
            for token in range(contexts[0].shape[1])
        ]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def weight_route(model: nn.Module, batch: dict[str, Any], loss: Loss, sites: Any) -> Tensor:
    """``[examples, heads]``: ``sum W_O[:, h] * dl/dW_O[:, h]``."""
    rows = []
    for number in range(n_examples(batch)):
        _backward(model, example(batch, number), loss, sites)
        row = []
        for site in sites:
            weight = projection(model, site).weight
            product = weight.detach() * weight.grad
            if hasattr(projection(model, site), "nf"):  # Conv1D keeps [in, out]
                product = product.T
            row += [float(product[:, columns(site, head)].sum()) for head in site.heads]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def leave_one_out(
    model: nn.Module, batch: dict[str, Any], loss: Loss, sites: Any
) -> list[list[float]]:
    """``[examples][units]``: how much each example's loss rises without each unit."""
    rows = []
    for number in range(n_examples(batch)):
        one, row = example(batch, number), []
        whole = value(model, one, loss)
        for site in sites:
            for unit in site.units:
                with times(model, site, unit, 0.0):
                    row.append(value(model, one, loss) - whole)
        rows.append(row)
    return rows


def mean_and_error(samples: Sequence[Sequence[float]]) -> tuple[list[float], list[float] | None]:
    """Mean of every column, and ``sqrt(sum (x - mean)^2 / (n - 1)) / sqrt(n)``."""
    n, means, errors = len(samples), [], []
    for unit in range(len(samples[0])):
        column = [row[unit] for row in samples]
        mean = math.fsum(column) / n
        means.append(mean)
        if n > 1:
            errors.append(
                math.sqrt(math.fsum((x - mean) ** 2 for x in column) / (n - 1)) / math.sqrt(n)
            )
    return means, errors or None


def taylor(
    gradients: Tensor,
    token_gradients: Tensor,
    sizes: Sequence[int],
    reduce: str,
    normalize: str,
    block: int,
) -> tuple[list[float], list[float] | None]:
    """Taylor scores and their standard errors.

    Args:
        gradients: ``[examples, units]``.
        token_gradients: ``[examples, tokens, units]``.
        sizes: Units of each layer.
        reduce: ``example``, ``token``, ``batch`` or ``signed``.
        normalize: ``none`` or ``l2``.
        block: Examples a block.
    """
    matrix = gradients.tolist()
    samples: list[list[float]] = []
    if reduce == "batch":
        for start in range(0, len(matrix), block):
            rows = matrix[start : start + block]
            samples.append(
                [abs(math.fsum(row[u] for row in rows) / len(rows)) for u in range(len(matrix[0]))]
            )
    elif reduce == "token":
        for_each = token_gradients.tolist()
        samples = [
            [math.fsum(abs(row[u]) for row in tokens) for u in range(len(matrix[0]))]
            for tokens in for_each
        ]
    else:
        samples = [[abs(g) if reduce == "example" else -g for g in row] for row in matrix]
    values, errors = mean_and_error(samples)
    if normalize == "l2":
        start = 0
        for size in sizes:
            norm = math.sqrt(math.fsum(v * v for v in values[start : start + size]))
            for unit in range(start, start + size):
                values[unit] /= norm
                if errors is not None:
                    errors[unit] /= norm
            start += size
    return values, errors
