"""Prune units: the cost and the score of each set of heads that is removed together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from itertools import islice
from typing import TypeVar

from headprune.core.codec import RUNS

_T = TypeVar("_T")


def by_site(flat: Iterable[_T], sizes: Iterable[int]) -> tuple[tuple[_T, ...], ...]:
    """One tuple per site, from values of all sites one after the other.

    >>> by_site("abc", [1, 2])
    (('a',), ('b', 'c'))
    """
    rest = iter(flat)
    return tuple(tuple(islice(rest, size)) for size in sizes)


@dataclass(frozen=True)
class Cost:
    """Cost of a part of a model, for any sequence length.

    Args:
        params: Parameters.
        macs_fixed: Multiply-adds per example that do not depend on its length.
        macs_per_token: Multiply-adds per token.
        macs_per_pair: Multiply-adds per pair of a query token and a key token.
        kv_bytes: Bytes of KV cache per token.
    """

    params: int
    macs_fixed: int
    macs_per_token: int
    macs_per_pair: int
    kv_bytes: int

    def macs(self, length: int) -> int:
        """Multiply-adds of one example of ``length`` tokens."""
        return self.macs_fixed + self.macs_per_token * length + self.macs_per_pair * length**2

    @classmethod
    def sum(cls, costs: Iterable[Cost]) -> Cost:
        """Total cost of several parts."""
        # The row of zeros gives the cost of no parts at all.
        columns = zip((0, 0, 0, 0, 0), *map(astuple, costs), strict=True)
        return cls(*map(sum, columns))


@dataclass(frozen=True)
class CostTable:
    """Costs of the whole model and of every prune unit.

    Args:
        total: The whole model.
        units: For every site, the cost of each unit, in the order of ``AttentionSite.units``.
        length: Tokens per example where the total was measured.
    """

    total: Cost
    units: tuple[tuple[Cost, ...], ...] = field(metadata=RUNS)
    length: int


@dataclass(frozen=True)
class ScoredUnit:
    """A prune unit with its score.

    Args:
        site: Position of its site in ``HeadScores.sites``.
        unit: Its position in ``AttentionSite.units``.
        name: Name of the site.
        heads: Original indices of its heads.
        value: Its score.
        standard_error: Of the score; None where the scorer has none.
        cost: What its heads cost; None where the model was not measured.
    """

    site: int
    unit: int
    name: str
    heads: tuple[int, ...]
    value: float
    standard_error: float | None
    cost: Cost | None
