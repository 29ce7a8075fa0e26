"""Names of heads and sets of heads: HeadId, AttentionSite, HeadMask.

A head keeps the index it had in the full model for ever: after a cut the heads of a site may be 0,
3 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from headprune.core.codec import Value
from headprune.core.errors import InvalidValue, PlanMismatch, UnknownName, did_you_mean
from headprune.core.indices import indices, kept_in_row
from headprune.core.slabs import MOST_HEADS, HeadGeometry

Kind = Literal["self", "causal", "cross"]
KINDS: tuple[Kind, ...] = ("self", "causal", "cross")

#: Which query heads may leave where several share a key/value head: ``group`` all of them together
#: (the cache shrinks), ``balanced`` the same number in every group that stays, ``free`` any.
Policy = Literal["group", "balanced", "free"]
POLICIES: tuple[Policy, ...] = ("group", "balanced", "free")

#: Which query heads share: consecutive ones, or every ``n_kv_heads``-th.
Grouping = Literal["contiguous", "interleaved"]


@dataclass(frozen=True, order=True)
class HeadId(Value):
    """One attention head: the attention module's qualified name and the head's original index.

    >>> print(HeadId("encoder.layer.0.attention", 3))
    encoder.layer.0.attention[3]
    """

    site: str
    head: int

    def __post_init__(self) -> None:
        if self.head < 0:
            raise InvalidValue("HeadId.head", "an index >= 0", self.head)

    def __str__(self) -> str:
        return f"{self.site}[{self.head}]"


@dataclass(frozen=True)
class AttentionSite(Value):
    """A located attention module: what can be scored, gated and cut there.

    Args:
        name: The module's qualified name.
        layout: Name of the layout that matched.
        kind: ``self`` (bidirectional), ``causal`` (may hold a KV cache) or ``cross``.
        n_query_heads: Query heads of the uncut module.
        n_kv_heads: Key/value heads of the uncut module.
        head_dim: Width of a query or key head.
        value_dim: Width of a value head.
        heads: Original indices of the heads that are present.
        shared_with: Other names of the same module object.
        policy: Which heads may leave together.
        grouping: Which query heads share a key/value head.
        key_dim: Width of a key's block where it is not ``head_dim``.
        bundles: Units in place of those that the policy gives; a selector's means to keep groups
            balanced.
        least: How many heads must stay: 1 where the module cannot run without any. It does not tell
            sites apart.
    """

    name: str
    layout: str
    kind: Kind
    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    heads: tuple[int, ...]
    shared_with: tuple[str, ...] = ()
    policy: Policy = "group"
    grouping: Grouping = "contiguous"
    key_dim: int | None = None
    bundles: tuple[tuple[int, ...], ...] | None = None
    least: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidValue("AttentionSite.kind", "'self', 'causal' or 'cross'", repr(self.kind))
        if self.policy not in POLICIES:
            raise InvalidValue(
                "AttentionSite.policy", f"one of {', '.join(POLICIES)}", repr(self.policy)
            )
        HeadGeometry(
            self.n_query_heads, self.n_kv_heads, self.head_dim, self.value_dim, self.key_dim
        )
        if list(self.heads) != sorted(set(self.heads)) or not set(self.heads) <= set(
            range(self.n_query_heads)
        ):
            raise InvalidValue(
                "AttentionSite.heads", f"sorted indices below {self.n_query_heads}", self.heads
            )
        if not 0 <= self.least <= self.n_query_heads:
            raise InvalidValue(
                "AttentionSite.least", f"a count of heads, 0 to {self.n_query_heads}", self.least
            )
        if self.bundles is not None and sorted(h for b in self.bundles for h in b) != list(
            self.heads
        ):
            raise InvalidValue(
                "AttentionSite.bundles",
                f"a partition of the heads {list(self.heads)}",
                self.bundles,
            )

    @property
    def geometry(self) -> HeadGeometry:
        """Head counts, widths and shared key/value heads as they are now."""
        n_query, n_kv = self.n_query_heads, self.n_kv_heads
        kv_of = tuple(self.kv_head(h) for h in range(n_query))
        whole = HeadGeometry(n_query, n_kv, self.head_dim, self.value_dim, self.key_dim, kv_of)
        return whole if len(self.heads) == n_query else whole.keep(self.heads)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head in the uncut module."""
        return self.n_query_heads // self.n_kv_heads

    def kv_head(self, head: int) -> int:
        """The original key/value head that a query head (original index) reads."""
        return head // self.group_size if self.grouping == "contiguous" else head % self.n_kv_heads

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The present heads (original indices) by the key/value head that they read."""
        groups: dict[int, list[int]] = {}
        for head in self.heads:
            groups.setdefault(self.kv_head(head), []).append(head)
        return tuple(tuple(groups[kv]) for kv in sorted(groups))

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The sets of present heads (original indices) that are scored and go together: KV groups,
        or single heads.

        >>> AttentionSite("a", "llama", "causal", 4, 2, 8, 8, (2, 3)).units
        ((2, 3),)
        >>> AttentionSite("a", "llama", "causal", 4, 2, 8, 8, (2, 3), policy="free").units
        ((2,), (3,))
        """
        if self.bundles is not None:
            return self.bundles
        return self.groups if self.policy == "group" else tuple((h,) for h in self.heads)

    def check(self, keep: Iterable[int]) -> tuple[int, ...]:
        """The kept heads (original indices), sorted, if this site can be cut to them under its
        policy.

        Raises:
            UnknownName: a head that is not present.
            InvalidValue: what the policy does not allow: a part of a KV group, or groups of unlike
                size.
        """
        keep = tuple(sorted(set(keep)))
        for head in keep:
            if head not in self.heads:
                raise UnknownName(
                    f"head {head} of {self.name}",
                    f"one of the present heads {list(self.heads)}",
                    head,
                )
        left = [(group, sum(h in keep for h in group)) for group in self.groups]
        where = f"keep for {self.name}"
        hint = "Or find the sites with policy='balanced' or 'free', where the layout allows it."
        for group, n_kept in left:
            if self.policy == "group" and 0 < n_kept < len(group):
                must = f"whole groups of {len(group)} query heads that share a key/value head"
                raise InvalidValue(where, must, f"{n_kept} of heads {list(group)}", hint)
        counts = [n for _, n in left if n]
        if self.policy == "balanced" and len(set(counts)) > 1:
            must = "the same number of query heads in every group that stays"
            raise InvalidValue(
                where, must, f"{counts} of the groups {[list(g) for g, n in left if n]}", hint
            )
        return keep

    def permitting(self, keep: Iterable[int]) -> AttentionSite:
        """This site under the strictest policy that allows to keep these heads."""
        keep = tuple(keep)
        for policy in POLICIES[:-1]:
            site = replace(self, policy=policy)
            try:
                site.check(keep)
            except InvalidValue:
                continue
            return site
        return replace(self, policy="free")

    def __str__(self) -> str:
        kv = "" if self.n_kv_heads == self.n_query_heads else f" in {self.n_kv_heads} KV groups"
        present = "" if len(self.heads) == self.n_query_heads else f", {len(self.heads)} present"
        heads = f"{self.n_query_heads} heads{kv} of width {self.head_dim}{present}"
        policy = "" if self.policy == "group" else f", {self.policy}"
        return f"{self.name}: {heads} ({self.layout}, {self.kind}{policy})"


def places(sites: Sequence[AttentionSite], wanted: str) -> tuple[int, ...]:
    """Places of the sites of a kind, of the one that is named so, or of those whose names fit a
    pattern.

    >>> sites = [
    ...     AttentionSite(name, "bert", "self", 2, 2, 4, 4, (0, 1)) for name in ("a[0]", "a0", "b0")
    ... ]
    >>> places(sites, "self"), places(sites, "a[0]"), places(sites, "?0")
    ((0, 1, 2), (0,), (1, 2))
    """
    if wanted in KINDS:
        return tuple(i for i, site in enumerate(sites) if site.kind == wanted)
    named = tuple(i for i, site in enumerate(sites) if site.name == wanted)
    return named or tuple(i for i, site in enumerate(sites) if fnmatchcase(site.name, wanted))


@dataclass(frozen=True)
class SiteKeep:
    """One row of a mask: the kept original indices of one site."""

    site: str
    n_heads: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class HeadMask(Value):
    """A ragged, immutable set of kept heads, with ``|``, ``&`` and ``-``.

    >>> a = HeadMask.from_keep({"x": [0, 1], "y": [2]}, {"x": 2, "y": 4})
    >>> b = HeadMask.from_keep({"x": [1], "y": [2, 3]}, {"x": 2, "y": 4})
    >>> (a & b).kept("x"), (a | b).n_kept, (a - b).kept("x")
    ((1,), 4, (0,))
    >>> HeadId("y", 3) in b
    True
    """

    rows: tuple[SiteKeep, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for row in self.rows:
            if row.site in seen:
                raise InvalidValue("HeadMask.rows", "one row a site", f"{row.site} twice")
            seen.add(row.site)
            if not 0 <= row.n_heads <= MOST_HEADS:
                raise InvalidValue(
                    f"HeadMask row {row.site}", f"of 0 to {MOST_HEADS:,} heads", row.n_heads
                )
            if list(row.kept) != sorted(set(row.kept)):
                raise InvalidValue(
                    f"HeadMask row {row.site}", "sorted indices without repeats", row.kept
                )
            for head in row.kept:
                if not 0 <= head < row.n_heads:
                    raise UnknownName(
                        f"head {head} of {row.site}", f"an index below {row.n_heads}", head
                    )

    @classmethod
    def from_keep(cls, keep: Mapping[str, Iterable[int]], n_heads: Mapping[str, int]) -> HeadMask:
        """From kept original indices and head counts per site; a site absent from ``keep`` keeps
        every head.

        Raises:
            UnknownName: a site or a head that does not exist.
            InvalidValue: values that are no indices, such as a row of 0 and 1 for every head: see
                ``from_array``.
        """
        for site in keep:
            if site not in n_heads:
                raise UnknownName(
                    f"site {site!r}",
                    "a known attention site",
                    repr(site),
                    did_you_mean(site, n_heads),
                )
        rows = []
        for site, n in n_heads.items():
            kept = indices(keep[site], f"keep[{site!r}]", n) if site in keep else range(n)
            rows.append(SiteKeep(site, n, tuple(sorted(set(kept)))))
        return cls(tuple(rows))

    @classmethod
    def from_array(cls, array: Any, sites: Iterable[AttentionSite]) -> HeadMask:
        """From ``[layers, heads]``: 1 or True where a head is kept, 0 or False where it is removed.

        Args:
            array: A NumPy array, a tensor or nested lists. Rows are in the order of ``sites``,
                heads in original indices; rows may have different lengths, as the sites have.
            sites: The sites whose heads they are.

        Raises:
            InvalidValue: another shape, or values other than 0 and 1.
            UnknownName: a kept head that was removed before.

        >>> sites = [
        ...     AttentionSite(name, "bert", "self", 3, 3, 4, 4, (0, 1, 2)) for name in ("a", "b")
        ... ]
        >>> HeadMask.from_array([[1, 0, 1], [0, 0, 1]], sites).kept("a")
        (0, 2)
        """
        sites = tuple(sites)
        table = array.tolist() if hasattr(array, "tolist") else array
        if not isinstance(table, Sequence) or len(table) != len(sites):
            got = f"{len(table)} rows" if isinstance(table, Sequence) else type(array).__name__
            raise InvalidValue("array", f"[layers, heads] with one row per site, {len(sites)}", got)
        rows = []
        for number, (row, site) in enumerate(zip(table, sites, strict=True)):
            where = f"array[{number}], for {site.name}"
            kept = kept_in_row(row, site.n_query_heads, where)
            gone = sorted(set(kept) - set(site.heads))
            if gone:
                raise UnknownName(
                    where,
                    f"1 only for the present heads {list(site.heads)}",
                    f"1 for head {gone[0]}",
                )
            rows.append(SiteKeep(site.name, site.n_query_heads, kept))
        return cls(tuple(rows))

    @classmethod
    def full(cls, sites: Iterable[AttentionSite]) -> HeadMask:
        """All heads that are present at ``sites``."""
        return cls(tuple(SiteKeep(s.name, s.n_query_heads, s.heads) for s in sites))

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(row.site for row in self.rows)

    def row(self, site: str) -> SiteKeep:
        for row in self.rows:
            if row.site == site:
                return row
        raise UnknownName(
            f"site {site!r}", "a site of this mask", repr(site), did_you_mean(site, self.sites)
        )

    def kept(self, site: str) -> tuple[int, ...]:
        """Kept original indices of one site."""
        return self.row(site).kept

    def removed(self, site: str) -> tuple[int, ...]:
        """Removed original indices of one site."""
        row = self.row(site)
        return tuple(h for h in range(row.n_heads) if h not in row.kept)

    @property
    def n_kept(self) -> int:
        return sum(len(row.kept) for row in self.rows)

    @property
    def n_heads(self) -> int:
        return sum(row.n_heads for row in self.rows)

    def __contains__(self, head: object) -> bool:
        return (
            isinstance(head, HeadId)
            and head.site in self.sites
            and head.head in self.kept(head.site)
        )

    def __iter__(self) -> Iterator[HeadId]:
        return (HeadId(row.site, head) for row in self.rows for head in row.kept)

    def __len__(self) -> int:
        return self.n_kept

    def _combine(self, other: HeadMask, operation: str) -> HeadMask:
        if not isinstance(other, HeadMask):
            return NotImplemented
        mine, theirs = (
            {r.site: r.n_heads for r in self.rows},
            {r.site: r.n_heads for r in other.rows},
        )
        if mine != theirs:
            raise PlanMismatch("HeadMask", f"over the same sites and head counts ({mine})", theirs)
        kept = {r.site: getattr(set(r.kept), operation)(other.kept(r.site)) for r in self.rows}
        return HeadMask.from_keep(kept, mine)

    def __or__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, "union")

    def __and__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, "intersection")

    def __sub__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, "difference")

    def __str__(self) -> str:
        width = max((len(r.site) for r in self.rows), default=0)
        lines = [f"HeadMask: {self.n_kept} of {self.n_heads} heads kept"]
        for row in self.rows:
            marks = "".join("■" if h in row.kept else "·" for h in range(row.n_heads))
            lines.append(f"  {row.site:<{width}}  {marks}  {len(row.kept)}/{row.n_heads}")
        return "\n".join(lines)


def without(sites: Iterable[AttentionSite], removed: Mapping[str, Iterable[int]]) -> HeadMask:
    """All heads that are present at ``sites`` but those that ``removed`` names by site, in original
    indices.

    >>> sites = [AttentionSite(name, "bert", "self", 3, 3, 4, 4, (0, 1, 2)) for name in ("a", "b")]
    >>> without(sites, {"a": [1]}).kept("a"), without(sites, {"a": [1]}).kept("b")
    ((0, 2), (0, 1, 2))
    """
    sites = list(sites)
    keep = {site.name: set(site.heads) - set(removed.get(site.name, ())) for site in sites}
    return HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites})
