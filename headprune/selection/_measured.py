"""Losses of plans, as the callable ``loss`` of ``hp.select`` measures them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headprune.core.errors import InvalidValue
from headprune.selection._base import Position, Problem

Floats = NDArray[np.float64]

#: Differences of losses below this, relative to the largest loss, are rounding.
_SAME = 1e-6


def check_margin(where: str, margin: object) -> None:
    """Refuse what is no number of standard errors.

    Raises:
        InvalidValue: it is none.
    """
    number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if not number or not margin >= 0:  # type: ignore[operator]  # also refuses NaN
        raise InvalidValue(where, "a number of standard errors >= 0", repr(margin))


def are_lower(losses: Floats, margin: float) -> NDArray[np.bool_]:
    """Which plans lose less than the first one, ``[plans - 1]``.

    Args:
        losses: ``[plans, examples]``.
        margin: How far below zero a plan's mean difference must be, in its standard errors.
    """
    differences = losses[1:] - losses[0]
    errors = differences.std(1, ddof=1) / differences.shape[1] ** 0.5
    least = np.maximum(margin * errors, _SAME * np.abs(losses).max())
    found: NDArray[np.bool_] = differences.mean(1) < -least
    return found


def measured_losses(problem: Problem, plans: list[frozenset[Position]]) -> Floats:
    """The rise of each example's loss under each plan, ``[plans, examples]``.

    Raises:
        InvalidValue: the callable returns something else, or has a single example.
    """
    assert problem.loss is not None
    losses = np.asarray(problem.loss(list(map(problem.mask, plans))), dtype=np.float64)
    where = "what select(loss=) returns"
    # One example has no standard error.
    if losses.ndim != 2 or len(losses) != len(plans) or losses.shape[1] < 2:
        must = f"[masks, examples], {len(plans)} masks and at least 2 examples"
        raise InvalidValue(where, must, f"the shape {list(losses.shape)}")
    if not np.isfinite(losses).all():
        raise InvalidValue(where, "finite", "NaN or infinite numbers")
    return losses
