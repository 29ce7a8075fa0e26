"""The only place with head-to-row arithmetic: which indices of a tensor axis belong to which head.

Plain integers, no torch. A *slab* is one axis of one tensor that is made of per-head blocks; its *unit* says
what the blocks are and its *packing* how they are laid out:

========== ======================= =========================================
unit       one block for each      width of a block
========== ======================= =========================================
query      query head              head_dim
key        key/value head          head_dim
value      key/value head          value_dim
context    query head              value_dim (input of the output projection)
head       query head              1 (sinks, position-bias tables)
========== ======================= =========================================

Several units on one axis are a fused projection: ``sequential`` packing lays all blocks of one unit before the
next ([q0 q1 k0 k1 v0 v1]), ``grouped`` packing lays them group by group ([q0 k0 v0 q1 k1 v1]; with grouped
queries each group is its query heads, then its key, then its value).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headprune.core.errors import InvalidValue

Unit = Literal["query", "key", "value", "context", "head"]
Packing = Literal["sequential", "grouped"]
UNITS: tuple[str, ...] = ("query", "key", "value", "context", "head")


@dataclass(frozen=True)
class HeadGeometry:
    """How many heads a module has now, and how wide they are.

    Args:
        n_query_heads: Query heads, the heads that scores and plans speak of.
        n_kv_heads: Key/value heads; divides ``n_query_heads``, consecutive query heads share one.
        head_dim: Width of a query or key head.
        value_dim: Width of a value head.
    """

    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if min(self.n_query_heads, self.n_kv_heads) < 0 or min(self.head_dim, self.value_dim) < 1:
            raise InvalidValue("HeadGeometry", "made of counts >= 0 and widths >= 1", self)
        if (self.n_kv_heads == 0) != (self.n_query_heads == 0) or (
            self.n_kv_heads and self.n_query_heads % self.n_kv_heads
        ):
            raise InvalidValue("n_kv_heads", f"a divisor of the {self.n_query_heads} query heads", self.n_kv_heads)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head (0 when there are no heads)."""
        return self.n_query_heads // self.n_kv_heads if self.n_kv_heads else 0

    def width(self, unit: str) -> int:
        """Width of one block of ``unit``."""
        return {"query": self.head_dim, "key": self.head_dim, "head": 1}.get(unit, self.value_dim)

    def count(self, unit: str) -> int:
        """Number of blocks of ``unit``."""
        return self.n_kv_heads if unit in ("key", "value") else self.n_query_heads


def check_slab(units: Sequence[str], packing: str) -> None:
    """Refuses an unknown unit or packing by name."""
    for unit in units:
        if unit not in UNITS:
            raise InvalidValue("HeadSlab.unit", f"one of {', '.join(UNITS)}", repr(unit))
    if packing not in ("sequential", "grouped"):
        raise InvalidValue("HeadSlab.packing", "'sequential' or 'grouped'", repr(packing))


def axis_size(geometry: HeadGeometry, units: Sequence[str]) -> int:
    """Length of the axis that holds all blocks of ``units``.

    >>> axis_size(HeadGeometry(4, 2, 3, 5), ("query", "key", "value"))
    28
    """
    return sum(geometry.count(u) * geometry.width(u) for u in units)


def blocks(geometry: HeadGeometry, units: Sequence[str], packing: str = "sequential") -> Iterator[tuple[str, int, int]]:
    """Yields ``(unit, position of the head, width)`` in the order in which the blocks lie on the axis."""
    if packing == "sequential":
        for unit in units:
            for head in range(geometry.count(unit)):
                yield unit, head, geometry.width(unit)
        return
    for group in range(geometry.n_kv_heads):
        for unit in units:
            per_group = geometry.count(unit) // geometry.n_kv_heads
            for member in range(per_group):
                yield unit, group * per_group + member, geometry.width(unit)


def kept_rows(
    geometry: HeadGeometry,
    units: Sequence[str],
    packing: str,
    keep_query: Iterable[int],
    keep_kv: Iterable[int],
) -> list[int]:
    """Indices of the axis that stay when the query heads ``keep_query`` and key/value heads ``keep_kv`` stay.

    Heads are positions in the present module, not original indices.

    >>> kept_rows(HeadGeometry(2, 2, 2, 2), ("query", "key", "value"), "sequential", [1], [1])
    [2, 3, 6, 7, 10, 11]
    >>> kept_rows(HeadGeometry(2, 2, 2, 2), ("query", "key", "value"), "grouped", [1], [1])
    [6, 7, 8, 9, 10, 11]
    """
    query, kv = frozenset(keep_query), frozenset(keep_kv)
    rows: list[int] = []
    start = 0
    for unit, head, width in blocks(geometry, units, packing):
        if head in (kv if unit in ("key", "value") else query):
            rows.extend(range(start, start + width))
        start += width
    return rows


def rows_of(geometry: HeadGeometry, units: Sequence[str], packing: str, unit: str, heads: Iterable[int]) -> list[int]:
    """Indices of the axis that hold the ``unit`` blocks of some heads, and nothing else.

    >>> rows_of(HeadGeometry(2, 2, 2, 2), ("query", "key", "value"), "sequential", "value", [1])
    [10, 11]
    """
    wanted = frozenset(heads)
    rows: list[int] = []
    start = 0
    for kind, head, width in blocks(geometry, units, packing):
        if kind == unit and head in wanted:
            rows.extend(range(start, start + width))
        start += width
    return rows


def kept_groups(geometry: HeadGeometry, keep_query: Iterable[int]) -> list[int]:
    """The key/value heads that stay with ``keep_query``; a group must stay or go whole.

    Raises:
        InvalidValue: a group keeps some of its query heads and loses others.
    """
    keep = frozenset(keep_query)
    if not keep <= frozenset(range(geometry.n_query_heads)):
        must = f"positions of the {geometry.n_query_heads} present heads"
        raise InvalidValue("keep", must, sorted(keep))
    stay = []
    for group in range(geometry.n_kv_heads):
        members = range(group * geometry.group_size, (group + 1) * geometry.group_size)
        n_kept = sum(head in keep for head in members)
        if n_kept == len(members):
            stay.append(group)
        elif n_kept:
            raise InvalidValue(
                "keep",
                f"whole groups of {geometry.group_size} query heads that share a key/value head",
                f"{n_kept} of heads {list(members)}",
            )
    return stay


def infer_geometry(sizes: Sequence[tuple[Sequence[str], int]], head_dim: int, value_dim: int) -> HeadGeometry:
    """Works out the head counts from the lengths of the slabs' axes, which stay true when weights are cut.

    Args:
        sizes: ``(units, length)`` of every slab; one slab must be ``("context",)`` or ``("query",)``.
        head_dim: Width of a query or key head.
        value_dim: Width of a value head.

    Raises:
        InvalidValue: a length that no whole number of heads explains.
    """
    n_query = n_kv = None
    for units, length in sizes:
        if tuple(units) in (("context",), ("query",)):
            width = value_dim if units[0] == "context" else head_dim
            if length % width:
                raise InvalidValue(f"the {units[0]} axis", f"a multiple of the head width {width}", length)
            n_query = length // width
            break
    if n_query is None:
        raise InvalidValue("layout.slabs", "with one slab of unit 'context' or 'query'", [tuple(u) for u, _ in sizes])
    for units, length in sizes:
        kv_width = sum({"key": head_dim, "value": value_dim}.get(u, 0) for u in units)
        if kv_width:
            rest = length - sum({"query": head_dim, "context": value_dim, "head": 1}.get(u, 0) * n_query for u in units)
            if rest < 0 or rest % kv_width:
                raise InvalidValue(f"the {'+'.join(units)} axis", f"a multiple of the head width {kv_width}", length)
            n_kv = rest // kv_width
            break
    geometry = HeadGeometry(n_query, n_query if n_kv is None else n_kv, head_dim, value_dim)
    for units, length in sizes:
        if axis_size(geometry, units) != length:
            raise InvalidValue(f"the {'+'.join(units)} axis", f"{axis_size(geometry, units)} for {geometry}", length)
    return geometry
