"""Gates that ask for their gradient, and gradients with respect to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.gating.learned import unit_of_heads
from headprune.model.running import batch_size, device_of
from headprune.model.sites import BoundSite
from headprune.model.transfers import sent
from headprune.scoring._base import ScoringProblem, units_per_site

#: ``weights [examples] -> [[examples, ...]]``: gradients of the weighted sum of the examples'
#: numbers, one tensor per site.
Slopes: TypeAlias = Callable[[Tensor], list[Tensor]]


class _UnitIndex:
    """By site the unit of each head, on the site's device; shared by the scorers of a call."""

    def __init__(self) -> None:
        self.of_site: dict[str, Tensor] = {}


def n_units(problem: ScoringProblem) -> int:
    """Units of all sites."""
    return sum(units_per_site(problem.bound))


def gate_shapes(problem: ScoringProblem, batch: Any) -> list[tuple[int, ...]]:
    """``(examples, heads)`` for every site: each example has gates of its own."""
    size = batch_size(batch)
    return [(size, len(b.site.heads)) for b in problem.bound]


def gate_dtype(b: BoundSite) -> torch.dtype:
    """The type of a site's gates: that of its weights, but at least fp32."""
    weight = next(b.module.parameters())
    return torch.promote_types(weight.dtype, torch.float32)


def open_gates(
    problem: ScoringProblem, shapes: Sequence[tuple[int, ...]], at: float = 1.0
) -> dict[str, Tensor]:
    """Gates that ask for their gradient, by site.

    The graph begins at the first of them, because weights are frozen.

    Args:
        problem: The problem.
        shapes: The shape of every site's gates.
        at: Their value.
    """
    # In fp32 at least: gradients of 16 bits would lose digits.
    gates = {}
    for b, shape in zip(problem.bound, shapes, strict=True):
        gate = torch.full(shape, at, device=device_of(b.module), dtype=gate_dtype(b))
        gates[b.site.name] = gate.requires_grad_()
    return gates


def slopes_of(numbers: Tensor, inputs: Sequence[Tensor]) -> Slopes:
    """Gradients of weighted sums of ``numbers`` ``[examples]`` with respect to ``inputs``, whose
    first axis is the examples."""

    def slopes(weights: Tensor) -> list[Tensor]:
        # The graph is kept: the caller asks again with other weights.
        gradients = torch.autograd.grad(
            numbers, inputs, weights, retain_graph=True, allow_unused=True
        )
        return [_or_zeros(g, x) for x, g in zip(inputs, gradients, strict=True)]

    return slopes


def gate_slopes(
    problem: ScoringProblem,
    total: Tensor,
    gates: Mapping[str, Tensor],
    what: str = "the loss",
    keep_graph: bool = False,
) -> list[Tensor]:
    """Gradients of a number with respect to the gates of ``open_gates``, one per site; see
    ``gradients_of``."""
    inputs = [[gate] for gate in gates.values()]
    gradients = gradients_of(problem, total, inputs, what, keep_graph)
    return [of_site[0] for of_site in gradients]


def gradients_of(
    problem: ScoringProblem,
    total: Tensor,
    inputs: Sequence[Sequence[Tensor]],
    what: str = "the loss",
    keep_graph: bool = False,
) -> list[list[Tensor]]:
    """Gradients of a number with respect to tensors of every site, in the order of the sites.

    Args:
        problem: The problem.
        total: A sum over examples.
        inputs: For every site, tensors that ask for their gradient: its gate, or what it read
            whenever it ran.
        what: What the number is made of, for messages.
        keep_graph: Whether another number of the same graph follows.

    Raises:
        InvalidValue: the number has no graph, or does not depend on a site.
    """
    # Gates ask for a gradient, so that a loss without a graph was cut off from the model.
    if not total.requires_grad:
        must = "computed by the model with gradients"
        hint = "Remove detach(), no_grad() and inference_mode()."
        raise InvalidValue(what, must, "a tensor without a gradient", hint)
    flat = list(chain.from_iterable(inputs))
    # One backward pass for the tensors of all sites.
    remaining = iter(torch.autograd.grad(total, flat, allow_unused=True, retain_graph=keep_graph))
    gradients = []
    for b, of_site in zip(problem.bound, inputs, strict=True):
        of_inputs = list(islice(remaining, len(of_site)))
        # A site without heads has no gate on the way to the loss.
        if b.site.heads and all(gradient is None for gradient in of_inputs):
            must = f"one that depends on {b.site.name}"
            hint = "Leave this site out with sites=, or use a loss that depends on it."
            raise InvalidValue(what, must, "no dependence on it", hint)
        gradients.append([_or_zeros(g, x) for x, g in zip(of_site, of_inputs, strict=True)])
    return gradients


def _or_zeros(gradient: Tensor | None, x: Tensor) -> Tensor:
    """The gradient with respect to ``x``; zeros where nothing depends on it."""
    return torch.zeros_like(x) if gradient is None else gradient


def by_unit(problem: ScoringProblem, gradients: Sequence[Tensor]) -> Tensor:
    """``[..., units]`` of all sites side by side, from one tensor ``[..., heads]`` per site."""
    sites = zip(problem.bound, gradients, strict=True)
    return torch.cat([site_by_unit(problem, b, heads) for b, heads in sites], -1)


def site_by_unit(problem: ScoringProblem, b: BoundSite, gradient: Tensor) -> Tensor:
    """``[..., units]`` of one site, from ``[..., heads]``.

    The gradient of a unit is the sum over its heads: heads that share a key/value head are gated
    together.
    """
    # The usual case, one head per unit, in the order of the heads.
    units = b.site.units
    if units == tuple((head,) for head in b.site.heads):
        return gradient
    # Sent once per site: every transfer waits for the accelerator.
    index = problem.shared.of(_UnitIndex).of_site
    if b.site.name not in index:
        index[b.site.name] = sent(unit_of_heads(b), gradient.device)
    sums = gradient.new_zeros(*gradient.shape[:-1], len(units))
    sums.index_add_(-1, index[b.site.name], gradient)
    return sums
