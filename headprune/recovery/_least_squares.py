"""Sums over tokens that least squares needs, and its solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Moments:
    """Streamed sums of what a projection reads, x, and of what its output should be changed by, e.

    Nothing is read back from the device before ``done``. The first tokens' mean is taken from all
    tokens, so that little is lost where a mean is large against what varies.

    Args:
        dtype: The type to add up in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: list[Tensor] = []
        self._shifts: tuple[Tensor, Tensor] | None = None

    @property
    def begun(self) -> bool:
        """Whether anything was added."""
        return self._shifts is not None

    def add(
        self, x: Tensor, e: Tensor, counted: Tensor | None, weights: Tensor | None = None
    ) -> None:
        """Adds tokens, ``[tokens, in]`` and ``[tokens, out]``, those that are ``counted``,
        ``[tokens]``.

        Args:
            x: What the projection reads.
            e: What its output should be changed by.
            counted: None counts them all.
            weights: ``[tokens]``, of each token in all sums; None is 1.
        """
        x, e = x.to(self._dtype), e.to(self._dtype)
        tokens = torch.full((), len(x), device=x.device) if counted is None else counted.sum()
        if self._shifts is None:
            self._shifts = (
                _sum(x, counted) / tokens.clamp(min=1),
                _sum(e, counted) / tokens.clamp(min=1),
            )
        x, e = (_zeroed(t - shift, counted) for t, shift in zip((x, e), self._shifts, strict=True))
        if weights is None:
            sums = [tokens, tokens, x.sum(0), e.sum(0), x.T @ x, x.T @ e, e.square().sum()]
        else:
            w = _zeroed(weights.to(self._dtype)[:, None], counted)
            wx, we = w * x, w * e
            sums = [tokens, w.sum(), wx.sum(0), we.sum(0), wx.T @ x, wx.T @ e, (we * e).sum()]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums

    def done(self) -> Normal:
        """All that was added."""
        assert self._shifts is not None
        tokens, n, x, e, xx, xe, ee = self._sums
        safe = _divisor(n)
        xx, xe = xx - torch.outer(x, x) / safe, xe - torch.outer(x, e) / safe
        ee = (ee - e.square().sum() / safe).clamp(min=0)
        return Normal(tokens, n, self._shifts[0] + x / safe, self._shifts[1] + e / safe, xx, xe, ee)


@dataclass(frozen=True)
class Normal:
    """Means, and sums of products of what differs from them.

    Args:
        tokens: How many.
        n: The sum of their weights; ``tokens`` where they count alike.
        x_mean: ``[in]``.
        e_mean: ``[out]``.
        xx: ``[in, in]``.
        xe: ``[in, out]``.
        ee: The sum of squares of all of e.
    """

    tokens: Tensor
    n: Tensor
    x_mean: Tensor
    e_mean: Tensor
    xx: Tensor
    xe: Tensor
    ee: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of squares of e as it is."""
        return self.ee + self.n * self.e_mean.square().sum()

    def uncentred(self) -> Normal:
        """The same sums about zero, for a fit without an intercept."""
        xx = self.xx + self.n * torch.outer(self.x_mean, self.x_mean)
        xe = self.xe + self.n * torch.outer(self.x_mean, self.e_mean)
        none = torch.zeros_like(self.x_mean), torch.zeros_like(self.e_mean)
        return Normal(self.tokens, self.n, *none, xx, xe, self.total)

    def to(self, dtype: torch.dtype) -> Normal:
        """The same in another type."""
        means, sums = (
            (self.x_mean.to(dtype), self.e_mean.to(dtype)),
            (self.xx.to(dtype), self.xe.to(dtype)),
        )
        return Normal(self.tokens, self.n.to(dtype), *means, *sums, self.ee.to(dtype))

    def left(self, weight: Tensor, bias: Tensor) -> Tensor:
        """What is left of ``total`` once ``x @ weight + bias`` is taken from e; ``[in, out]`` and
        ``[out]``."""
        rest = self.ee - 2 * (weight * self.xe).sum() + (weight * (self.xx @ weight)).sum()
        shift = self.e_mean - self.x_mean @ weight - bias
        return rest.clamp(min=0) + self.n * shift.square().sum()

    @property
    def finite(self) -> Tensor:
        """``[]``: whether all tokens were."""
        return self.ee.isfinite() & self.xx.isfinite().all() & self.xe.isfinite().all()


def pooled(parts: Sequence[Normal]) -> Normal:
    """Of all tokens of several parts."""
    if len(parts) == 1:
        return parts[0]
    tokens, n = sum_of([p.tokens for p in parts]), sum_of([p.n for p in parts])
    x_mean = sum_of([p.n * p.x_mean for p in parts]) / _divisor(n)
    e_mean = sum_of([p.n * p.e_mean for p in parts]) / _divisor(n)
    # Sums about a part's own mean come to sums about the common mean by what lies between the
    # means.
    weights = torch.stack([p.n for p in parts]).to(x_mean)[:, None]
    x_off = torch.stack([p.x_mean - x_mean for p in parts])  # [parts, in]
    e_off = torch.stack([p.e_mean - e_mean for p in parts])  # [parts, out]
    xx = sum_of([(weights * x_off).T @ x_off, *(p.xx for p in parts)])
    xe = sum_of([(weights * x_off).T @ e_off, *(p.xe for p in parts)])
    ee = sum_of([(weights * e_off.square()).sum(), *(p.ee for p in parts)])
    return Normal(tokens, n, x_mean, e_mean, xx, xe, ee)


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Of one shape."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def solved(matrix: Tensor, right: Tensor, ridge: float) -> tuple[Tensor, bool]:
    """The solution of ``(matrix + ridge * mean of its diagonal * I) solution = right``, and whether
    it is regular.

    Cholesky; a matrix that is singular in its precision is solved in the space of its eigenvalues
    above rounding, by the shortest of its solutions.
    """
    size = len(matrix)
    if not size or not right.numel():
        return right, True
    added = (
        ridge * matrix.diagonal().mean() * torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    )
    factor, failed = torch.linalg.cholesky_ex(matrix + added)
    smallest = torch.finfo(matrix.dtype).eps * size * matrix.diagonal().max()
    if bool((failed == 0) & (factor.diagonal().min().square() > smallest)):
        return torch.cholesky_solve(right, factor), True
    values, vectors = torch.linalg.eigh(matrix + added)
    kept = values > torch.finfo(matrix.dtype).eps * size * values[-1].clamp(min=0)
    inverse = torch.where(
        kept, 1 / torch.where(kept, values, torch.ones_like(values)), torch.zeros_like(values)
    )
    return vectors @ (inverse[:, None] * (vectors.T @ right)), False


def _divisor(n: Tensor) -> Tensor:
    """1 where nothing was added up."""
    return torch.where(n > 0, n, torch.ones_like(n))


def _zeroed(x: Tensor, counted: Tensor | None) -> Tensor:
    """Chosen, not multiplied by 0: attention may leave NaN at padding."""
    return x if counted is None else torch.where(counted[:, None], x, torch.zeros_like(x))


def _sum(x: Tensor, counted: Tensor | None) -> Tensor:
    return _zeroed(x, counted).sum(0)
