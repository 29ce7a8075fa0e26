"""Rows of numbers as they come: whole as long as there is room, then their sums and means of
neighbouring ones."""

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


class Rows:
    """Rows ``[rows, units]`` in fp64 on the CPU, in memory that does not grow with them.

    Mean and standard error are those of all rows. Of the rows themselves stay means of neighbours,
    in equal blocks that double whenever there is no room.
    """

    def __init__(self) -> None:
        self.count = 0
        self._block = 1
        self._kept: list[Tensor] = []
        self._begun, self._n_begun = torch.zeros(()), 0  # the sum of a block that is not full
        self._mean, self._squares = torch.zeros(()), torch.zeros(())

    def add(self, rows: Tensor) -> None:
        """Adds rows, in order."""
        if not len(rows):
            return
        here, total = rows.mean(0), self.count + len(rows)
        apart = here - self._mean
        self._squares = (
            self._squares
            + (rows - here).square().sum(0)
            + apart.square() * self.count * len(rows) / total
        )
        self._mean, self.count = self._mean + apart * len(rows) / total, total
        missing = self._block - self._n_begun
        if len(rows) >= missing:
            self._kept.append((self._begun + rows[:missing].sum(0)).unsqueeze(0) / self._block)
            self._begun, self._n_begun, rows = torch.zeros(()), 0, rows[missing:]
        n_full = len(rows) // self._block * self._block if not self._n_begun else 0
        if n_full:
            self._kept.append(rows[:n_full].unflatten(0, (-1, self._block)).mean(1))
        self._begun, self._n_begun = (
            self._begun + rows[n_full:].sum(0),
            self._n_begun + len(rows) - n_full,
        )
        if sum(kept.nbytes for kept in self._kept) > room():
            self._halve()

    def _halve(self) -> None:
        kept = torch.cat(self._kept)
        if len(kept) % 2:
            self._begun, self._n_begun = (
                self._begun + kept[-1] * self._block,
                self._n_begun + self._block,
            )
        self._kept = [kept[: len(kept) // 2 * 2].unflatten(0, (-1, 2)).mean(1)]
        self._block *= 2

    @property
    def samples(self) -> Tensor:
        """Means of equal blocks of neighbouring rows; a last partial one is left out."""
        return torch.cat(self._kept)

    @property
    def mean_and_error(self) -> tuple[Tensor, Tensor | None]:
        """Of all rows; no error for a single one."""
        return self._mean, (
            self._squares / (self.count - 1) / self.count
        ).sqrt() if self.count > 1 else None

    def divided(self, by: Tensor) -> Rows:
        """The same of rows that were divided by a number a unit."""
        found = Rows()
        found.count, found._block, found._n_begun = self.count, self._block, self._n_begun
        found._kept, found._begun = [kept / by for kept in self._kept], self._begun / by
        found._mean, found._squares = self._mean / by, self._squares / by.square()
        return found


class Held:
    """Rows of parts that come one by one, kept as long as there is room for them.

    Args:
        feed: Takes all parts, in order, from where there is no room any more.
    """

    def __init__(self, feed: Callable[[Tensor], None]) -> None:
        self._feed, self._held, self._fed = feed, list[Tensor](), False

    def add(self, part: Tensor) -> None:
        """Adds rows, in order."""
        self._held.append(part)
        if self._fed or sum(h.nbytes for h in self._held) > room():
            for held in self._held:
                self._feed(held)
            self._held, self._fed = [], True

    @property
    def whole(self) -> Tensor | None:
        """All rows; None where they were fed."""
        return None if self._fed else torch.cat(self._held)


class Collected:
    """All rows of parts that come one by one, as long as there is room for them."""

    def __init__(self) -> None:
        self._rows = Rows()
        self._held = Held(self._rows.add)

    def add(self, part: Tensor) -> None:
        """Adds rows, in order."""
        self._held.add(part)

    @property
    def rows(self) -> Tensor | Rows:
        """What there was room for."""
        whole = self._held.whole
        return self._rows if whole is None else whole


def collected(parts: Iterable[Tensor]) -> Tensor | Rows:
    """All rows of the parts, as long as there is room for them."""
    found = Collected()
    for part in parts:
        found.add(part)
    return found.rows


class Moments:
    """What a test of paired differences needs of rows ``[rows, units]``, in memory that does not
    grow with them.

    >>> seen = Moments()
    >>> seen.add(torch.tensor([[0.0, 1.0], [4.0, 1.0]], dtype=torch.float64))
    >>> seen.count, seen.mean.tolist(), seen.covariance.tolist(), seen.widest.tolist()
    (2, [2.0, 1.0], [[4.0, 0.0], [0.0, 0.0]], [[0.0, 3.0], [1.0, 0.0]])
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean, self._products, self.widest = (
            torch.zeros(()),
            torch.zeros(()),
            torch.tensor(-torch.inf),
        )

    def add(self, rows: Tensor) -> None:
        """Adds rows."""
        here, total = rows.mean(0), self.count + len(rows)
        apart, centred = here - self.mean, rows - here
        self._products = (
            self._products
            + centred.T @ centred
            + apart.outer(apart) * (self.count * len(rows) / total)
        )
        self.mean, self.count = self.mean + apart * len(rows) / total, total
        widest = torch.stack([(column[:, None] - rows).amax(0) for column in rows.unbind(1)])
        self.widest = torch.maximum(widest, self.widest.to(widest))

    @property
    def covariance(self) -> Tensor:
        """``[units, units]``, over all rows."""
        return self._products / self.count
