"""Invert a symmetric matrix without waiting to know whether that is possible."""

from __future__ import annotations

import torch
from torch import Tensor


def inverted(a: Tensor) -> tuple[Tensor, Tensor]:
    """Invert a positive definite matrix by Cholesky's factor.

    Args:
        a: ``[..., n, n]``, symmetric.

    Returns:
        ``[..., n, n]``, the inverse, nothing of use where there is none; and ``[...]``, True where
        there is none.
    """
    factor, code = torch.linalg.cholesky_ex(a)
    if a.device.type == "cpu":
        return torch.cholesky_inverse(factor), code != 0
    # Elsewhere cholesky_inverse reads its own error codes; the solution for the identity does not.
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.cholesky_solve(identity.expand_as(a), factor), code != 0
