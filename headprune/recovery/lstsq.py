"""Refits output projections layer by layer by least squares, to match the teacher's stream;
needs no training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from headprune.core.errors import check_one_of
from headprune.recovery._layerwise import (
    PRECISIONS,
    LayerwiseRecovery,
    Precision,
    WeightChange,
    check_max_bytes,
    check_ridge,
)
from headprune.recovery._least_squares import Normal, solved
from headprune.recovery._targets import Target

PRIORS = ("current", "zero")
TOKEN_WEIGHTS = ("equal", "output")

# Which projections: those of the sites from the first one on that was cut, and, if wanted, those
# of feed-forwards that are linear layers. Those without a bias get one. Padding does not count.
#
# How a fit works: the sums are centred and streamed. They are solved by Cholesky, or in
# eigenvectors where they are singular. A norm, scale or gate before the addition ends the stream:
# then T - R is the teacher's own output, and a note says where. A projection that several layers
# share is fitted over all its calls.
#
# Cost: a pass of model and teacher, and per projection one pass of the model that ends at it and
# skips the layers before its own. ``ridge=None`` adds 5 Cholesky factors per projection,
# ``token_weights="output"`` 4 backward passes. Memory: ``in * (in + out)`` numbers of a
# projection, four times as many where its ridge is chosen, and twice ``max_bytes``.


@dataclass(frozen=True)
class Lstsq(LayerwiseRecovery):
    """Refits output projections layer by layer by least squares, without training.

    ``min over W, b of  mean_t |T_t - R_t - W x_t - b|² + λ |W - W₀|²``, in the order of the
    network. x is the projection's input in the model as recovered so far, R what its output is
    added to, T the teacher's stream after that addition.

    Sources: K-prune (Park et al. 2024); for a single layer, Hassibi and Stork 1992.

    Args:
        ridge: λ as a share of the mean variance of x's channels. None chooses it per projection by
            the error on a quarter of the examples.
        prior: W₀: the ``current`` weights, or ``zero``.
        intercept: Fit b.
        feed_forward: Also refit uncut feed-forwards.
        precision: The type to add up in, ``float64`` or ``float32``.
        max_bytes: Memory for the teacher's streams, and again for layers' outputs.
        token_weights: Weight all tokens ``equal``, or by how strongly the teacher's ``output``
            depends on them.

    >>> import copy, torch
    >>> from headprune import MultiHeadAttention, HeadMask, prune_, recover_
    >>> teacher = torch.nn.Sequential(MultiHeadAttention(8, 2), torch.nn.Tanh())
    >>> model = copy.deepcopy(teacher)
    >>> _ = prune_(model, HeadMask.from_keep({"0": [1]}, {"0": 2}))
    >>> report = recover_(model, [torch.randn(64, 5, 8)], Lstsq(), teacher)
    >>> report.metrics["error_after"] < report.metrics["error_before"]
    True
    """

    ridge: float | None = None
    prior: Literal["current", "zero"] = "current"
    intercept: bool = True
    feed_forward: bool = False
    precision: Precision = "float64"
    max_bytes: int = 2**30
    token_weights: Literal["equal", "output"] = "equal"

    def __post_init__(self) -> None:
        if self.ridge is not None:
            check_ridge("Lstsq.ridge", self.ridge)
        check_one_of("Lstsq.token_weights", self.token_weights, TOKEN_WEIGHTS)
        check_one_of("Lstsq.prior", self.prior, PRIORS)
        check_one_of("Lstsq.precision", self.precision, PRECISIONS)
        check_max_bytes("Lstsq.max_bytes", self.max_bytes)

    @property
    def adds_biases(self) -> bool:
        return self.intercept

    @property
    def sensitive(self) -> bool:  # type: ignore[override]
        return self.token_weights == "output"

    def change(self, target: Target, normal: Normal, ridge: float) -> WeightChange:
        if not self.intercept:
            normal = normal.uncentred()
        weight, regular = solved(normal.xx, self.right(target, normal, ridge), ridge)
        if regular:
            return WeightChange(weight)
        note = (
            "its input channels are linearly dependent; the smallest change was chosen. Use more"
            " data or a larger ridge."
        )
        return WeightChange(weight, note)

    def right(self, target: Target, normal: Normal, ridge: float) -> Tensor:
        if self.prior == "current" or not len(normal.xe):
            return normal.xe
        # Towards zero weights: the change is drawn to -W.
        return normal.xe - ridge * normal.xx.diagonal().mean() * target.weight.T.to(normal.xe)
