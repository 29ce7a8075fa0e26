"""The inverse of a symmetric matrix, without a look at whether there is one: to look waits for an
accelerator."""

from __future__ import annotations

import torch
from torch import Tensor


def inverted(a: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of a positive definite matrix by Cholesky's factor, and whether there was none.

    Args:
        a: ``[..., n, n]``, symmetric.

    Returns:
        ``[..., n, n]``, nothing of use where it failed; and ``[...]``, True where it did.
    """
    factor, code = torch.linalg.cholesky_ex(a)
    if a.device.type == "cpu":
        return torch.cholesky_inverse(factor), code != 0
    # Elsewhere cholesky_inverse reads its own error codes; the solution for the identity does not.
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.cholesky_solve(identity.expand_as(a), factor), code != 0
