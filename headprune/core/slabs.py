"""Head-to-row arithmetic: which indices of a tensor axis belong to which head. Only here.

Plain integers, no torch. A *slab* is one axis of one tensor that is made of per-head blocks. Its
*unit* is the kind of block, its *packing* the order of the blocks:

============ ======================= =========================================
unit         one block for each      width of a block
============ ======================= =========================================
query        query head              head_dim
gated_query  query head              2 * head_dim (a query and its gate)
key          key/value head          key_dim (head_dim, unless keys are latent)
value        key/value head          value_dim
context      query head              value_dim (input of the output projection)
head         query head              1 (sinks, position-bias tables)
kv_head      key/value head          1 (scales)
============ ======================= =========================================

Several units on one axis are a fused projection. ``sequential`` packing puts all blocks of one unit
before the next ([q0 q1 k0 k1 v0 v1]). ``grouped`` packing puts them group by group ([q0 k0 v0 q1 k1
v1]); with grouped queries each group is its query heads, then its key, then its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headprune.core.errors import InvalidValue, check_one_of

Packing = Literal["sequential", "grouped"]
UNITS: tuple[str, ...] = ("query", "gated_query", "key", "value", "context", "head", "kv_head")
#: Most query heads or neurons of a module. A file with more is damaged, and would fill the memory.
MOST_HEADS = 1 << 18
#: Units with one block per key/value head.
_OF_KV = ("key", "value", "kv_head")


@dataclass(frozen=True)
class HeadGeometry:
    """Present heads of a module, their widths, and which query heads share a key/value head.

    Args:
        n_query_heads: Query heads, the heads of scores and plans.
        n_kv_heads: Key/value heads.
        head_dim: Width of a query head.
        value_dim: Width of a value head.
        key_dim: Width of a key's block where it is not ``head_dim``: latent attention computes a
            part of each key.
        kv_of: The key/value head of every query head. None: equally many consecutive query heads
            share one, and ``n_kv_heads`` divides ``n_query_heads``.
    """

    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    key_dim: int | None = None
    kv_of: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # 1. Numbers that no module has.
        counts = (self.n_query_heads, self.n_kv_heads)
        widths = (self.head_dim, self.value_dim, self.key_dim or 1)
        if min(counts) < 0 or min(widths) < 1:
            raise InvalidValue("HeadGeometry", "made of counts >= 0 and widths >= 1", self)
        if self.n_query_heads > MOST_HEADS:
            raise InvalidValue("n_query_heads", f"at most {MOST_HEADS:,}", self.n_query_heads)
        # 2. Query heads that do not fill the groups.
        must_divide = self.kv_of is None and self.n_kv_heads > 0
        only_one_is_0 = (self.n_kv_heads == 0) != (self.n_query_heads == 0)
        if only_one_is_0 or (must_divide and self.n_query_heads % self.n_kv_heads):
            must = f"a divisor of the {self.n_query_heads} query heads"
            raise InvalidValue("n_kv_heads", must, self.n_kv_heads)
        # 3. One spelling for one thing, so that equal geometries compare equal.
        if self.kv_of is not None:
            self._check_kv_of(self.kv_of)
            if self.kv_of == self._even_groups():
                object.__setattr__(self, "kv_of", None)
        if self.key_dim == self.head_dim:
            object.__setattr__(self, "key_dim", None)

    def _check_kv_of(self, kv_of: tuple[int, ...]) -> None:
        known = set(range(self.n_kv_heads))
        if len(kv_of) != self.n_query_heads or set(kv_of) != known:
            must = f"a key/value head below {self.n_kv_heads} for each query head, every one in use"
            raise InvalidValue("kv_of", must, kv_of)

    def _even_groups(self) -> tuple[int, ...] | None:
        """The ``kv_of`` of consecutive, equal groups; None where the counts allow none."""
        if not self.n_query_heads:
            return ()
        if self.n_query_heads % self.n_kv_heads:
            return None
        size = self.n_query_heads // self.n_kv_heads
        return tuple(head // size for head in range(self.n_query_heads))

    @property
    def group_size(self) -> int:
        """Query heads per key/value head; 0 without heads, 1 where groups differ in size."""
        if not self.n_kv_heads:
            return 0
        if self.kv_of is not None:
            return 1
        return self.n_query_heads // self.n_kv_heads

    def kv_head(self, head: int) -> int:
        """The key/value head of a query head."""
        if self.kv_of is not None:
            return self.kv_of[head]
        return head // self.group_size

    def members(self, kv_head: int) -> list[int]:
        """The query heads that share a key/value head."""
        if self.kv_of is None:
            return list(range(kv_head * self.group_size, (kv_head + 1) * self.group_size))
        return [head for head in range(self.n_query_heads) if self.kv_head(head) == kv_head]

    def width(self, unit: str) -> int:
        """Width of one block of ``unit``."""
        widths = {
            "query": self.head_dim,
            "gated_query": 2 * self.head_dim,
            "key": self.key_dim or self.head_dim,
            "head": 1,
            "kv_head": 1,
        }
        return widths.get(unit, self.value_dim)

    def count(self, unit: str) -> int:
        """Number of blocks of ``unit``."""
        if unit in _OF_KV:
            return self.n_kv_heads
        return self.n_query_heads

    def keep(self, heads: Iterable[int]) -> HeadGeometry:
        """The geometry when only these query heads are kept.

        A key/value head that none of them reads is removed.

        >>> kept = HeadGeometry(4, 2, 8, 8).keep([1, 2, 3])
        >>> kept.n_query_heads, kept.n_kv_heads, kept.kv_of
        (3, 2, (0, 1, 1))
        """
        heads = sorted(set(heads))
        # Key/value heads are renumbered: positions count the present ones.
        used = used_groups(self, heads)
        number = {kv: i for i, kv in enumerate(used)}
        kv_of = tuple(number[self.kv_head(head)] for head in heads)
        return HeadGeometry(
            len(heads), len(used), self.head_dim, self.value_dim, self.key_dim, kv_of
        )


def check_slab(units: Sequence[str], packing: str) -> None:
    """Refuse an unknown unit or packing."""
    for unit in units:
        check_one_of("HeadSlab.unit", unit, UNITS)
    if packing not in ("sequential", "grouped"):
        raise InvalidValue("HeadSlab.packing", "'sequential' or 'grouped'", repr(packing))


def axis_size(geometry: HeadGeometry, units: Sequence[str]) -> int:
    """Length of the axis that holds all blocks of ``units``.

    >>> axis_size(HeadGeometry(4, 2, 3, 5), ("query", "key", "value"))
    28
    """
    return sum(geometry.count(unit) * geometry.width(unit) for unit in units)


def blocks(
    geometry: HeadGeometry, units: Sequence[str], packing: str = "sequential"
) -> Iterator[tuple[str, int, int]]:
    """Yield ``(unit, position of the head, width)`` in the order of the blocks on the axis."""
    if packing == "sequential":
        for unit in units:
            for head in range(geometry.count(unit)):
                yield unit, head, geometry.width(unit)
        return
    for group in range(geometry.n_kv_heads):
        for unit in units:
            # A group has one key/value head and several query heads.
            heads = [group]
            if unit not in _OF_KV:
                heads = geometry.members(group)
            for head in heads:
                yield unit, head, geometry.width(unit)


def kept_rows(
    geometry: HeadGeometry,
    units: Sequence[str],
    packing: str,
    keep_query: Iterable[int],
    keep_kv: Iterable[int],
) -> list[int]:
    """Find the kept indices of an axis.

    Args:
        geometry: The module's heads.
        units: The axis's units.
        packing: Their order.
        keep_query: Kept query heads: positions in the present module, not original indices.
        keep_kv: Kept key/value heads, also positions.

    >>> kept_rows(HeadGeometry(2, 2, 2, 2), ("query", "key", "value"), "sequential", [1], [1])
    [2, 3, 6, 7, 10, 11]
    >>> kept_rows(HeadGeometry(2, 2, 2, 2), ("query", "key", "value"), "grouped", [1], [1])
    [6, 7, 8, 9, 10, 11]
    """
    # Sets make the test of each block fast: an axis may hold thousands of blocks.
    query, kv = frozenset(keep_query), frozenset(keep_kv)
    rows: list[int] = []
    start = 0
    for unit, head, width in blocks(geometry, units, packing):
        # A key or a value is kept with its key/value head, all others with their query head.
        kept = kv if unit in _OF_KV else query
        if head in kept:
            rows.extend(range(start, start + width))
        start += width
    return rows


def rows_of(
    geometry: HeadGeometry, units: Sequence[str], packing: str, unit: str, heads: Iterable[int]
) -> list[int]:
    """Find the indices of an axis that hold the ``unit`` blocks of some heads.

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


def rows_by_head(
    geometry: HeadGeometry, units: Sequence[str], packing: str, unit: str
) -> list[list[int]]:
    """Find the indices of an axis that hold the ``unit`` block of each query head.

    One walk over the axis: of thousands of neurons, a call of ``rows_of`` for each would take
    minutes.

    >>> rows_by_head(HeadGeometry(2, 2, 2, 2), ("query", "key", "value"), "sequential", "query")
    [[0, 1], [2, 3]]
    """
    rows: list[list[int]] = [[] for _ in range(geometry.n_query_heads)]
    start = 0
    for kind, head, width in blocks(geometry, units, packing):
        if kind == unit:
            rows[head].extend(range(start, start + width))
        start += width
    return rows


def used_groups(geometry: HeadGeometry, heads: Iterable[int]) -> list[int]:
    """Find the key/value heads that any of these query heads read.

    >>> used_groups(HeadGeometry(6, 3, 8, 8), [0, 4, 5])
    [0, 2]
    """
    return sorted({geometry.kv_head(head) for head in _present(geometry, heads)})


def freed_groups(geometry: HeadGeometry, heads: Iterable[int]) -> list[int]:
    """Find the key/value heads that only these query heads read.

    >>> freed_groups(HeadGeometry(6, 3, 8, 8), [0, 4, 5])
    [2]
    """
    removed = _present(geometry, heads)
    return [kv for kv in range(geometry.n_kv_heads) if removed.issuperset(geometry.members(kv))]


def _present(geometry: HeadGeometry, heads: Iterable[int]) -> frozenset[int]:
    """Refuse heads that are not present."""
    positions = frozenset(heads)
    if not positions <= frozenset(range(geometry.n_query_heads)):
        must = f"positions of the {geometry.n_query_heads} present heads"
        raise InvalidValue("heads", must, sorted(positions))
    return positions


def infer_geometry(
    sizes: Sequence[tuple[Sequence[str], int]],
    head_dim: int,
    value_dim: int,
    key_dim: int | None = None,
    share: Callable[[int, int], tuple[int, ...] | None] = lambda n_query, n_kv: None,
) -> HeadGeometry:
    """Infer the head counts from the lengths of the slabs' axes, which stay true after a cut.

    Args:
        sizes: ``(units, length)`` of every slab; one slab must be of one unit that counts query
            heads.
        head_dim: Width of a query head.
        value_dim: Width of a value head.
        key_dim: Width of a key's block where it differs from a query's.
        share: The key/value head of every query head, given both counts; None for consecutive,
            equal groups.

    Raises:
        InvalidValue: a length that no whole number of heads explains.
    """
    # Widths of the blocks do not depend on the counts.
    one = HeadGeometry(1, 1, head_dim, value_dim, key_dim)
    n_query = _count_query_heads(sizes, one)
    n_kv = _count_kv_heads(sizes, one, n_query)
    geometry = HeadGeometry(n_query, n_kv, head_dim, value_dim, key_dim, share(n_query, n_kv))
    # The counts come from one axis each; every other axis must agree.
    for units, length in sizes:
        expected = axis_size(geometry, units)
        if expected != length:
            where = f"the {'+'.join(units)} axis"
            raise InvalidValue(where, f"{expected} for {geometry}", length)
    return geometry


def _count_query_heads(sizes: Sequence[tuple[Sequence[str], int]], one: HeadGeometry) -> int:
    """Count the heads of the first axis that holds one unit of query heads.

    ``one`` is the geometry of a single head.
    """
    for units, length in sizes:
        if len(units) == 1 and units[0] not in _OF_KV:
            width = one.width(units[0])
            if length % width:
                must = f"a multiple of the head width {width}"
                raise InvalidValue(f"the {units[0]} axis", must, length)
            return length // width
    must = "with one slab of unit 'context' or 'query'"
    raise InvalidValue("layout.slabs", must, [tuple(units) for units, _ in sizes])


def _count_kv_heads(
    sizes: Sequence[tuple[Sequence[str], int]], one: HeadGeometry, n_query: int
) -> int:
    """Count the key/value heads of the first axis that holds some; else as many as query heads."""
    for units, length in sizes:
        kv_width, query_width = 0, 0
        for unit in units:
            if unit in _OF_KV:
                kv_width += one.width(unit)
            else:
                query_width += one.width(unit)
        if not kv_width:
            continue
        # A fused axis also holds the queries, whose number is known.
        kv_length = length - query_width * n_query
        if kv_length < 0 or kv_length % kv_width:
            must = f"a multiple of the head width {kv_width}"
            raise InvalidValue(f"the {'+'.join(units)} axis", must, length)
        return kv_length // kv_width
    # No axis holds keys or values: no head shares them.
    return n_query
