"""The exact matrix of gate gradients: dl_i/dm_h for every example and every head, in one forward and one backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite
from headprune.gating.context import gated
from headprune.model.contexts import watched
from headprune.model.losses import Loss, default_loss
from headprune.model.running import batch_size, undisturbed
from headprune.model.sites import BoundSite, bind, sites_of, unwrap
from headprune.scoring._base import Problem


def gate_gradients(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss = default_loss,
    sites: Iterable[AttentionSite] | None = None,
) -> Tensor:
    """The matrix G, ``[examples, units]``: how each example's loss changes with each unit's gate, at gates of 1.

    Every example has gates of its own, so that one backward pass of the summed losses gives all gradients exactly
    (Michel et al. 2019, section 2.3, for the gradient; a unit of grouped queries is the sum over its heads).

    Args:
        model: The model; left as it was found. A compiled model is run uncompiled.
        batches: Batches with labels.
        loss: Per-example loss.
        sites: Default ``find_sites(model)``.
    """
    model = unwrap(model)
    bound = bind(model, sites)
    with undisturbed(model):
        return unit_gradients(Problem(model, bound, batches, loss, progress=False))


def unit_gradients(problem: Problem) -> Tensor:
    """G of a problem, computed once and then shared by all scorers; fp64 on the CPU."""
    if "gradients" not in problem.shared:
        problem.shared["gradients"] = problem.rows("gate gradients", partial(loss_gradients, problem))
    found: Tensor = problem.shared["gradients"]
    return found


def loss_gradients(problem: Problem, number: int, batch: Any, at: float = 1.0) -> Tensor:
    """``[examples, units]``: the rows of G that a batch gives, with every gate at ``at``, where the gates are."""
    return by_unit(problem, _backward(problem, number, batch, gate_shapes(problem, batch), at))


def token_gradients(problem: Problem) -> Tensor:
    """``[examples, units]``: absolute gate gradients of single tokens, summed over the tokens of each example."""

    def of_batch(number: int, batch: Any) -> Tensor:
        size = batch_size(batch)
        lengths = _lengths(problem, batch, size)
        shapes = [(size, lengths[b.site.name], len(b.site.heads)) for b in problem.bound]
        gradients = _backward(problem, number, batch, shapes)
        absolute = [_units(problem, b, g).abs().sum(1) for b, g in zip(problem.bound, gradients, strict=True)]
        return torch.cat(absolute, 1)

    return problem.rows("gate gradients by token", of_batch)


@torch.inference_mode(False)
@torch.enable_grad()  # whatever the caller has set: a gate made or reshaped without it is no part of the graph
def _backward(
    problem: Problem, number: int, batch: Any, shapes: Sequence[tuple[int, ...]], at: float = 1.0
) -> list[Tensor]:
    """Gradients of the summed losses with respect to gates of the given shapes, one a site."""
    gates = open_gates(problem, shapes, at)
    with gated(problem.model, gates, sites_of(problem.bound)):
        return gate_slopes(problem, problem.losses(number, batch).sum(), gates)


def gate_shapes(problem: Problem, batch: Any) -> list[tuple[int, ...]]:
    """The shape of gates with one row an example, for every site."""
    return [(batch_size(batch), len(b.site.heads)) for b in problem.bound]


def open_gates(problem: Problem, shapes: Sequence[tuple[int, ...]], at: float = 1.0) -> dict[str, Tensor]:
    """Gates that ask for their gradient, by site; the graph begins at the first of them, because weights are frozen."""
    gates = {}
    for b, shape in zip(problem.bound, shapes, strict=True):
        weight = next(b.module.parameters())
        wide = torch.promote_types(weight.dtype, torch.float32)
        gates[b.site.name] = torch.full(shape, at, device=weight.device, dtype=wide, requires_grad=True)
    return gates


def gate_slopes(
    problem: Problem, total: Tensor, gates: Mapping[str, Tensor], what: str = "the loss", keep_graph: bool = False
) -> list[Tensor]:
    """Gradients of a number with respect to the gates of ``open_gates``, one a site; see ``gradients_of``."""
    found = gradients_of(problem, total, [[gate] for gate in gates.values()], what, keep_graph)
    return [gradient for (gradient,) in found]


def gradients_of(
    problem: Problem,
    total: Tensor,
    inputs: Sequence[Sequence[Tensor]],
    what: str = "the loss",
    keep_graph: bool = False,
) -> list[list[Tensor]]:
    """Gradients of a number with respect to tensors of every site, in the order of the sites.

    Args:
        problem: The problem.
        total: A sum over examples.
        inputs: For every site, tensors that ask for their gradient: its gate, or what it read whenever it ran.
        what: What the number is made of, for messages.
        keep_graph: Whether another number of the same graph follows.

    Raises:
        InvalidValue: the number has no graph, or does not depend on a site.
    """
    if not total.requires_grad:
        must = "connected to the model's output (not detached, not under no_grad)"
        raise InvalidValue("loss(model, batch)", must, "a tensor without a graph")
    flat = [x for of_site in inputs for x in of_site]
    found = iter(torch.autograd.grad(total, flat, allow_unused=True, retain_graph=keep_graph))
    gradients = []
    for b, of_site in zip(problem.bound, inputs, strict=True):
        pairs = [(x, next(found)) for x in of_site]
        if b.site.heads and all(gradient is None for _, gradient in pairs):
            hint = "Leave this site out with sites=, or use a loss that depends on it."
            raise InvalidValue(what, f"one that depends on {b.site.name}", "no dependence on it", hint)
        gradients.append([torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs])
    return gradients


def by_unit(problem: Problem, gradients: Sequence[Tensor]) -> Tensor:
    """``[..., units]`` of all sites, side by side, from one tensor ``[..., heads]`` a site."""
    return torch.cat([_units(problem, b, g) for b, g in zip(problem.bound, gradients, strict=True)], -1)


def _units(problem: Problem, bound: BoundSite, gradient: Tensor) -> Tensor:
    """Sums the members of each unit: heads that share a key/value head move together, so their gradients add."""
    units = bound.site.units
    if units == tuple((head,) for head in bound.site.heads):
        return gradient
    key = "units", bound.site.name
    if key not in problem.shared:  # kept, for to put it on an accelerator waits for that
        unit_of = {head: index for index, unit in enumerate(units) for head in unit}
        problem.shared[key] = torch.tensor([unit_of[h] for h in bound.site.heads], device=gradient.device)
    found: Tensor = gradient.new_zeros(*gradient.shape[:-1], len(units)).index_add_(-1, problem.shared[key], gradient)
    return found


def _lengths(problem: Problem, batch: Any, size: int) -> dict[str, int]:
    """Query tokens an example at every site; windows of an image are tokens one after another."""
    lengths: dict[str, int] = {}

    def note(site: int, x: Tensor) -> None:
        b = problem.bound[site]
        windows = x.shape[0] // size if b.layout.windows else 1
        lengths[b.site.name] = windows * x.shape[1 - b.layout.batch_axis]

    with torch.no_grad(), watched(problem.bound, note):
        problem.loss(problem.model, batch)
    return {b.site.name: lengths.get(b.site.name, 1) for b in problem.bound}
