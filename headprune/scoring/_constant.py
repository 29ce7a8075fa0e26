"""Scorers part of whose work does not grow with the data."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from headprune.scoring._base import Scorer


class ConstantWork(Scorer):
    """A scorer that computes with matrices of every site after its passes over the data.

    It does so ``blocks + 1`` times at most: with all examples, and without each block of them.
    """

    #: Blocks of examples.
    blocks: int
    #: Matrices of ``width ** 2`` fp64 numbers that it keeps per site and block.
    matrices: ClassVar[int] = 1
    #: Whether all examples are one block where feed-forwards are scored.
    one_block_with_neurons: ClassVar[bool] = False

    @abstractmethod
    def only_passes(self) -> Scorer:
        """A scorer with the same passes over the data and nothing after them, to time; its values
        mean nothing."""
