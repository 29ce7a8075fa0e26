"""The only place with head-to-row arithmetic: which indices of a tensor axis belong to which head.

Plain integers, no torch. A *slab* is one axis of one tensor that is made of per-head blocks; its
*unit* says what the blocks are and its *packing* how they are laid out:

============ ======================= =========================================
unit         one block for each      width of a block
============ ======================= =========================================
query        query head              head_dim
gated_query  query head              2 * head_dim (a query and a gate beside it)
key          key/value head          key_dim (head_dim, unless keys are latent)
value        key/value head          value_dim
context      query head              value_dim (input of the output projection)
head         query head              1 (sinks, position-bias tables)
kv_head      key/value head          1 (scales)
============ ======================= =========================================

Several units on one axis are a fused projection: ``sequential`` packing lays all blocks of one unit
before the next ([q0 q1 k0 k1 v0 v1]), ``grouped`` packing lays them group by group ([q0 k0 v0 q1 k1
v1]; with grouped queries each group is its query heads, then its key, then its value).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headprune.core.errors import InvalidValue

Packing = Literal["sequential", "grouped"]
UNITS: tuple[str, ...] = ("query", "gated_query", "key", "value", "context", "head", "kv_head")
#: Query heads of a module: what is read from a file and asks for more is damaged, and would fill
#: the memory.
MOST_HEADS = 1 << 16
_OF_KV = ("key", "value", "kv_head")


@dataclass(frozen=True)
class HeadGeometry:
    """How many heads a module has now, how wide they are, and which query heads share a key/value
    head.

    Args:
        n_query_heads: Query heads, the heads that scores and plans speak of.
        n_kv_heads: Key/value heads.
        head_dim: Width of a query head.
        value_dim: Width of a value head.
        key_dim: Width of a key's block, where it is not ``head_dim``: latent attention computes a
            part of each key.
        kv_of: The key/value head of every query head. None: consecutive query heads share one, the
            same number each; then ``n_kv_heads`` must divide ``n_query_heads``.
    """

    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    key_dim: int | None = None
    kv_of: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if (
            min(self.n_query_heads, self.n_kv_heads) < 0
            or min(self.head_dim, self.value_dim, self.key_dim or 1) < 1
        ):
            raise InvalidValue("HeadGeometry", "made of counts >= 0 and widths >= 1", self)
        if self.n_query_heads > MOST_HEADS:
            raise InvalidValue("n_query_heads", f"at most {MOST_HEADS:,}", self.n_query_heads)
        if (self.n_kv_heads == 0) != (self.n_query_heads == 0) or (
            self.kv_of is None and self.n_kv_heads and self.n_query_heads % self.n_kv_heads
        ):
            raise InvalidValue(
                "n_kv_heads", f"a divisor of the {self.n_query_heads} query heads", self.n_kv_heads
            )
        if self.kv_of is not None:
            if len(self.kv_of) != self.n_query_heads or set(self.kv_of) != set(
                range(self.n_kv_heads)
            ):
                must = (
                    f"a key/value head below {self.n_kv_heads} for each query head, every one"
                    " in use"
                )
                raise InvalidValue("kv_of", must, self.kv_of)
            even = self.n_kv_heads and self.n_query_heads % self.n_kv_heads == 0
            size = self.n_query_heads // self.n_kv_heads if even else 0
            if not self.n_query_heads or (
                size and self.kv_of == tuple(h // size for h in range(self.n_query_heads))
            ):
                object.__setattr__(self, "kv_of", None)  # one spelling for one thing
        if self.key_dim == self.head_dim:
            object.__setattr__(self, "key_dim", None)

    @property
    def group_size(self) -> int:
        """Query heads a key/value head (0 when there are no heads); 1 where they are not equally
        many."""
        if not self.n_kv_heads:
            return 0
        return self.n_query_heads // self.n_kv_heads if self.kv_of is None else 1

    def kv_head(self, head: int) -> int:
        """The key/value head of a query head."""
        return head // self.group_size if self.kv_of is None else self.kv_of[head]

    def members(self, kv_head: int) -> list[int]:
        """The query heads that share a key/value head."""
        return [h for h in range(self.n_query_heads) if self.kv_head(h) == kv_head]

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
        return self.n_kv_heads if unit in _OF_KV else self.n_query_heads

    def keep(self, heads: Iterable[int]) -> HeadGeometry:
        """The geometry when only these query heads are kept; a key/value head without any goes.

        >>> kept = HeadGeometry(4, 2, 8, 8).keep([1, 2, 3])
        >>> kept.n_query_heads, kept.n_kv_heads, kept.kv_of
        (3, 2, (0, 1, 1))
        """
        heads = sorted(set(heads))
        used = used_groups(self, heads)
        kv_of = tuple(used.index(self.kv_head(h)) for h in heads)
        return HeadGeometry(
            len(heads), len(used), self.head_dim, self.value_dim, self.key_dim, kv_of
        )


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


def blocks(
    geometry: HeadGeometry, units: Sequence[str], packing: str = "sequential"
) -> Iterator[tuple[str, int, int]]:
    """Yields ``(unit, position of the head, width)`` in the order in which the blocks lie on the
    axis."""
    if packing == "sequential":
        for unit in units:
            for head in range(geometry.count(unit)):
                yield unit, head, geometry.width(unit)
        return
    for group in range(geometry.n_kv_heads):
        for unit in units:
            for head in [group] if unit in _OF_KV else geometry.members(group):
                yield unit, head, geometry.width(unit)


def kept_rows(
    geometry: HeadGeometry,
    units: Sequence[str],
    packing: str,
    keep_query: Iterable[int],
    keep_kv: Iterable[int],
) -> list[int]:
    """Indices of the axis that stay when the query heads ``keep_query`` and key/value heads
    ``keep_kv`` stay.

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
        if head in (kv if unit in _OF_KV else query):
            rows.extend(range(start, start + width))
        start += width
    return rows


def rows_of(
    geometry: HeadGeometry, units: Sequence[str], packing: str, unit: str, heads: Iterable[int]
) -> list[int]:
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


def used_groups(geometry: HeadGeometry, heads: Iterable[int]) -> list[int]:
    """The key/value heads that some of these query heads read: what stays with them.

    >>> used_groups(HeadGeometry(6, 3, 8, 8), [0, 4, 5])
    [0, 2]
    """
    return sorted({geometry.kv_head(h) for h in _present(geometry, heads)})


def freed_groups(geometry: HeadGeometry, heads: Iterable[int]) -> list[int]:
    """The key/value heads that no other query heads read: what leaves with them.

    >>> freed_groups(HeadGeometry(6, 3, 8, 8), [0, 4, 5])
    [2]
    """
    gone = _present(geometry, heads)
    return [kv for kv in range(geometry.n_kv_heads) if gone.issuperset(geometry.members(kv))]


def _present(geometry: HeadGeometry, heads: Iterable[int]) -> frozenset[int]:
    found = frozenset(heads)
    if not found <= frozenset(range(geometry.n_query_heads)):
        raise InvalidValue(
            "heads", f"positions of the {geometry.n_query_heads} present heads", sorted(found)
        )
    return found


def infer_geometry(
    sizes: Sequence[tuple[Sequence[str], int]],
    head_dim: int,
    value_dim: int,
    key_dim: int | None = None,
    share: Callable[[int, int], tuple[int, ...] | None] = lambda n_query, n_kv: None,
) -> HeadGeometry:
    """Works out the head counts from the lengths of the slabs' axes, which stay true when weights
    are cut.

    Args:
        sizes: ``(units, length)`` of every slab; one slab must be of one unit that counts query
            heads.
        head_dim: Width of a query head.
        value_dim: Width of a value head.
        key_dim: Width of a key's block, where it differs from a query's.
        share: The key/value head of every query head, given both counts; None for consecutive,
            equal groups.

    Raises:
        InvalidValue: a length that no whole number of heads explains.
    """
    one = HeadGeometry(1, 1, head_dim, value_dim, key_dim)
    n_query = n_kv = None
    for units, length in sizes:
        if len(units) == 1 and units[0] not in _OF_KV:
            width = one.width(units[0])
            if length % width:
                raise InvalidValue(
                    f"the {units[0]} axis", f"a multiple of the head width {width}", length
                )
            n_query = length // width
            break
    if n_query is None:
        raise InvalidValue(
            "layout.slabs",
            "with one slab of unit 'context' or 'query'",
            [tuple(u) for u, _ in sizes],
        )
    for units, length in sizes:
        kv_width = sum(one.width(u) for u in units if u in _OF_KV)
        if kv_width:
            rest = length - sum(one.width(u) for u in units if u not in _OF_KV) * n_query
            if rest < 0 or rest % kv_width:
                raise InvalidValue(
                    f"the {'+'.join(units)} axis",
                    f"a multiple of the head width {kv_width}",
                    length,
                )
            n_kv = rest // kv_width
            break
    n_kv = n_query if n_kv is None else n_kv
    geometry = HeadGeometry(n_query, n_kv, head_dim, value_dim, key_dim, share(n_query, n_kv))
    for units, length in sizes:
        if axis_size(geometry, units) != length:
            raise InvalidValue(
                f"the {'+'.join(units)} axis",
                f"{axis_size(geometry, units)} for {geometry}",
                length,
            )
    return geometry
