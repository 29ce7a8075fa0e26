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

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite
from headprune.core.samples import Curvature
from headprune.gating.context import gated
from headprune.model.losses import default_loss
from headprune.model.own_loss import is_default, shift_of
from headprune.model.recompute import recomputed
from headprune.model.running import undisturbed
from headprune.model.sites import bind, sites_of, unwrap
from headprune.model.transfers import in_fp64, sent
from headprune.scoring._averages import averaged, with_curvature
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, one_of
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
    """``I_h = 1/2 mean_i [J_i' (diag p_i - p_i p_i') J_i]_hh``, ``J = dlogits/dm``: no labels, C -
    1 backward passes.

    Half the diagonal of the Hessian of ``KL(p_full || p_m)`` at gates m = 1: how far the prediction
    moves when the head goes, to second order. It does not vanish on examples that the model has
    fitted. The scores carry the whole matrix (``curvature``) for the selector ``quadratic``. What
    takes the place of the softmax's ``diag p - p p'`` is the second derivative of the default loss
    with respect to the output:

    - one distribution of C classes an example: exact with C - 1 backward passes of one forward
      graph, because logits may be shifted until one of them does not move;
    - regression with K outputs: ``2/K J'J``; several labels: ``1/K J' diag(p (1 - p)) J``; K
      backward passes;
    - a distribution for every token (language models, token classification), or for both ends of an
      answer: the mean over those that the default loss would count, estimated with labels drawn
      from the model's own predictions, one backward pass a draw: ``E_y[g g'] / T`` for ``g`` the
      gradient of the T drawn labels' summed loss. Cross terms vanish in expectation, so that one
      draw is unbiased.

    Source: Martens 2020, "New Insights and Perspectives on the Natural Gradient Method" (JMLR 21,
    146), for the matrix and its equality with the Fisher matrix under the model's own distribution;
    here in the gates, not the weights. Labels in a batch only say which positions count; a loss of
    your own is not asked.

    When: no labels and few classes, above all where the model has fitted its examples; with
    ``quadratic``.

    Args:
        draws: Labels drawn for every distribution; None is exact where an example has one, and 1
            elsewhere. Give a number where C is large.
        seed: Of the draws. They are seeded by what an example contains, so that neither batches nor
            padding nor the order of the data change them; examples that are equal draw equal
            labels.

    The standard error is that of the mean over examples; it contains the noise of the draws.
    """

    draws: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws is not None and self.draws < 1:
            raise InvalidValue("Ggn.draws", "at least 1, or None", self.draws)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        n = n_units(problem)
        kept, drawn = not Curvature.too_large(n), False
        total = (
            torch.zeros(n, n, dtype=torch.float64) if kept else torch.empty(0)
        )  # where the rows are

        def halves(number: int, batch: Any) -> Tensor:
            nonlocal drawn, total
            rows, sampled = self.rows(problem, number, batch)
            drawn |= sampled
            if kept:
                total = sent(total, rows.device) + _outer(rows)
            return rows.square().sum(1) / 2

        samples = collected(problem.pieces("ggn", halves, n, keep=False))
        parts = problem.gathered("ggn", lambda: {"total": total, "drawn": torch.tensor(drawn)})
        found = averaged(
            samples, seed=self.seed if any(bool(part["drawn"]) for part in parts) else None
        )
        found = with_curvature(found, n, lambda: summed(parts, "total").cpu() / found.n_examples)
        ignored = (
            ()
            if is_default(problem.loss)
            else ("loss= was not asked: ggn reads the output alone.",)
        )
        return replace(found, notes=(*found.notes, *ignored))

    @torch.inference_mode(False)
    @torch.enable_grad()
    def rows(self, problem: ScoringProblem, number: int, batch: Any) -> tuple[Tensor, bool]:
        """``[examples, rows, units]`` whose outer products sum to each example's matrix; whether
        labels were drawn."""
        gates = open_gates(problem, gate_shapes(problem, batch))
        with gated(problem.model, gates, sites_of(problem.bound)), recomputed(problem.model):
            found = distributions(
                problem.model, batch, f"batch {number}", problem.given, shift_of(problem.loss)
            )
            numbers = found.numbers()
            if coupled(problem, numbers, slopes_of(numbers, list(gates.values())), numbers=OUTPUTS):
                refuse_coupled(problem, "ggn", OUTPUTS)
            softmax = found.kind == "single_label_classification"
            drawn = softmax and (self.draws is not None or found.by_token)
            if drawn:
                seeds = content_seeds(problem.model, problem.given, self.seed)
                targets = _drawn_losses(found, seeds, self.draws or 1)
            else:
                output = found.logits[:, 0]
                targets = [
                    o.sum()
                    for o in ((output[:, :-1] - output[:, -1:]) if softmax else output).unbind(1)
                ]
            slopes = []
            for target in targets:
                keep = target is not targets[-1]
                gradients = gate_slopes(problem, target, gates, "the model's output", keep)
                slopes.append(in_fp64(by_unit(problem, gradients)))
        return _weighted(torch.stack(slopes, 1), found, drawn), drawn


def _outer(rows: Tensor) -> Tensor:
    """The sum of the outer products of all rows of all examples, ``[units, units]``."""
    return torch.einsum("irh,irk->hk", rows, rows)


def _drawn_losses(found: Distributions, seeds: list[int], draws: int) -> list[Tensor]:
    logits = found.logits_counted()
    return [
        functional.cross_entropy(logits, y, reduction="sum")
        for y in drawn_labels(found, seeds, draws)
    ]


def _weighted(slopes: Tensor, found: Distributions, drawn: bool) -> Tensor:
    """Rows ``[examples, rows, units]`` from the targets' slopes, by the second derivative of the
    loss."""
    if drawn:
        positions = sent(found.counted.sum(1).clamp(min=1).double(), slopes.device)
        return slopes / (positions * slopes.shape[1]).sqrt()[:, None, None]
    output = in_fp64(found.logits[:, 0].detach())
    if found.kind == "regression":
        root: float = (2 / output.shape[1]) ** 0.5
        return slopes * root
    if found.kind == "multi_label_classification":
        p = output.sigmoid()
        return slopes * (p * (1 - p) / output.shape[1]).sqrt().unsqueeze(-1)
    slopes = torch.cat(
        [slopes, torch.zeros_like(slopes[:, :1])], 1
    )  # the last logit, against itself
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
    """The generalised Gauss-Newton matrix of the gates, ``[units, units]`` in fp64; see ``Ggn``.

    Args:
        model: The model; left as it was found.
        batches: Batches; labels are not needed.
        sites: Default ``find_sites(model)``; units are in their order.
        structure: ``full``, ``block`` (pairs of units of different sites are 0) or ``diag``.
        draws: As in ``Ggn``.
        seed: As in ``Ggn``.
    """
    one_of("ggn_matrix(structure=)", structure, ("full", "block", "diag"))
    model = unwrap(model)
    bound = bind(model, sites)
    scorer, n_examples = Ggn(draws, seed), 0
    n_units = sum(len(b.site.units) for b in bound)
    total = torch.zeros(n_units, n_units, dtype=torch.float64)
    problem = ScoringProblem(model, bound, batches, default_loss, progress=False)
    with undisturbed(model), problem.explained():
        problem.judge()
        for number, batch in problem.passes("ggn"):
            rows = scorer.rows(problem, number, batch)[0]
            total = sent(total, rows.device) + _outer(rows)
            n_examples += len(rows)
    return structured(total.cpu() / n_examples, [len(b.site.units) for b in bound], structure)
