"""First-order importance: the size of the loss's gradient with respect to a head's gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue, check_one_of
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, ScoringProblem, units_per_site
from headprune.scoring._coupling import noted
from headprune.scoring._gradients import GradientScorer, gathered, token_gradients
from headprune.scoring._rows import SummarizedRows


@dataclass(frozen=True)
class Taylor(GradientScorer):
    """``I_h = mean_i |dl_i/dm_h|`` at gates m = 1: one forward and one backward pass with frozen
    weights, needs labels.

    Source: Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", section 4.1,
    equation (5). We take gradients per example whatever the batch size, leave padding out, and
    average over examples everywhere; the authors' code counts padding and divides the last layer
    differently.

    When: labels, and time for one pass. `auto` costs more, and its plans have a smaller worst
    loss (docs/regret.md).

    Args:
        reduce: ``example`` (the formula); ``token``, absolute gradients of single tokens summed
            over an example, as in the authors' code (one forward pass more); ``batch``, absolute
            mean gradients of blocks of examples in data order, as in Transformers' bertology;
            ``signed``, ``-mean_i dl_i/dm_h``, the first-order estimate of the loss's increase when
            the head is removed.
        normalize: ``none``, or ``l2``: divide by the l2 norm of the layer's scores, as the authors
            do. It changes how the removed heads spread over layers.
        block: Examples per block, for ``batch``.

    The standard error is that of the mean over examples (blocks); with ``l2`` the norm is taken as
    known.
    """

    reduce: str = "example"
    normalize: str = "none"
    block: int = 32

    def __post_init__(self) -> None:
        check_one_of("Taylor.reduce", self.reduce, ("example", "token", "batch", "signed"))
        check_one_of("Taylor.normalize", self.normalize, ("none", "l2"))
        if self.block < 1 or (self.block != 32 and self.reduce != "batch"):
            must = "a count of examples, with reduce='batch' only"
            raise InvalidValue("Taylor.block", must, self.block)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        if self.reads_gradients:
            of_data = gathered(problem, self)
            rows, n_examples = of_data.rows, of_data.n_examples
        else:
            rows = token_gradients(problem)
            n_examples = len(rows) if isinstance(rows, Tensor) else rows.count
        if self.normalize == "l2":
            rows = _normalized(rows, units_per_site(problem.bound))
        row = "block of examples" if self.reduce == "batch" else "example"
        return noted(problem, averaged(rows, n_examples, row=row))

    @property
    def reads_gradients(self) -> bool:
        return self.reduce != "token"

    @property
    def block_size(self) -> int:
        return self.block if self.reduce == "batch" else 1

    def of_gradients(self, gradients: Tensor) -> Tensor:
        if self.reduce == "signed":
            return -gradients
        return gradients.abs()


def _normalized(rows: Tensor | SummarizedRows, sizes: list[int]) -> Tensor | SummarizedRows:
    """The rows divided by the norm of each layer's scores; ``sizes`` are the units per layer."""
    if isinstance(rows, Tensor):
        return rows / _layer_norms(rows.mean(0), sizes)
    means, _ = rows.mean_and_error
    return rows.divided(_layer_norms(means, sizes))


def _layer_norms(values: Tensor, sizes: list[int]) -> Tensor:
    """``[units]``: the norm of the scores of each unit's layer."""
    # Avoids a division by zero where all scores of a layer are 0.
    tiny = torch.finfo(values.dtype).tiny
    return torch.cat([row.norm().clamp(min=tiny).expand(len(row)) for row in values.split(sizes)])
