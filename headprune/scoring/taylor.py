"""First-order importance: the size of the loss's gradient with respect to a head's gate (Michel et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.scoring._base import Estimate, Problem, Scorer, one_of
from headprune.scoring._gradients import token_gradients, unit_gradients


@dataclass(frozen=True)
class Taylor(Scorer):
    """``I_h = mean_i |dl_i/dm_h|`` at gates m = 1: one forward and one backward pass with frozen weights, labels.

    Source: Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", section 4.1, equation (5).
    We take gradients per example whatever the batch size, leave padding out, and average over examples everywhere;
    the authors' code counts padding and divides the last layer differently.

    Args:
        reduce: ``example`` (the formula); ``token``, absolute gradients of single tokens summed over an example, as
            in the authors' code (one forward pass more); ``batch``, absolute mean gradients of blocks of examples in
            data order, as in Transformers' bertology; ``signed``, ``-mean_i dl_i/dm_h``, the first-order estimate of
            the loss's increase when the head goes.
        normalize: ``none``, or ``l2``: divide by the l2 norm of the layer's scores, as the authors do. It changes how
            the removed heads spread over layers.
        block: Examples a block, for ``batch``.

    The standard error is that of the mean over examples (blocks); with ``l2`` the norm is taken as known.
    """

    reduce: str = "example"
    normalize: str = "none"
    block: int = 32

    def __post_init__(self) -> None:
        one_of("Taylor.reduce", self.reduce, ("example", "token", "batch", "signed"))
        one_of("Taylor.normalize", self.normalize, ("none", "l2"))
        if self.block < 1 or (self.block != 32 and self.reduce != "batch"):
            raise InvalidValue("Taylor.block", "a count of examples, with reduce='batch' only", self.block)

    def estimate(self, problem: Problem) -> Estimate:
        samples = token_gradients(problem) if self.reduce == "token" else unit_gradients(problem)
        n_examples = len(samples)
        if self.reduce == "batch":
            samples = torch.stack([chunk.mean(0).abs() for chunk in samples.split(self.block)])
        elif self.reduce == "signed":
            samples = -samples
        else:
            samples = samples.abs()
        values, errors = mean_and_error(samples)
        if self.normalize == "l2":
            norms = _layer_norms(values, [len(b.site.units) for b in problem.bound])
            values, errors = values / norms, None if errors is None else errors / norms
        return Estimate(values, errors, n_examples)


def mean_and_error(samples: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean over the first axis and its standard error, None for a single sample."""
    if len(samples) < 2:
        return samples.mean(0), None
    return samples.mean(0), samples.std(0) / len(samples) ** 0.5


def _layer_norms(values: Tensor, sizes: list[int]) -> Tensor:
    tiny = torch.finfo(values.dtype).tiny
    return torch.cat([row.norm().clamp(min=tiny).expand(len(row)) for row in values.split(sizes)])
