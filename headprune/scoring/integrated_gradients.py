"""The gates' gradients from no heads to all heads: Aumann-Shapley values of the heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune.core.errors import check_count
from headprune.gating.context import gated
from headprune.model.sites import sites_of
from headprune.model.transfers import in_fp64
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.scoring._coupling import noted
from headprune.scoring._gates import gate_shapes, n_units, open_gates
from headprune.scoring._gradients import loss_gradients
from headprune.scoring._rows import collected

#: A gap of more than this share of the whole is noted.
_GAP = 0.05


@dataclass(frozen=True)
class IntegratedGradients(Scorer):
    """``I_h = -mean_i int_0^1 dl_i/dm_h (a, ..., a) da``: ``points`` passes forward and backward,
    two forward, needs labels.

    All gates of all sites go from 0 to 1 together, and each head gets its share of the loss that is
    saved thereby: ``sum_h I_h = L(no heads) - L(all heads)``, up to the quadrature. Higher is
    more important; negative where a head costs loss. Unlike ``taylor`` it sees a head whose slope
    at 1 is flat because others do the same.

    Source: Sundararajan, Taly, Yan 2017, "Axiomatic Attribution for Deep Networks", section 3, and
    Aumann, Shapley 1974 for a game with shares. Differs in the variable, gates instead of inputs
    with the base 0, and in the sum: Gauss-Legendre, exact for polynomials up to degree
    ``2 points - 1``, instead of equal steps.

    When: labels, and many heads are removed together: it sees heads that can replace each other.

    Args:
        points: Of the quadrature. The loss may change fast where the gates are almost closed,
            because a norm scales small outputs up; there is a note where the sum over heads misses
            the whole by more than 5 %.

    The standard error is that of the mean over examples.
    """

    points: int = 8

    def __post_init__(self) -> None:
        check_count("IntegratedGradients.points", self.points)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        nodes, weights = np.polynomial.legendre.leggauss(self.points)  # on [-1, 1]
        places = [((1 + float(x)) / 2, float(w) / 2) for x, w in zip(nodes, weights, strict=True)]
        whole = 0.0  # the loss that all heads save, summed over examples

        def of_batch(number: int, batch: Any) -> Tensor:
            parts = []  # per place [examples, units]
            for at, weight in places:
                gradients = loss_gradients(problem, number, batch, at)
                parts.append(weight * in_fp64(gradients))
            shares = -torch.stack(parts).sum(0)
            return torch.cat([shares, _saved(problem, number, batch).unsqueeze(1)], 1)

        def without_whole() -> Iterator[Tensor]:
            # The last column is summed up here, for the note.
            nonlocal whole
            for piece in problem.pieces("integrated gradients", of_batch, n_units(problem) + 1):
                whole += float(piece[:, -1].sum())
                yield piece[:, :-1]

        estimate = noted(problem, averaged(collected(without_whole())))
        gap = _gap(float(estimate.values.sum()), whole / estimate.n_examples)
        return replace(estimate, notes=(*estimate.notes, *gap))


@torch.inference_mode(False)
@torch.no_grad()
def _saved(problem: ScoringProblem, number: int, batch: Any) -> Tensor:
    """``[examples]``: the loss without any head minus the loss."""
    losses = []
    for at in (0.0, 1.0):
        gates = open_gates(problem, gate_shapes(problem, batch), at)
        with gated(problem.model, gates, sites_of(problem.bound)):
            losses.append(in_fp64(problem.losses(number, batch)))
    without, whole = losses
    return without - whole


def _gap(total: float, whole: float) -> tuple[str, ...]:
    """A note where the shares do not add up to the whole, because the quadrature is too coarse."""
    if abs(total - whole) <= _GAP * abs(whole):
        return ()
    note = (
        f"The scores sum to {total:.4g}, but the loss rises by {whole:.4g} without any head: take"
        " more points."
    )
    return (note,)
