"""Losses of plans, as the callable ``loss`` of ``hp.select`` measures them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headprune.core.errors import InvalidValue
from headprune.selection._base import Position, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

#: Differences of losses below this, relative to the largest loss, are rounding.
SAME = 1e-6


def measured_losses(problem: Problem, plans: list[frozenset[Position]]) -> Floats:
    """The rise of each example's loss under each plan, ``[plans, examples]``.

    Raises:
        InvalidValue: the callable returns something else, or has a single example.
    """
    assert problem.loss is not None
    losses = np.asarray(problem.loss([problem.mask(plan) for plan in plans]), dtype=np.float64)
    where = "what select(loss=) returns"
    # One example has no standard error.
    if losses.ndim != 2 or len(losses) != len(plans) or losses.shape[1] < 2:
        must = f"[masks, examples], {len(plans)} masks and at least 2 examples"
        raise InvalidValue(where, must, f"the shape {list(losses.shape)}")
    if not np.isfinite(losses).all():
        raise InvalidValue(where, "finite", "NaN or infinite numbers")
    return losses
