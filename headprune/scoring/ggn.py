"""Curvature without labels: the generalised Gauss-Newton matrix of the gates, the Fisher matrix
under the model itself.

What the model puts out is read as distributions: of classes, of a number (regression), of yes and
no for every class (several labels), of the next token at every position, of where an answer begins
and ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headprune.core.errors import InvalidValue, check_one_of
from headprune.core.heads import AttentionSite
from headprune.core.samples import Curvature
from headprune.gating.context import gated
from headprune.model.losses import default_loss
from headprune.model.own_loss import output_notes, shift_of
from headprune.model.recompute import recomputed
from headprune.model.running import undisturbed
from headprune.model.sites import bind, sites_of, unwrap
from headprune.model.transfers import in_fp64, sent
from headprune.scoring._averages import averaged, with_curvature
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, units_per_site
from headprune.scoring._coupling import OUTPUTS, coupled, refuse_coupled
from headprune.scoring._distributions import (
    Distributions,
    content_seeds,
    distributions,
    drawn_labels,
)
from headprune.scoring._gates import (
    by_unit,
    gate_shapes,
    gate_slopes,
    n_units,
    open_gates,
    slopes_of,
)
from headprune.scoring._rows import collected
from headprune.scoring._sharing import summed
from headprune.scoring.fisher import structured


@dataclass(frozen=True)
class Ggn(Scorer):
    """``I_h = 1/2 mean_i [J_i' (diag p_i - p_i p_i') J_i]_hh``, ``J = dlogits/dm``: no labels,
    C - 1 backward passes.

    Half the diagonal of the Hessian of ``KL(p_full || p_m)`` at gates m = 1: how far the prediction
    moves when the head is removed, to second order. The scores carry the whole matrix
    (``curvature``) for the selector ``quadratic``.

    Other outputs take the second derivative of their default loss: ``2/K J'J`` for regression,
    ``1/K J' diag(p (1 - p)) J`` for several labels. A distribution per token is estimated with
    drawn labels: the mean of ``g g' / T``, one backward pass per draw.

    Source: Martens 2020, "New Insights and Perspectives on the Natural Gradient Method"; here in
    the gates. Labels only say which positions count; a loss of your own is not asked.

    When: no labels and few classes, above all where the model has fitted its examples; with
    ``quadratic``.

    Args:
        draws: Labels drawn per distribution. None is exact for one distribution per example, else
            1. Give a number where C is large.
        seed: Of the draws, which also depend on what an example contains.

    The standard error is over examples, with the noise of the draws.
    """

    # Exact with C - 1 passes of one forward graph, because logits may be shifted until one of them
    # does not move.
    draws: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws is not None and self.draws < 1:
            raise InvalidValue("Ggn.draws", "at least 1, or None", self.draws)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        n = n_units(problem)
        keeps_matrix = not Curvature.too_large(n)
        drawn = False
        total = torch.empty(0)  # [units, units], where the rows are
        if keeps_matrix:
            total = torch.zeros(n, n, dtype=torch.float64)

        def halves(number: int, batch: Any) -> Tensor:
            nonlocal drawn, total
            rows, drew = self.rows(problem, number, batch)
            drawn |= drew
            if keeps_matrix:
                total = sent(total, rows.device) + _outer(rows)
            return rows.square().sum(1) / 2

        samples = collected(problem.pieces("ggn", halves, n, keep=False))
        parts = problem.gathered("ggn", lambda: {"total": total, "drawn": torch.tensor(drawn)})
        estimate = averaged(samples)
        if any(bool(part["drawn"]) for part in parts):
            estimate = replace(estimate, seed=self.seed)
        n_examples = estimate.n_examples
        estimate = with_curvature(estimate, n, lambda: summed(parts, "total").cpu() / n_examples)
        notes = output_notes(problem.loss, "ggn")
        return replace(estimate, notes=(*estimate.notes, *notes))

    @torch.inference_mode(False)
    @torch.enable_grad()
    def rows(self, problem: ScoringProblem, number: int, batch: Any) -> tuple[Tensor, bool]:
        """``[examples, rows, units]`` whose outer products sum to each example's matrix; whether
        labels were drawn."""
        gates = open_gates(problem, gate_shapes(problem, batch))
        with gated(problem.model, gates, sites_of(problem.bound)), recomputed(problem.model):
            # 1. Run the model.
            predicted = distributions(
                problem.model, batch, f"batch {number}", problem.given, shift_of(problem.loss)
            )
            numbers = predicted.numbers()  # [examples]
            if coupled(problem, numbers, slopes_of(numbers, list(gates.values())), numbers=OUTPUTS):
                refuse_coupled(problem, "ggn", OUTPUTS)
            # 2. Choose the numbers to differentiate.
            is_softmax = predicted.kind == "single_label_classification"
            drawn = is_softmax and (self.draws is not None or predicted.by_token)
            if drawn:
                seeds = content_seeds(problem.model, problem.given, self.seed)
                targets = _drawn_losses(predicted, seeds, self.draws or 1)
            else:
                targets = _summed_outputs(predicted.logits[:, 0], is_softmax)
            # 3. Take their slopes in the gates.
            slopes = []  # per target [examples, units]
            for target in targets:
                keep = target is not targets[-1]
                gradients = gate_slopes(problem, target, gates, "the model's output", keep)
                slopes.append(in_fp64(by_unit(problem, gradients)))
        return _weighted(torch.stack(slopes, 1), predicted, drawn), drawn


def _outer(rows: Tensor) -> Tensor:
    """``[units, units]``: the sum of the outer products of all rows of all examples."""
    return torch.einsum("irh,irk->hk", rows, rows)


def _drawn_losses(predicted: Distributions, seeds: list[int], draws: int) -> list[Tensor]:
    """The summed loss of every draw of labels."""
    logits = predicted.logits_counted()
    draws_of_labels = drawn_labels(predicted, seeds, draws)
    return [functional.cross_entropy(logits, y, reduction="sum") for y in draws_of_labels]


def _summed_outputs(output: Tensor, is_softmax: bool) -> list[Tensor]:
    """Every column of the output ``[examples, outputs]``, summed over the examples.

    Of a softmax the last logit is subtracted from the others, which leaves it no slope of its own.
    """
    if is_softmax:
        output = output[:, :-1] - output[:, -1:]
    return [column.sum() for column in output.unbind(1)]


def _weighted(slopes: Tensor, predicted: Distributions, drawn: bool) -> Tensor:
    """Rows ``[examples, rows, units]`` from the targets' slopes, by the second derivative of the
    loss."""
    if drawn:
        # The mean over an example's counted positions, and over draws.
        positions = sent(predicted.counted.sum(1).clamp(min=1).double(), slopes.device)
        return slopes / (positions * slopes.shape[1]).sqrt()[:, None, None]
    output = in_fp64(predicted.logits[:, 0].detach())  # [examples, outputs]
    if predicted.kind == "regression":
        root: float = (2 / output.shape[1]) ** 0.5
        return slopes * root
    if predicted.kind == "multi_label_classification":
        p = output.sigmoid()
        return slopes * (p * (1 - p) / output.shape[1]).sqrt().unsqueeze(-1)
    # The last logit, against itself, has no slope.
    slopes = torch.cat([slopes, torch.zeros_like(slopes[:, :1])], 1)
    p = output.softmax(-1).unsqueeze(-1)
    return p.sqrt() * (slopes - (p * slopes).sum(1, keepdim=True))


def ggn_matrix(
    model: nn.Module,
    batches: Iterable[Any],
    sites: Iterable[AttentionSite] | None = None,
    *,
    structure: str = "full",
    draws: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Compute the generalised Gauss-Newton matrix of the gates, ``[units, units]`` in fp64.

    Args:
        model: The model; it does not change.
        batches: Batches; labels are not needed.
        sites: Default ``find_sites(model)``; units are in their order.
        structure: ``full``, ``block`` (pairs of units of different sites are 0) or ``diag``.
        draws: As in ``Ggn``.
        seed: As in ``Ggn``.
    """
    check_one_of("ggn_matrix(structure=)", structure, ("full", "block", "diag"))
    model = unwrap(model)
    bound = bind(model, sites)
    scorer = Ggn(draws, seed)
    sizes = units_per_site(bound)
    n_examples = 0
    total = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64)
    problem = ScoringProblem(model, bound, batches, default_loss, progress=False)
    with undisturbed(model), problem.explained():
        problem.choose_loss()
        for number, batch in problem.passes("ggn"):
            rows, _ = scorer.rows(problem, number, batch)
            total = sent(total, rows.device) + _outer(rows)
            n_examples += len(rows)
    return structured(total.cpu() / n_examples, sizes, structure)
