"""The exact matrix of gate gradients: dl_i/dm_h for every example and every head, in one forward
and one backward.

Where the loss couples examples, such as a contrastive one, there is one backward pass per example
(``_coupling``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.heads import AttentionSite
from headprune.core.samples import Curvature
from headprune.gating.context import gated
from headprune.model.contexts import rows_of, watched
from headprune.model.losses import Loss, default_loss
from headprune.model.recompute import recomputed
from headprune.model.running import batch_size, device_of, undisturbed
from headprune.model.sites import bind, sites_of, unwrap
from headprune.scoring._averages import in_blocks
from headprune.scoring._base import Scorer, ScoringProblem
from headprune.scoring._coupling import (
    LOSSES,
    alone,
    asks,
    coupled,
    losses_are_coupled,
    refuse_coupled,
    remember_coupled_losses,
)
from headprune.scoring._flat import refuse_flat
from headprune.scoring._gates import (
    Slopes,
    by_unit,
    gate_shapes,
    gate_slopes,
    n_units,
    open_gates,
    site_by_unit,
    slopes_of,
)
from headprune.scoring._rows import BoundedRows, SummarizedRows, collected

#: What the rows of a batch in a resume cache say of coupled losses.
_FINDING = "coupled losses"


def gate_gradients(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss = default_loss,
    sites: Iterable[AttentionSite] | None = None,
) -> Tensor:
    """How each example's loss changes with each unit's gate, at gates of 1.

    Every example has gates of its own, so that one backward pass of the summed losses gives all
    gradients exactly (Michel et al. 2019, section 2.3, for the gradient; a unit of grouped queries
    is the sum over its heads). A loss that depends on other examples of its batch, as a contrastive
    one does, takes one backward pass per example.

    Args:
        model: The model; not changed. A compiled model is run uncompiled.
        batches: Batches with labels.
        loss: Per-example loss.
        sites: Default ``find_sites(model)``.

    Returns:
        The matrix G, ``[examples, units]``.
    """
    model = unwrap(model)
    bound = bind(model, sites)
    problem = ScoringProblem(model, bound, batches, loss, progress=False)
    with undisturbed(model), problem.explained():
        problem.choose_loss()
        return unit_gradients(problem)


class GradientScorer(Scorer):
    """A scorer that is the mean of a function of G's rows, or of their means over blocks of
    examples."""

    @property
    def reads_gradients(self) -> bool:
        """Whether it is, with its settings."""
        return True

    @property
    def block_size(self) -> int:
        """Examples per block, in data order."""
        return 1

    @abstractmethod
    def of_gradients(self, gradients: Tensor) -> Tensor:
        """``[rows, units]`` from rows of G, or of their means."""


@dataclass
class Gathered:
    """What a gradient scorer makes of G.

    Args:
        rows: Its rows, or a summary where there was no room for them.
        n_examples: Examples.
        products: ``[units, units]``: the mean of the outer products of the gradients that its rows
            are made of.
    """

    rows: Tensor | SummarizedRows
    n_examples: int
    products: Callable[[], Tensor]


class _SharedGradients:
    """G, or what scorers took of it where there was no room; shared by the scorers of a call."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.streams: dict[GradientScorer, _Stream] = {}


def unit_gradients(problem: ScoringProblem) -> Tensor:
    """G of a problem, ``[examples, units]`` in fp64 on the CPU; all scorers share it."""
    shared = problem.shared.of(_SharedGradients)
    if shared.whole is None:
        shared.whole = torch.cat(list(_pieces(problem)))
    return shared.whole


def gathered(problem: ScoringProblem, scorer: GradientScorer) -> Gathered:
    """What a scorer makes of G; the call's other gradient scorers share the pass.

    Where there is no room for G, each scorer takes what it needs from every batch.
    """
    # 1. Read the data, if no scorer of the call has done so.
    shared = problem.shared.of(_SharedGradients)
    if shared.whole is None and scorer not in shared.streams:
        _read_gradients(problem, scorer, shared)
    # 2. Without room for G, the rows were made batch by batch.
    if scorer in shared.streams:
        return shared.streams[scorer].finished()
    # 3. Else all of them are made of G at once, [rows, units].
    assert shared.whole is not None
    means = in_blocks(shared.whole, scorer.block_size)
    rows = scorer.of_gradients(means)
    return Gathered(rows, len(shared.whole), lambda: means.T @ means / len(means))


def _read_gradients(
    problem: ScoringProblem, scorer: GradientScorer, shared: _SharedGradients
) -> None:
    """Read G, for this scorer and all other gradient scorers of the call."""
    others = [s for s in problem.scorers if isinstance(s, GradientScorer)]
    streams = {scorer: _Stream(scorer, n_units(problem))}
    for other in others:
        if other.reads_gradients and other not in streams:
            streams[other] = _Stream(other, n_units(problem))

    def feed(gradients: Tensor) -> None:
        for stream in streams.values():
            stream.add(gradients)

    rows = BoundedRows(feed)
    for piece in _pieces(problem):
        rows.add(piece)
    shared.whole = rows.whole
    if shared.whole is None:
        shared.streams.update(streams)


class _Stream:
    """What one scorer takes of gradients that come piece by piece."""

    def __init__(self, scorer: GradientScorer, n_units: int) -> None:
        self.scorer = scorer
        # What the scorer makes of the gradients.
        self.rows = SummarizedRows()
        self.n_examples = 0
        # Gradients of a block that is not full yet.
        self.rest = torch.zeros(0, n_units, dtype=torch.float64)
        # Sum of outer products, [units, units]; None where the curvature would be too large.
        self.products: Tensor | None = None
        if not Curvature.too_large(n_units):
            self.products = torch.zeros(n_units, n_units, dtype=torch.float64)

    def add(self, gradients: Tensor) -> None:
        """Take the next gradients ``[examples, units]``."""
        self.n_examples += len(gradients)
        # Blocks run across the borders of batches.
        gradients = torch.cat([self.rest, gradients])
        n_full = len(gradients) // self.scorer.block_size * self.scorer.block_size
        self.rest = gradients[n_full:].clone()  # a view would keep all gradients in memory
        self._take(gradients[:n_full])

    def finished(self) -> Gathered:
        """What was taken, with the last block, which may be smaller."""
        self._take(self.rest)
        self.rest = self.rest[:0]
        return Gathered(self.rows, self.n_examples, self._mean_products)

    def _take(self, gradients: Tensor) -> None:
        if not len(gradients):
            return
        means = in_blocks(gradients, self.scorer.block_size)
        self.rows.add(self.scorer.of_gradients(means))
        if self.products is not None:
            self.products += means.T @ means

    def _mean_products(self) -> Tensor:
        assert self.products is not None
        return self.products / self.rows.count


@dataclass(frozen=True)
class LossGradients:
    """The rows of G that a batch gives; the first batch shows whether the loss couples examples."""

    problem: ScoringProblem

    def __call__(self, number: int, batch: Any) -> Tensor:
        return loss_gradients(self.problem, number, batch)

    def findings(self, batch: Any) -> list[str]:
        return [_FINDING] if losses_are_coupled(self.problem) else []

    def catch_up(self, number: int, batch: Any, findings: Sequence[str]) -> None:
        if _FINDING in findings:
            remember_coupled_losses(self.problem)


def _pieces(problem: ScoringProblem) -> Iterator[Tensor]:
    pieces = problem.pieces("gate gradients", LossGradients(problem), n_units(problem))
    return _not_flat(problem, pieces)


def _not_flat(problem: ScoringProblem, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    """The pieces of a pass; slopes that are nothing but rounding are refused where it ends."""
    largest = torch.zeros((), dtype=torch.float64)
    for piece in pieces:
        largest = torch.maximum(largest, piece.abs().max())
        yield piece
    refuse_flat(problem, largest)


# The caller may have turned graphs off: gates that are made without one have no gradient.
@torch.inference_mode(False)
@torch.enable_grad()
def loss_gradients(problem: ScoringProblem, number: int, batch: Any, at: float = 1.0) -> Tensor:
    """``[examples, units]``: the rows of G that a batch gives, on the device of the gates.

    Args:
        problem: The problem.
        number: Of the batch.
        batch: The batch.
        at: The value of all gates.
    """
    gates = open_gates(problem, gate_shapes(problem, batch), at)
    with gated(problem.model, gates, sites_of(problem.bound)), recomputed(problem.model):
        losses, gradients, slopes = _backward(problem, number, batch, gates)
        if coupled(problem, losses, slopes, gradients):
            # The gradient of the sum mixes losses: take one backward pass per example.
            return by_unit(problem, alone(losses, slopes))
    return by_unit(problem, gradients)


def token_gradients(problem: ScoringProblem) -> Tensor | SummarizedRows:
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
        # Gates [examples, tokens, heads].
        lengths = _lengths(problem, batch, size)
        shapes = [(size, lengths[b.site.name], len(b.site.heads)) for b in problem.bound]
        gates = open_gates(problem, shapes)
        with gated(problem.model, gates, sites_of(problem.bound)), recomputed(problem.model):
            losses, gradients, slopes = _backward(problem, number, batch, gates)
            if coupled(problem, losses, slopes, gradients):
                refuse_coupled(problem, "Taylor(reduce='token')")
        absolute = []
        for b, gradient in zip(problem.bound, gradients, strict=True):
            # [examples, tokens, units], summed over tokens
            absolute.append(site_by_unit(problem, b, gradient).abs().sum(1))
        return torch.cat(absolute, 1)

    pieces = problem.pieces("gate gradients by token", of_batch, n_units(problem))
    return collected(_not_flat(problem, pieces))


def refuse_coupled_losses(problem: ScoringProblem, number: int, batch: Any, scorer: str) -> None:
    """Refuse a loss that couples examples, for a scorer that has no use for one.

    The first batch is tested, with a forward and a backward pass.

    Raises:
        InvalidValue: the loss of an example depends on others.
    """
    is_known = losses_are_coupled(problem)
    if not is_known and asks(problem, batch_size(batch), device_of(problem.model), LOSSES):
        loss_gradients(problem, number, batch)
    if losses_are_coupled(problem):
        refuse_coupled(problem, scorer)


def _backward(
    problem: ScoringProblem, number: int, batch: Any, gates: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor], Slopes]:
    """A batch's losses, the gradients of their sum with respect to gates, one per site, and those
    of weighted sums."""
    losses = problem.losses(number, batch)
    # The test for coupling needs more backward passes.
    keep_graph = asks(problem, len(losses), losses.device)
    gradients = gate_slopes(problem, losses.sum(), gates, keep_graph=keep_graph)
    return losses, gradients, slopes_of(losses, list(gates.values()))


def _lengths(problem: ScoringProblem, batch: Any, size: int) -> dict[str, int]:
    """Query tokens per example at every site; windows of an image are tokens one after another."""
    # A site that does not run has one gate per example.
    lengths = {b.site.name: 1 for b in problem.bound}

    def note_length(site: int, x: Tensor) -> None:
        b = problem.bound[site]
        n_rows, n_tokens = rows_of(b, x, batch).shape[:2]
        windows = n_rows // size if b.layout.windows else 1
        lengths[b.site.name] = windows * n_tokens

    with torch.no_grad(), watched(problem.bound, note_length):
        problem.loss(problem.model, batch)
    return lengths
