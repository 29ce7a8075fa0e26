"""The exact matrix of gate gradients: dl_i/dm_h for every example and every head, in one forward
and one backward.

Where the loss couples examples, such as a contrastive one, there is a backward pass an example
(``_coupling``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite
from headprune.core.samples import Curvature
from headprune.gating.context import gated
from headprune.model.contexts import watched
from headprune.model.losses import Loss, default_loss
from headprune.model.recompute import recomputed
from headprune.model.running import batch_size, device_of, undisturbed
from headprune.model.sites import BoundSite, bind, sites_of, unwrap
from headprune.model.transfers import sent
from headprune.scoring._averages import in_blocks
from headprune.scoring._base import Scorer, ScoringProblem
from headprune.scoring._coupling import LOSSES, Slopes, alone, asks, coupled, refuse_coupled
from headprune.scoring._flat import refuse_flat
from headprune.scoring._rows import Held, Rows, collected


def gate_gradients(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss = default_loss,
    sites: Iterable[AttentionSite] | None = None,
) -> Tensor:
    """The matrix G, ``[examples, units]``: how each example's loss changes with each unit's gate,
    at gates of 1.

    Every example has gates of its own, so that one backward pass of the summed losses gives all
    gradients exactly (Michel et al. 2019, section 2.3, for the gradient; a unit of grouped queries
    is the sum over its heads). A loss that depends on other examples of its batch, as a contrastive
    one does, takes a backward pass an example.

    Args:
        model: The model; left as it was found. A compiled model is run uncompiled.
        batches: Batches with labels.
        loss: Per-example loss.
        sites: Default ``find_sites(model)``.
    """
    model = unwrap(model)
    bound = bind(model, sites)
    problem = ScoringProblem(model, bound, batches, loss, progress=False)
    with undisturbed(model), problem.explained():
        problem.judge()
        return unit_gradients(problem)


def unit_gradients(problem: ScoringProblem) -> Tensor:
    """G of a problem, computed once and then shared by all scorers; fp64 on the CPU."""
    if "gradients" not in problem.shared:
        problem.shared["gradients"] = torch.cat(list(_pieces(problem)))
    found: Tensor = problem.shared["gradients"]
    return found


def n_units(problem: ScoringProblem) -> int:
    """Units of all sites."""
    return sum(len(b.site.units) for b in problem.bound)


def _pieces(problem: ScoringProblem) -> Iterator[Tensor]:
    return _not_flat(
        problem, problem.pieces("gate gradients", LossGradients(problem), n_units(problem))
    )


@dataclass(frozen=True)
class LossGradients:
    """The rows of G that a batch gives; whether the loss couples examples is found out on the first
    one."""

    problem: ScoringProblem

    def __call__(self, number: int, batch: Any) -> Tensor:
        return loss_gradients(self.problem, number, batch)

    def told(self, batch: Any) -> list[str]:
        return [LOSSES] if self.problem.shared.get(LOSSES) else []

    def catch_up(self, number: int, batch: Any, told: Sequence[str]) -> None:
        if LOSSES in told:
            self.problem.shared[LOSSES] = True


def _not_flat(problem: ScoringProblem, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    """The pieces of a pass; where it ends, slopes that are nothing but rounding are refused."""
    largest = torch.zeros((), dtype=torch.float64)
    for piece in pieces:
        largest = torch.maximum(largest, piece.abs().max())
        yield piece
    refuse_flat(problem, largest)


class GradientScorer(Scorer):
    """A scorer that is the mean of a function of G's rows, or of their means over blocks of
    examples."""

    @property
    def reads_gradients(self) -> bool:
        """Whether it is, as it is set."""
        return True

    @property
    def block_size(self) -> int:
        """Examples a block, in data order."""
        return 1

    @abstractmethod
    def of_gradients(self, gradients: Tensor) -> Tensor:
        """``[rows, units]`` from rows of G, or of their means."""


@dataclass
class Gathered:
    """What a gradient scorer makes of G.

    Args:
        rows: Its rows, or what there was room for.
        n_examples: Examples.
        products: ``[units, units]``: the mean of the outer products of the gradients that its rows
            are made of.
    """

    rows: Tensor | Rows
    n_examples: int
    products: Callable[[], Tensor]


def gathered(problem: ScoringProblem, scorer: GradientScorer) -> Gathered:
    """What a scorer makes of G; that of the call's other scorers is gathered in the same pass.

    Where there is no room for G it is never whole, and each scorer takes what it needs as batches
    come.
    """
    streams: dict[GradientScorer, _Stream] = problem.shared.setdefault("gradient streams", {})
    if "gradients" not in problem.shared and scorer not in streams:
        together = [
            s
            for s in problem.shared.get("scorers", ())
            if isinstance(s, GradientScorer) and s.reads_gradients
        ]
        wanted = dict.fromkeys((scorer, *together))
        made = {s: _Stream(s, n_units(problem)) for s in wanted}
        if not _read(problem, list(made.values())):
            streams.update(made)
    if scorer in streams:
        return streams[scorer].done()
    gradients: Tensor = problem.shared["gradients"]
    means = in_blocks(gradients, scorer.block_size)
    return Gathered(
        scorer.of_gradients(means), len(gradients), lambda: means.T @ means / len(means)
    )


def _read(problem: ScoringProblem, streams: list[_Stream]) -> bool:
    """Reads all gradients; whether there was room for G, and if not, they went into the streams."""

    def feed(gradients: Tensor) -> None:
        for stream in streams:
            stream.add(gradients)

    held = Held(feed)
    for piece in _pieces(problem):
        held.add(piece)
    if (whole := held.whole) is None:
        return False
    problem.shared["gradients"] = whole
    return True


class _Stream:
    """What one scorer takes of gradients that come piece by piece."""

    def __init__(self, scorer: GradientScorer, n_units: int) -> None:
        self.scorer, self.rows, self.n_examples = scorer, Rows(), 0
        self.rest = torch.zeros(0, n_units, dtype=torch.float64)
        self.total = (
            None
            if Curvature.too_large(n_units)
            else torch.zeros(n_units, n_units, dtype=torch.float64)
        )

    def add(self, gradients: Tensor) -> None:
        self.n_examples += len(gradients)
        gradients = torch.cat([self.rest, gradients])
        n_full = len(gradients) // self.scorer.block_size * self.scorer.block_size
        self.rest = gradients[n_full:].clone()
        self._take(gradients[:n_full])

    def _take(self, gradients: Tensor) -> None:
        if not len(gradients):
            return
        means = in_blocks(gradients, self.scorer.block_size)
        self.rows.add(self.scorer.of_gradients(means))
        if self.total is not None:
            self.total += means.T @ means

    def done(self) -> Gathered:
        self._take(self.rest)
        self.rest = self.rest[:0]
        return Gathered(self.rows, self.n_examples, self._products)

    def _products(self) -> Tensor:
        assert self.total is not None
        return self.total / self.rows.count


@torch.inference_mode(False)
# Whatever the caller has set: a gate made or reshaped without it is no part of the graph.
@torch.enable_grad()
def loss_gradients(problem: ScoringProblem, number: int, batch: Any, at: float = 1.0) -> Tensor:
    """``[examples, units]``: the rows of G that a batch gives, with every gate at ``at``, where the
    gates are."""
    gates = open_gates(problem, gate_shapes(problem, batch), at)
    with gated(problem.model, gates, sites_of(problem.bound)), recomputed(problem.model):
        losses, gradients, slopes = _summed(problem, number, batch, gates)
        if coupled(problem, losses, slopes, gradients):
            return by_unit(problem, alone(losses, slopes))
    return by_unit(problem, gradients)


def token_gradients(problem: ScoringProblem) -> Tensor | Rows:
    """``[examples, units]``: absolute gate gradients of single tokens, summed over the tokens of
    each example.

    Raises:
        InvalidValue: the loss couples examples; whose token's gate counts for whom is not defined
            then.
    """

    @torch.inference_mode(False)
    @torch.enable_grad()
    def of_batch(number: int, batch: Any) -> Tensor:
        size = batch_size(batch)
        lengths = _lengths(problem, batch, size)
        gates = open_gates(
            problem, [(size, lengths[b.site.name], len(b.site.heads)) for b in problem.bound]
        )
        with gated(problem.model, gates, sites_of(problem.bound)), recomputed(problem.model):
            losses, gradients, slopes = _summed(problem, number, batch, gates)
            if coupled(problem, losses, slopes, gradients):
                refuse_coupled(problem, "Taylor(reduce='token')")
        absolute = [
            _units(problem, b, g).abs().sum(1)
            for b, g in zip(problem.bound, gradients, strict=True)
        ]
        return torch.cat(absolute, 1)

    return collected(
        _not_flat(problem, problem.pieces("gate gradients by token", of_batch, n_units(problem)))
    )


def refuse_coupled_losses(problem: ScoringProblem, number: int, batch: Any, scorer: str) -> None:
    """Refuses a loss that couples examples, for a scorer that has no use for one; found out on the
    first batch.

    Raises:
        InvalidValue: the loss of an example depends on others.
    """
    if not problem.shared.get(LOSSES) and asks(
        problem, batch_size(batch), device_of(problem.model)
    ):
        loss_gradients(problem, number, batch)
    if problem.shared.get(LOSSES):
        refuse_coupled(problem, scorer)


def _summed(
    problem: ScoringProblem, number: int, batch: Any, gates: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor], Slopes]:
    """A batch's losses, the gradients of their sum with respect to gates, one a site, and those of
    weighted sums."""
    losses = problem.losses(number, batch)
    asked = asks(problem, len(losses), losses.device)  # whether gradients of other sums follow
    gradients = gate_slopes(problem, losses.sum(), gates, keep_graph=asked)
    return losses, gradients, slopes_of(losses, list(gates.values()))


def slopes_of(numbers: Tensor, inputs: Sequence[Tensor]) -> Slopes:
    """Gradients of weighted sums of ``numbers`` ``[examples]`` with respect to inputs with the
    examples first."""

    def slopes(weights: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(numbers, inputs, weights, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]

    return slopes


def gate_shapes(problem: ScoringProblem, batch: Any) -> list[tuple[int, ...]]:
    """The shape of gates with one row an example, for every site."""
    return [(batch_size(batch), len(b.site.heads)) for b in problem.bound]


def open_gates(
    problem: ScoringProblem, shapes: Sequence[tuple[int, ...]], at: float = 1.0
) -> dict[str, Tensor]:
    """Gates that ask for their gradient, by site; the graph begins at the first of them, because
    weights are frozen."""
    gates = {}
    for b, shape in zip(problem.bound, shapes, strict=True):
        weight = next(b.module.parameters())
        wide = torch.promote_types(weight.dtype, torch.float32)
        gates[b.site.name] = torch.full(
            shape, at, device=device_of(b.module), dtype=wide, requires_grad=True
        )
    return gates


def gate_slopes(
    problem: ScoringProblem,
    total: Tensor,
    gates: Mapping[str, Tensor],
    what: str = "the loss",
    keep_graph: bool = False,
) -> list[Tensor]:
    """Gradients of a number with respect to the gates of ``open_gates``, one a site; see
    ``gradients_of``."""
    found = gradients_of(problem, total, [[gate] for gate in gates.values()], what, keep_graph)
    return [gradient for (gradient,) in found]


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
            raise InvalidValue(
                what, f"one that depends on {b.site.name}", "no dependence on it", hint
            )
        gradients.append(
            [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]
        )
    return gradients


def by_unit(problem: ScoringProblem, gradients: Sequence[Tensor]) -> Tensor:
    """``[..., units]`` of all sites, side by side, from one tensor ``[..., heads]`` a site."""
    return torch.cat(
        [_units(problem, b, g) for b, g in zip(problem.bound, gradients, strict=True)], -1
    )


def _units(problem: ScoringProblem, bound: BoundSite, gradient: Tensor) -> Tensor:
    """Sums the members of each unit: heads that share a key/value head move together, so their
    gradients add."""
    units = bound.site.units
    if units == tuple((head,) for head in bound.site.heads):
        return gradient
    key = "units", bound.site.name
    if key not in problem.shared:
        unit_of = {head: index for index, unit in enumerate(units) for head in unit}
        problem.shared[key] = sent([unit_of[h] for h in bound.site.heads], gradient.device)
    found: Tensor = gradient.new_zeros(*gradient.shape[:-1], len(units)).index_add_(
        -1, problem.shared[key], gradient
    )
    return found


def _lengths(problem: ScoringProblem, batch: Any, size: int) -> dict[str, int]:
    """Query tokens an example at every site; windows of an image are tokens one after another."""
    lengths: dict[str, int] = {}

    def note(site: int, x: Tensor) -> None:
        b = problem.bound[site]
        windows = x.shape[0] // size if b.layout.windows else 1
        lengths[b.site.name] = windows * x.shape[1 - b.layout.batch_axis]

    with torch.no_grad(), watched(problem.bound, note):
        problem.loss(problem.model, batch)
    return {b.site.name: lengths.get(b.site.name, 1) for b in problem.bound}
