"""Refits output projections by least squares, layer by layer, so that the stream is the teacher's;
no training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.recovery._layerwise import (
    Change,
    LayerwiseRecovery,
    Precision,
    check_max_bytes,
    check_precision,
    check_ridge,
)
from headprune.recovery._least_squares import Normal, solved
from headprune.recovery._targets import Target

PRIORS = ("current", "zero")
TOKEN_WEIGHTS = ("equal", "output")


@dataclass(frozen=True)
class Lstsq(LayerwiseRecovery):
    """Refits output projections by least squares, layer by layer, so that the stream is the
    teacher's; no training.

    In the order of the network, from the first attention on that lost heads, for every output
    projection ``min over W, b of  mean_t |T_t - R_t - W x_t - b|² + λ |W - W₀|²``: x is what the
    projection reads in the model as recovered so far, R what its output is added to there, T the
    teacher's stream after that addition; tokens that are no padding. So what earlier layers lack is
    made up for by later ones. Normal equations of centred sums, streamed; Cholesky, or eigenvectors
    where they are singular.

    Sources: knowledge-preserving weight tuning, Park et al. 2024 (K-prune); for one layer alone,
    the update of Hassibi, Stork 1992. We fit an intercept, draw W to the weights as they are, and
    go by the stream. A norm, scale or gate before the addition ends that: then T - R is the
    teacher's own output, and a note says where. One that several layers share is fitted over all
    its calls. Projections without a bias get one.

    Cost: a pass of model and teacher, and for every projection one more of the model that ends at
    it and leaves out the layers before its own; for ``ridge=None`` 16 Cholesky factors, for
    ``token_weights="output"`` 4 backward passes.
    Memory: a projection's sums, ``in * (in + out)`` numbers, and `max_bytes` twice; see
    docs/concepts.md.

    Args:
        ridge: λ as a share of the mean variance of x's channels. None chooses it for each
            projection, by the error on held-out examples; what no fit improves stays as it is.
        prior: What W is drawn to, ``W₀``: the weights as they are (``current``), or none
            (``zero``).
        intercept: Fit b; without, biases stay as they are.
        feed_forward: Also refit the feed-forward's output projection, where it is a linear layer
            whose output is added to the stream.
        precision: The type to add up in, ``float64`` or, faster on most GPUs, ``float32``.
        max_bytes: Of the teacher's streams that are kept, and again of layers' outputs; 0 keeps
            none, and takes longer.
        token_weights: Weigh tokens in the sums ``equal``, or by how much the teacher's ``output``
            feels them.

    >>> import copy, torch
    >>> from headprune import MultiHeadAttention, HeadMask, prune_, recover_
    >>> teacher = torch.nn.Sequential(MultiHeadAttention(8, 2), torch.nn.Tanh())
    >>> model = copy.deepcopy(teacher)
    >>> _ = prune_(model, HeadMask.from_keep({"0": [1]}, {"0": 2}))
    >>> report = recover_(model, [torch.randn(4, 5, 8)], Lstsq(), teacher)
    >>> report.metrics["error_after"] < report.metrics["error_before"]
    True
    """

    ridge: float | None = 0.3
    prior: Literal["current", "zero"] = "current"
    intercept: bool = True
    feed_forward: bool = False
    precision: Precision = "float64"
    max_bytes: int = 2**30
    token_weights: Literal["equal", "output"] = "equal"

    def __post_init__(self) -> None:
        if self.ridge is not None:
            check_ridge("Lstsq.ridge", self.ridge)
        if self.token_weights not in TOKEN_WEIGHTS:
            must = f"one of {', '.join(TOKEN_WEIGHTS)}"
            raise InvalidValue("Lstsq.token_weights", must, repr(self.token_weights))
        if self.prior not in PRIORS:
            raise InvalidValue("Lstsq.prior", f"one of {', '.join(PRIORS)}", repr(self.prior))
        check_precision("Lstsq.precision", self.precision)
        check_max_bytes("Lstsq.max_bytes", self.max_bytes)

    @property
    def adds_biases(self) -> bool:
        return self.intercept

    @property
    def sensitive(self) -> bool:  # type: ignore[override]
        return self.token_weights == "output"

    def change(self, target: Target, normal: Normal, ridge: float) -> Change:
        normal = normal if self.intercept else normal.uncentred()
        weight, regular = solved(normal.xx, self.right(target, normal, ridge), ridge)
        note = (
            ""
            if regular
            else (
                "its inputs depend on each other; the smallest change was taken. More data or"
                " ridge."
            )
        )
        return Change(weight, note)

    def right(self, target: Target, normal: Normal, ridge: float) -> Tensor:
        if self.prior == "current" or not len(normal.xe):
            return normal.xe
        return normal.xe - ridge * normal.xx.diagonal().mean() * target.weight.T.to(normal.xe)
