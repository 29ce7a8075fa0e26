"""Rows of numbers as they come: whole as long as there is room, then summarized."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from headprune.core import samples

#: Rows are kept whole up to so many times what is kept of samples in the end (``samples.LIMIT``).
_TIMES = 2


def room() -> int:
    """Bytes of rows that are kept whole."""
    return _TIMES * samples.LIMIT


class SummarizedRows:
    """Rows ``[rows, units]`` in fp64 on the CPU, in memory that does not grow with them.

    Mean and standard error are those of all rows. Of the rows themselves, means of blocks of
    neighbours are kept; the blocks double whenever there is no room.
    """

    def __init__(self) -> None:
        self.count = 0
        # Of all rows [units]: the mean and the sum of squared deviations.
        self._mean = torch.zeros(())
        self._squares = torch.zeros(())
        # Rows per block, and means of full blocks [blocks, units].
        self._block = 1
        self._kept: list[Tensor] = []
        # The sum of the rows in a block that is not full, and how many they are.
        self._begun = torch.zeros(())
        self._n_begun = 0

    def add(self, rows: Tensor) -> None:
        """Add rows, in order."""
        if not len(rows):
            return
        self._add_moments(rows)
        self._add_blocks(rows)
        if sum(kept.nbytes for kept in self._kept) > room():
            self._halve()

    def _add_moments(self, rows: Tensor) -> None:
        """Merge mean and squared deviations of two sets of rows (Chan et al. 1979)."""
        mean = rows.mean(0)
        total = self.count + len(rows)
        delta = mean - self._mean
        within = (rows - mean).square().sum(0)
        between = delta.square() * self.count * len(rows) / total
        self._squares = self._squares + within + between
        self._mean = self._mean + delta * len(rows) / total
        self.count = total

    def _add_blocks(self, rows: Tensor) -> None:
        # 1. Fill the block that was begun.
        n_missing = self._block - self._n_begun
        if len(rows) >= n_missing:
            total = self._begun + rows[:n_missing].sum(0)
            self._kept.append(total.unsqueeze(0) / self._block)
            self._begun, self._n_begun = torch.zeros(()), 0
            rows = rows[n_missing:]
        # 2. Take whole blocks.
        n_full = 0
        if not self._n_begun:
            n_full = len(rows) // self._block * self._block
        if n_full:
            self._kept.append(rows[:n_full].unflatten(0, (-1, self._block)).mean(1))
        # 3. Begin a block with what remains.
        self._begun = self._begun + rows[n_full:].sum(0)
        self._n_begun += len(rows) - n_full

    def _halve(self) -> None:
        """Merge pairs of blocks."""
        kept = torch.cat(self._kept)
        if len(kept) % 2:
            # The last block has no neighbour yet: it begins the next one.
            self._begun = self._begun + kept[-1] * self._block
            self._n_begun += self._block
        pairs = kept[: len(kept) // 2 * 2].unflatten(0, (-1, 2))
        self._kept = [pairs.mean(1)]
        self._block *= 2

    @property
    def samples(self) -> Tensor:
        """Means of equal blocks of neighbouring rows, without a last partial one."""
        return torch.cat(self._kept)

    @property
    def mean_and_error(self) -> tuple[Tensor, Tensor | None]:
        """Mean of all rows and its standard error; no error for a single row."""
        if self.count < 2:
            return self._mean, None
        return self._mean, (self._squares / (self.count - 1) / self.count).sqrt()

    def divided(self, by: Tensor) -> SummarizedRows:
        """The summary of the rows divided by ``by``, ``[units]``."""
        result = SummarizedRows()
        result.count = self.count
        result._mean = self._mean / by
        result._squares = self._squares / by.square()
        result._block = self._block
        result._kept = [kept / by for kept in self._kept]
        result._begun = self._begun / by
        result._n_begun = self._n_begun
        return result


class BoundedRows:
    """Rows that are kept as long as there is room for them.

    Args:
        overflow: Takes all rows, in order, when there is no room any more.
    """

    def __init__(self, overflow: Callable[[Tensor], None]) -> None:
        self._overflow = overflow
        self._kept: list[Tensor] = []
        self._is_full = False

    def add(self, part: Tensor) -> None:
        """Add rows, in order."""
        self._kept.append(part)
        if self._is_full or sum(kept.nbytes for kept in self._kept) > room():
            for kept in self._kept:
                self._overflow(kept)
            self._kept = []
            self._is_full = True

    @property
    def whole(self) -> Tensor | None:
        """All rows; None where there was no room."""
        return None if self._is_full else torch.cat(self._kept)


class CollectedRows(BoundedRows):
    """Rows, whole as long as there is room for them, then summarized."""

    def __init__(self) -> None:
        self._summary = SummarizedRows()
        super().__init__(self._summary.add)

    @property
    def rows(self) -> Tensor | SummarizedRows:
        """All rows, or their summary where there was no room."""
        whole = self.whole
        return self._summary if whole is None else whole


def collected(parts: Iterable[Tensor]) -> Tensor | SummarizedRows:
    """All rows of the parts, or their summary where there is no room for them."""
    rows = CollectedRows()
    for part in parts:
        rows.add(part)
    return rows.rows


class PairedMoments:
    """Moments of rows ``[rows, units]`` that a test of paired differences needs.

    Memory does not grow with the rows.

    >>> moments = PairedMoments()
    >>> moments.add(torch.tensor([[0.0, 1.0], [4.0, 1.0]], dtype=torch.float64))
    >>> moments.count, moments.mean.tolist(), moments.covariance.tolist(), moments.widest.tolist()
    (2, [2.0, 1.0], [[4.0, 0.0], [0.0, 0.0]], [[0.0, 3.0], [1.0, 0.0]])
    """

    def __init__(self) -> None:
        self.count = 0
        #: ``[units]``.
        self.mean = torch.zeros(())
        #: ``[units, units]``: the largest difference between two units in one row.
        self.widest = torch.tensor(-torch.inf)
        # [units, units], sum over rows of the products of deviations from the mean.
        self._products = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        """Add rows."""
        mean = rows.mean(0)
        total = self.count + len(rows)
        delta, centred = mean - self.mean, rows - mean
        between = delta.outer(delta) * (self.count * len(rows) / total)
        self._products = self._products + centred.T @ centred + between
        self.mean = self.mean + delta * len(rows) / total
        self.count = total
        # Column by column: all differences at once would be [rows, units, units].
        widest = torch.stack([(column[:, None] - rows).amax(0) for column in rows.unbind(1)])
        self.widest = torch.maximum(widest, self.widest.to(widest))

    @property
    def covariance(self) -> Tensor:
        """``[units, units]``, over all rows."""
        return self._products / self.count
