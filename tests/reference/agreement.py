"""Kendall's tau-b by all pairs of units, as it is defined; an oracle, slow on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np


def kendall(a: Any, b: Any) -> float:
    """The cosine between the signs of all differences within ``a`` and within ``b``; NaN where all
    of one are equal."""
    first, second = (np.sign(x[:, None] - x).ravel() for x in map(np.asarray, (a, b)))
    size = np.sqrt((first * first).sum() * (second * second).sum())
    return float(np.clip((first * second).sum() / size, -1, 1)) if size else float("nan")
