"""The exact matrix of gate gradients: dl_i/dm_h for every example and every head, in one forward and one backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite
from headprune.gating.context import gated
from headprune.model.expose import exposed
from headprune.model.losses import Loss, checked_losses, default_loss
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
        rows = []
        for number, batch in problem.passes("gate gradients"):
            size = batch_size(batch)
            gradients = _backward(problem, number, batch, [(size, len(b.site.heads)) for b in problem.bound])
            rows.append(torch.cat([_units(b, g) for b, g in zip(problem.bound, gradients, strict=True)], 1).cpu())
        problem.shared["gradients"] = torch.cat(rows).double()
    found: Tensor = problem.shared["gradients"]
    return found


def token_gradients(problem: Problem) -> Tensor:
    """``[examples, units]``: absolute gate gradients of single tokens, summed over the tokens of each example."""
    rows = []
    for number, batch in problem.passes("gate gradients by token"):
        size = batch_size(batch)
        lengths = _lengths(problem, batch, size)
        shapes = [(size, lengths[b.site.name], len(b.site.heads)) for b in problem.bound]
        gradients = _backward(problem, number, batch, shapes)
        absolute = [_units(b, g).abs().sum(1) for b, g in zip(problem.bound, gradients, strict=True)]
        rows.append(torch.cat(absolute, 1).cpu())
    return torch.cat(rows).double()


@torch.inference_mode(False)
@torch.enable_grad()  # whatever the caller has set: a gate made or reshaped without it is no part of the graph
def _backward(problem: Problem, number: int, batch: Any, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Gradients of the summed losses with respect to gates of the given shapes, one a site."""
    gates = {}
    for b, shape in zip(problem.bound, shapes, strict=True):
        weight = next(b.module.parameters())
        wide = torch.promote_types(weight.dtype, torch.float32)
        gates[b.site.name] = torch.ones(shape, device=weight.device, dtype=wide, requires_grad=True)
    with gated(problem.model, gates, sites_of(problem.bound)):
        losses = checked_losses(problem.loss, problem.model, batch, number)
        if not losses.requires_grad:
            must = "connected to the model's output (not detached, not under no_grad)"
            raise InvalidValue("loss(model, batch)", must, "a tensor without a graph")
        found = torch.autograd.grad(losses.sum(), list(gates.values()), allow_unused=True)
    for b, gradient in zip(problem.bound, found, strict=True):
        if gradient is None and b.site.heads:
            hint = "Leave this site out with sites=, or use a loss that depends on it."
            raise InvalidValue("the loss", f"one that depends on {b.site.name}", "no dependence on it", hint)
    pairs = zip(gates.values(), found, strict=True)
    return [torch.zeros_like(gate) if gradient is None else gradient for gate, gradient in pairs]


def _units(bound: BoundSite, gradient: Tensor) -> Tensor:
    """Sums the members of each unit: heads that share a key/value head move together, so their gradients add."""
    units = bound.site.units
    unit_of = {head: index for index, unit in enumerate(units) for head in unit}
    index = torch.tensor([unit_of[h] for h in bound.site.heads], dtype=torch.long, device=gradient.device)
    return gradient.new_zeros(*gradient.shape[:-1], len(units)).index_add_(-1, index, gradient)


def _lengths(problem: Problem, batch: Any, size: int) -> dict[str, int]:
    """Query tokens an example at every site; windows of an image are tokens one after another."""
    lengths: dict[str, int] = {}

    def note(b: BoundSite) -> Any:
        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            windows = args[0].shape[0] // size if b.layout.windows else 1
            lengths[b.site.name] = windows * args[0].shape[1 - b.layout.batch_axis]

        return keep

    handles = [b.gate.register_forward_pre_hook(note(b)) for b in problem.bound]
    try:
        with torch.no_grad(), exposed(problem.bound):
            problem.loss(problem.model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {b.site.name: lengths.get(b.site.name, 1) for b in problem.bound}
