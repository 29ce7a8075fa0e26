"""Sums over tokens for least squares, and the solution of the normal equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


class LeastSquaresSums:
    """Streamed sums of a projection's inputs x and of the wanted changes e of its outputs.

    Nothing is read back from the device before ``done``. The mean of the first tokens is
    subtracted from all tokens, so that little precision is lost where a mean is large compared
    with the variation.

    Args:
        dtype: The type to add up in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # Tokens, weights, x [in], e [out], ee [].
        self._sums: list[Tensor] = []
        # xx [in, in], xe [in, out]; they are large, and added to in place.
        self._products: tuple[Tensor, Tensor]
        # What is subtracted from x and e: the means of the first tokens, [in] and [out].
        self._shifts: tuple[Tensor, Tensor] | None = None

    @property
    def begun(self) -> bool:
        """Whether anything was added."""
        return self._shifts is not None

    def add(
        self, x: Tensor, e: Tensor, counted: Tensor | None, weights: Tensor | None = None
    ) -> None:
        """Add tokens to the sums.

        Args:
            x: What the projection reads, ``[tokens, in]``.
            e: The wanted change of its output, ``[tokens, out]``.
            counted: Which tokens count, ``[tokens]``; None counts them all.
            weights: The weight of each token in all sums, ``[tokens]``; None is 1.
        """
        if counted is not None and x.device.type == "cpu":
            # Padding is dropped, which saves work; on a GPU its number would have to be waited for.
            places = counted.nonzero()[:, 0]
            x, e, counted = x[places], e[places], None
            weights = None if weights is None else weights[places]
        x, e = x.to(self._dtype), e.to(self._dtype)
        n_tokens = _count(x, counted)

        # 1. Subtract the mean of the first tokens, and zero what does not count.
        if self._shifts is None:
            divisor = n_tokens.clamp(min=1)
            self._shifts = (_sum(x, counted) / divisor, _sum(e, counted) / divisor)
        x_shift, e_shift = self._shifts
        x = _zeroed(x - x_shift, counted)
        e = _zeroed(e - e_shift, counted)

        # 2. Weight the tokens.
        n, wx, we = n_tokens, x, e
        if weights is not None:
            w = _zeroed(weights.to(self._dtype)[:, None], counted)  # [tokens, 1]
            n, wx, we = w.sum(), w * x, w * e

        # 3. Add up, in the order in which ``done`` reads the sums.
        sums = [n_tokens, n, wx.sum(0), we.sum(0), (we * e).sum()]
        if not self._sums:
            self._sums = sums
            self._products = wx.T @ x, wx.T @ e
            return
        # Not in place: the first two sums may be one tensor.
        self._sums = [before + new for before, new in zip(self._sums, sums, strict=True)]
        xx, xe = self._products
        xx.addmm_(wx.T, x)
        xe.addmm_(wx.T, e)

    def done(self) -> Normal:
        """Return means and centred sums of all tokens that were added."""
        assert self._shifts is not None
        tokens, n, x, e, ee = self._sums
        xx, xe = self._products
        divisor = _divisor(n)
        x_mean = self._shifts[0] + x / divisor
        e_mean = self._shifts[1] + e / divisor
        # sum (x - mean x)(x - mean x) = sum x x - (sum x)(sum x) / n
        xx = xx - torch.outer(x, x) / divisor
        xe = xe - torch.outer(x, e) / divisor
        # Rounding may bring a sum of squares below zero.
        ee = (ee - e.square().sum() / divisor).clamp(min=0)
        return Normal(tokens, n, x_mean, e_mean, xx, xe, ee)


@dataclass(frozen=True)
class Normal:
    """The data of the normal equations: means, and sums of products of deviations from them.

    Args:
        tokens: Number of tokens.
        n: Sum of their weights; ``tokens`` if all weights are 1.
        x_mean: ``[in]``.
        e_mean: ``[out]``.
        xx: ``[in, in]``.
        xe: ``[in, out]``.
        ee: Sum of squares over all tokens and outputs, ``[]``.
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
        """The sum of squares of e about zero."""
        return self.ee + self.n * self.e_mean.square().sum()

    def uncentred(self) -> Normal:
        """Return the same sums about zero, for a fit without an intercept."""
        return Normal(
            tokens=self.tokens,
            n=self.n,
            x_mean=torch.zeros_like(self.x_mean),
            e_mean=torch.zeros_like(self.e_mean),
            xx=self.xx + self.n * torch.outer(self.x_mean, self.x_mean),
            xe=self.xe + self.n * torch.outer(self.x_mean, self.e_mean),
            ee=self.total,
        )

    def to(self, dtype: torch.dtype) -> Normal:
        """Return the same numbers in another type; the count of tokens keeps its own."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tokens"}
        return replace(self, **{name: number.to(dtype) for name, number in numbers.items()})

    def remaining_error(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the sum of squares of ``e - x @ weight - bias``.

        Args:
            weight: ``[in, out]``.
            bias: ``[out]``.
        """
        # |E - X W|² = |E|² - 2 <W, XᵀE> + <W, XᵀX W>, about the means.
        # Rounding may bring it below zero.
        centred = self.ee - 2 * (weight * self.xe).sum() + (weight * (self.xx @ weight)).sum()
        shift = self.e_mean - self.x_mean @ weight - bias
        return centred.clamp(min=0) + self.n * shift.square().sum()

    @property
    def finite(self) -> Tensor:
        """Whether all tokens were finite, ``[]``."""
        # Means need no check: a token that is not finite shows in the products.
        return self.ee.isfinite() & self.xx.isfinite().all() & self.xe.isfinite().all()


def pooled(parts: Sequence[Normal]) -> Normal:
    """Combine the sums of several parts of the tokens."""
    if len(parts) == 1:
        return parts[0]

    # 1. The common means.
    first = parts[0]
    tokens, n = first.tokens, first.n
    x_sum, e_sum = first.n * first.x_mean, first.n * first.e_mean
    for part in parts[1:]:
        tokens = tokens + part.tokens
        n = n + part.n
        x_sum = x_sum + part.n * part.x_mean
        e_sum = e_sum + part.n * part.e_mean
    x_mean = x_sum / _divisor(n)
    e_mean = e_sum / _divisor(n)

    # 2. A sum about a part's own mean becomes one about the common mean by adding the products
    # of the distances between the two means.
    weights = torch.stack([part.n for part in parts]).to(x_mean)[:, None]  # [parts, 1]
    x_off = torch.stack([part.x_mean - x_mean for part in parts])  # [parts, in]
    e_off = torch.stack([part.e_mean - e_mean for part in parts])  # [parts, out]
    xx = (weights * x_off).T @ x_off
    xe = (weights * x_off).T @ e_off
    ee = (weights * e_off.square()).sum()
    for part in parts:
        xx += part.xx
        xe += part.xe
        ee += part.ee
    return Normal(tokens, n, x_mean, e_mean, xx, xe, ee)


def solved(matrix: Tensor, right: Tensor, ridge: float) -> tuple[Tensor, bool]:
    """Solve ``(matrix + ridge * mean of its diagonal * I) solution = right``.

    By Cholesky. A matrix that is singular in its precision is solved in the space of its
    eigenvalues above rounding, by the shortest of its solutions.

    Args:
        matrix: Symmetric and positive semi-definite, ``[in, in]``.
        right: ``[in, out]``.
        ridge: Share of the mean of the diagonal.

    Returns:
        The solution ``[in, out]``, and whether the matrix is regular.
    """
    size = len(matrix)
    if not size or not right.numel():
        return right, True
    identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    regularized = matrix + ridge * matrix.diagonal().mean() * identity
    rounding = torch.finfo(matrix.dtype).eps * size

    # 1. The usual case: a pivot above rounding.
    factor, failed = torch.linalg.cholesky_ex(regularized)
    smallest = rounding * matrix.diagonal().max()
    if bool((failed == 0) & (factor.diagonal().min().square() > smallest)):
        return torch.cholesky_solve(right, factor), True

    # 2. Singular: invert the eigenvalues above rounding only.
    values, vectors = torch.linalg.eigh(regularized)
    usable = values > rounding * values[-1].clamp(min=0)
    divisors = torch.where(usable, values, torch.ones_like(values))
    inverse = torch.where(usable, 1 / divisors, torch.zeros_like(values))
    return vectors @ (inverse[:, None] * (vectors.T @ right)), False


def _count(x: Tensor, counted: Tensor | None) -> Tensor:
    """Return the number of tokens that count, ``[]``."""
    if counted is None:
        return torch.full((), len(x), device=x.device)
    return counted.sum()


def _divisor(n: Tensor) -> Tensor:
    """Return n, or 1 if nothing was added up."""
    return torch.where(n > 0, n, torch.ones_like(n))


def _zeroed(x: Tensor, counted: Tensor | None) -> Tensor:
    """Replace tokens that do not count by zeros."""
    if counted is None:
        return x
    # Not multiplied by 0: attention may leave NaN at padding.
    return torch.where(counted[:, None], x, torch.zeros_like(x))


def _sum(x: Tensor, counted: Tensor | None) -> Tensor:
    return _zeroed(x, counted).sum(0)
