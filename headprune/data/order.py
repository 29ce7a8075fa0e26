"""The order of training batches where padding would cost most: sentences of like length
together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

#: Batches whose sentences are sorted together: enough for little padding, few enough to keep
#: batches at random.
_POOL = 50


class LikeLengths(Sampler[list[int]]):
    """Batches of rows of like length, in another order in every pass.

    Rows are shuffled, sorted by length within pools of fifty batches, cut into batches, and these
    are shuffled.

    Args:
        lengths: Of every row.
        size: Rows a batch; the last one of a pass may have fewer.
        generator: Draws the orders, and tells a training that goes on where it stands.

    >>> batches = list(LikeLengths([1, 9, 1, 9], 2, torch.Generator().manual_seed(0)))
    >>> sorted(map(sorted, batches))
    [[0, 2], [1, 3]]
    """

    def __init__(self, lengths: Sequence[int], size: int, generator: torch.Generator) -> None:
        self.lengths, self.size, self.generator = list(lengths), size, generator

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        rows = torch.randperm(len(self.lengths), generator=self.generator).tolist()
        step = self.size * _POOL
        pools = (
            sorted(rows[i : i + step], key=self.lengths.__getitem__)
            for i in range(0, len(rows), step)
        )
        batches = [
            pool[i : i + self.size] for pool in pools for i in range(0, len(pool), self.size)
        ]
        for number in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[number]
