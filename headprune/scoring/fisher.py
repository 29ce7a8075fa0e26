"""Second-order importance from the empirical Fisher matrix of the gates (Kwon et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, check_one_of
from headprune.core.heads import AttentionSite
from headprune.model.losses import Loss, default_loss
from headprune.model.sites import bind, unwrap
from headprune.scoring._averages import averaged, in_blocks, with_curvature
from headprune.scoring._base import Estimate, ScoringProblem, units_per_site
from headprune.scoring._coupling import noted
from headprune.scoring._gradients import GradientScorer, gate_gradients, gathered


@dataclass(frozen=True)
class Fisher(GradientScorer):
    """``I_h = 1/2 mean_i (dl_i/dm_h)^2`` at gates m = 1: one forward and one backward pass with
    frozen weights, needs labels.

    Half the diagonal of the Fisher matrix ``G'G/N``: the rise of the loss when the head is removed,
    to second order, with the Fisher matrix for the Hessian and without the slope (``taylor2`` adds
    it). Never negative; it vanishes on examples that the model has fitted, where ``ggn`` does not.
    The scores carry the whole matrix (``curvature``) for the selector ``quadratic``;
    ``fisher_matrix`` gives it as a tensor.

    Source: Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers", the
    Fisher-based mask search. The authors' code squares the mean gradient of a mini-batch of 32
    (``mean^2 + variance / 32``), which is another ranking; we square each example's own. The factor
    1/2 of their expansion is kept, so that scores are in the loss's unit.

    When: labels, and ``quadratic`` is to select, which reads the whole matrix.

    Args:
        block: Examples whose mean gradient is squared, in data order, whatever the loader's batch
            size. 1 is the formula, 32 the authors' code.

    The standard error is that of the mean over examples (blocks).
    """

    block: int = 1

    def __post_init__(self) -> None:
        _check_block("Fisher.block", self.block)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        row = "example" if self.block == 1 else "block of examples"
        of_data = gathered(problem, self)
        estimate = noted(problem, averaged(of_data.rows, of_data.n_examples, row=row))
        return with_curvature(estimate, len(estimate.values), of_data.products)

    @property
    def block_size(self) -> int:
        return self.block

    def of_gradients(self, gradients: Tensor) -> Tensor:
        return gradients.square() / 2


def fisher_matrix(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss = default_loss,
    sites: Iterable[AttentionSite] | None = None,
    *,
    structure: str = "full",
    block: int = 1,
) -> Tensor:
    """Compute the Fisher matrix of the gates, ``G'G/N``, ``[units, units]`` in fp64.

    With gates m the loss rises by ``1/2 (1-m)' I (1-m)``.

    Args:
        model: The model; it does not change.
        batches: Batches with labels.
        loss: Per-example loss.
        sites: Default ``find_sites(model)``; units are in their order.
        structure: ``full``, ``block`` (pairs of units of different sites are 0) or ``diag``.
        block: As in ``Fisher``.

    Raises:
        InvalidValue: another structure, a block without examples, or what ``gate_gradients``
            refuses.
    """
    check_one_of("fisher_matrix(structure=)", structure, ("full", "block", "diag"))
    _check_block("fisher_matrix(block=)", block)
    rows = in_blocks(gate_gradients(model, batches, loss, sites), block)  # [blocks, units]
    sizes = units_per_site(bind(unwrap(model), sites))
    return structured(rows.T @ rows / len(rows), sizes, structure)


def structured(matrix: Tensor, sizes: list[int], structure: str) -> Tensor:
    """The part of ``[units, units]`` that a structure keeps, and 0 elsewhere.

    Args:
        matrix: The whole matrix.
        sizes: Units per site.
        structure: As in ``fisher_matrix``.
    """
    if structure == "full":
        return matrix
    if structure == "diag":
        return matrix.diagonal().diag()
    blocks: Tensor = torch.block_diag(*(matrix.new_ones(n, n) for n in sizes))
    return matrix * blocks


def _check_block(where: str, block: int) -> None:
    if block < 1:
        raise InvalidValue(where, "a count of examples, at least 1", block)
