"""Order training batches so that sentences of like length share a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

#: Batches whose sentences are sorted together: enough for little padding, few enough to keep
#: batches at random.
_POOL = 50


class LikeLengths(Sampler[list[int]]):
    """Batches of rows of like length, in another order in every pass.

    Rows are shuffled, sorted by length within pools of fifty batches, and cut into batches, which
    are shuffled too.

    Args:
        lengths: Length of every row.
        size: Rows per batch; the last batch of a pass may have fewer.
        generator: Draws the orders; its state continues an interrupted training.

    >>> batches = list(LikeLengths([1, 9, 1, 9], 2, torch.Generator().manual_seed(0)))
    >>> sorted(map(sorted, batches))
    [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        size: int,
        generator: torch.Generator,
    ) -> None:
        self.lengths = list(lengths)
        self.size = size
        self.generator = generator

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.size)  # rounded up

    def __iter__(self) -> Iterator[list[int]]:
        rows = torch.randperm(len(self.lengths), generator=self.generator).tolist()
        batches = []
        rows_per_pool = self.size * _POOL
        for first in range(0, len(rows), rows_per_pool):
            pool = sorted(rows[first : first + rows_per_pool], key=self.lengths.__getitem__)
            batches += [pool[i : i + self.size] for i in range(0, len(pool), self.size)]
        for number in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[number]
