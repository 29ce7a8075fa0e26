"""Names of heads and sets of heads: HeadId, AttentionSite, HeadMask.

A head always keeps the index that it had in the uncut model. After a cut the heads of a site may
be 0, 3 and 7.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from headprune.core.codec import LATER, Value
from headprune.core.errors import (
    InvalidValue,
    PlanMismatch,
    UnknownName,
    check_one_of,
    did_you_mean,
)
from headprune.core.indices import indices, kept_in_row
from headprune.core.slabs import MOST_HEADS, HeadGeometry

#: Kinds of attention, and feed-forwards, whose heads are neurons of width 1.
Kind = Literal["self", "causal", "cross", "feed_forward"]
ATTENTION_KINDS: tuple[Kind, ...] = ("self", "causal", "cross")
KINDS: tuple[Kind, ...] = (*ATTENTION_KINDS, "feed_forward")

#: Which query heads can be removed where several share a key/value head: ``group`` all of them
#: together (the cache shrinks), ``balanced`` the same number in every group that is kept, ``free``
#: any.
Policy = Literal["group", "balanced", "free"]
POLICIES: tuple[Policy, ...] = ("group", "balanced", "free")

#: Which query heads share: consecutive ones, or every ``n_kv_heads``-th.
Grouping = Literal["contiguous", "interleaved"]

_Heads = frozenset[int]
#: Heads that are shown one by one in a line.
_MOST_MARKS = 128


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
    """A located attention module or feed-forward: what can be scored, gated and cut there.

    Args:
        name: The module's qualified name.
        layout: Name of the layout that matched.
        kind: ``self`` (bidirectional), ``causal`` (may hold a KV cache) or ``cross``;
            ``feed_forward`` where heads are neurons.
        n_query_heads: Query heads of the uncut module; its neurons for a feed-forward.
        n_kv_heads: Key/value heads of the uncut module.
        head_dim: Width of a query or key head.
        value_dim: Width of a value head.
        heads: Original indices of the heads that are present.
        shared_with: Other names of the same module object.
        policy: Which heads can be removed together.
        grouping: Which query heads share a key/value head.
        key_dim: Width of a key's block where it is not ``head_dim``.
        bundles: Units in place of those of the policy, made for a selector: balanced heads, or
            neurons by rank.
        least: How many heads must be kept: 1 where the module cannot run without any. Sites that
            differ only in it are equal.
    """

    # The uncut module; these fields stay the same after every cut.
    name: str
    layout: str
    kind: Kind
    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    # The module as it is now.
    heads: tuple[int, ...]
    shared_with: tuple[str, ...] = ()
    # How heads that share a key/value head are treated.
    policy: Policy = "group"
    grouping: Grouping = "contiguous"
    # Rare cases: latent attention, balanced groups, code that cannot run without heads.
    key_dim: int | None = None
    bundles: tuple[tuple[int, ...], ...] | None = None
    least: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        check_one_of("AttentionSite.kind", self.kind, KINDS)
        check_one_of("AttentionSite.policy", self.policy, POLICIES)
        # Checks the counts and widths.
        HeadGeometry(
            self.n_query_heads, self.n_kv_heads, self.head_dim, self.value_dim, self.key_dim
        )
        known = set(range(self.n_query_heads))
        if list(self.heads) != sorted(set(self.heads)) or not set(self.heads) <= known:
            must = f"sorted indices below {self.n_query_heads}"
            raise InvalidValue("AttentionSite.heads", must, self.heads)
        if not 0 <= self.least <= self.n_query_heads:
            must = f"a count of heads, 0 to {self.n_query_heads}"
            raise InvalidValue("AttentionSite.least", must, self.least)
        if self.bundles is not None and sorted(chain(*self.bundles)) != list(self.heads):
            must = f"a partition of the heads {list(self.heads)}"
            raise InvalidValue("AttentionSite.bundles", must, self.bundles)

    @property
    def is_feed_forward(self) -> bool:
        """Whether its heads are the neurons of a feed-forward."""
        return self.kind == "feed_forward"

    @property
    def noun(self) -> str:
        """What one of its heads is called: ``head`` or ``neuron``."""
        return "neuron" if self.is_feed_forward else "head"

    @property
    def present_heads(self) -> str:
        """What a named head must be one of, for errors."""
        if self.is_feed_forward:
            return f"one of the {len(self.heads):,} neurons that are present"
        return f"one of the present heads {list(self.heads)}"

    @cached_property
    def geometry(self) -> HeadGeometry:
        """Head counts, widths and shared key/value heads of the present heads."""
        n_query, n_kv = self.n_query_heads, self.n_kv_heads
        # HeadGeometry counts positions. In an uncut module they are the original indices.
        kv_of = tuple(self.kv_head(h) for h in range(n_query))
        whole = HeadGeometry(n_query, n_kv, self.head_dim, self.value_dim, self.key_dim, kv_of)
        if len(self.heads) == n_query:
            return whole
        return whole.keep(self.heads)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head in the uncut module."""
        return self.n_query_heads // self.n_kv_heads

    def kv_head(self, head: int) -> int:
        """The original key/value head that a query head (original index) reads."""
        if self.grouping == "contiguous":
            return head // self.group_size
        return head % self.n_kv_heads

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The present heads (original indices) by the key/value head that they read."""
        if self.group_size == 1:
            return tuple((head,) for head in self.heads)
        # Key/value heads whose query heads were all removed do not appear.
        groups: dict[int, list[int]] = {}
        for head in self.heads:
            groups.setdefault(self.kv_head(head), []).append(head)
        return tuple(tuple(groups[kv]) for kv in sorted(groups))

    def positions(self, heads: Iterable[int]) -> list[int]:
        """The places of these heads (original indices) among the present ones."""
        place = {head: number for number, head in enumerate(self.heads)}
        return [place[head] for head in heads]

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The sets of present heads (original indices) that are scored and removed together.

        They are KV groups, or single heads.

        >>> AttentionSite("a", "llama", "causal", 4, 2, 8, 8, (2, 3)).units
        ((2, 3),)
        >>> AttentionSite("a", "llama", "causal", 4, 2, 8, 8, (2, 3), policy="free").units
        ((2,), (3,))
        """
        if self.bundles is not None:
            return self.bundles
        if self.policy == "group":
            return self.groups
        return tuple((head,) for head in self.heads)

    def check(self, keep: Iterable[int]) -> tuple[int, ...]:
        """Sort the kept heads; refuse them if the policy does not allow that cut.

        Args:
            keep: Original indices of the heads to keep.

        Returns:
            The same, sorted, each once.

        Raises:
            UnknownName: a head that is not present.
            InvalidValue: the policy forbids it: a part of a KV group, or groups of unlike size.
        """
        kept = tuple(sorted(set(keep)))
        present = frozenset(self.heads)
        for head in kept:
            if head not in present:
                raise UnknownName(f"{self.noun} {head} of {self.name}", self.present_heads, head)

        if self.group_size == 1:  # no heads share anything
            return kept
        where = f"keep for {self.name}"
        hint = "Or find the sites with policy='balanced' or 'free', where the layout allows it."
        kept_groups, counts = [], []
        for group in self.groups:
            n_kept = len(set(group).intersection(kept))
            if not n_kept:
                continue
            if self.policy == "group" and n_kept < len(group):
                must = f"whole groups of {len(group)} query heads that share a key/value head"
                raise InvalidValue(where, must, f"{n_kept} of heads {list(group)}", hint)
            kept_groups.append(list(group))
            counts.append(n_kept)
        if self.policy == "balanced" and len(set(counts)) > 1:
            must = "the same number of query heads in every group that is kept"
            raise InvalidValue(where, must, f"{counts} of the groups {kept_groups}", hint)
        return kept

    def words(self, heads: Sequence[int]) -> str:
        """Some of its heads as text: by index, and of neurons their number."""
        if self.is_feed_forward:
            return f"{len(heads):,} neuron{'' if len(heads) == 1 else 's'} of {self.name}"
        return f"{self.name}{list(heads)}"

    def permitting(self, keep: Iterable[int]) -> AttentionSite:
        """This site under the strictest policy that allows these kept heads."""
        keep = tuple(keep)
        # From the strictest policy to the one that allows any heads.
        for policy in POLICIES[:-1]:
            site = replace(self, policy=policy)
            try:
                site.check(keep)
            except InvalidValue:
                continue
            return site
        return replace(self, policy="free")

    def __str__(self) -> str:
        if self.is_feed_forward:
            present = len(self.heads)
            cut = "" if present == self.n_query_heads else f", {present} present"
            return f"{self.name}: {self.n_query_heads} neurons{cut} ({self.layout})"
        heads = f"{self.n_query_heads} heads"
        if self.n_kv_heads != self.n_query_heads:
            heads += f" in {self.n_kv_heads} KV groups"
        heads += f" of width {self.head_dim}"
        if len(self.heads) != self.n_query_heads:
            heads += f", {len(self.heads)} present"
        policy = "" if self.policy == "group" else f", {self.policy}"
        return f"{self.name}: {heads} ({self.layout}, {self.kind}{policy})"


def places(sites: Sequence[AttentionSite], wanted: str) -> tuple[int, ...]:
    """Find sites by a kind, a name, or a pattern over names.

    A name goes before a pattern: names may hold brackets.

    Returns:
        Their positions in ``sites``; empty where nothing matches.

    >>> sites = [
    ...     AttentionSite(name, "bert", "self", 2, 2, 4, 4, (0, 1)) for name in ("a[0]", "a0", "b0")
    ... ]
    >>> places(sites, "self"), places(sites, "a[0]"), places(sites, "?0")
    ((0, 1, 2), (0,), (1, 2))
    """
    # 1. A kind; where no site is of that kind, it may be a name.
    of_kind = tuple(i for i, site in enumerate(sites) if site.kind == wanted)
    if of_kind:
        return of_kind
    # 2. A name: one that holds brackets would mean something else as a pattern.
    names = [site.name for site in sites]
    if wanted in names:
        return tuple(i for i, name in enumerate(names) if name == wanted)
    # 3. A pattern.
    return tuple(i for i, name in enumerate(names) if fnmatchcase(name, wanted))


@dataclass(frozen=True)
class HeadCounts:
    """Numbers of heads and of neurons; a neuron is never counted as a head.

    Args:
        heads: Of attention.
        neurons: Of feed-forwards; None where there is none of them.

    >>> HeadCounts(36, 3686).of(HeadCounts(72, 9216)), str(HeadCounts(1))
    ('36 of 72 heads and 3,686 of 9,216 neurons', '1 head')
    """

    heads: int
    neurons: int | None = None

    @classmethod
    def sum(cls, counts: Iterable[tuple[int, bool]]) -> HeadCounts:
        """Add up counts that come with whether they count neurons."""
        heads, neurons = 0, None
        for count, are_neurons in counts:
            if are_neurons:
                neurons = (neurons or 0) + count
            else:
                heads += count
        return cls(heads, neurons)

    @classmethod
    def present(cls, sites: Iterable[AttentionSite]) -> HeadCounts:
        """Count what is present at some sites."""
        return cls.sum((len(site.heads), site.is_feed_forward) for site in sites)

    def of(self, whole: HeadCounts, separator: Literal["", ","] = "") -> str:
        """These as a part of others, as text; ``separator`` is that of thousands of heads."""
        words = f"{self.heads:{separator}} of {whole.heads:{separator}} heads"
        if whole.neurons is None:
            return words
        return f"{words} and {self.neurons or 0:,} of {whole.neurons:,} neurons"

    def __sub__(self, other: HeadCounts) -> HeadCounts:
        neurons = None if self.neurons is None else self.neurons - (other.neurons or 0)
        return HeadCounts(self.heads - other.heads, neurons)

    def __str__(self) -> str:
        words = f"{self.heads} head{'' if self.heads == 1 else 's'}"
        if self.neurons is None:
            return words
        return f"{words} and {self.neurons:,} neuron{'' if self.neurons == 1 else 's'}"


@dataclass(frozen=True)
class SiteKeep:
    """One row of a mask: the kept heads of one site, in original indices.

    Args:
        site: The site's name.
        n_heads: Heads of the uncut site.
        kept: Heads that are kept.
        neurons: Whether its heads are neurons; False where that is not known. Rows that differ only
            in it are equal.
    """

    site: str
    n_heads: int
    kept: tuple[int, ...]
    neurons: bool = field(default=False, compare=False, metadata=LATER)

    @classmethod
    def of(cls, site: AttentionSite, kept: Iterable[int]) -> SiteKeep:
        """The row of a site that keeps these heads."""
        return cls(site.name, site.n_query_heads, tuple(sorted(kept)), site.is_feed_forward)


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
        sites: set[str] = set()
        for row in self.rows:
            if row.site in sites:
                raise InvalidValue("HeadMask.rows", "one row per site", f"{row.site} twice")
            sites.add(row.site)
            where = f"HeadMask row {row.site}"
            if not 0 <= row.n_heads <= MOST_HEADS:
                raise InvalidValue(where, f"of 0 to {MOST_HEADS:,} heads", row.n_heads)
            if list(row.kept) != sorted(set(row.kept)):
                raise InvalidValue(where, "sorted indices without repeats", row.kept)
            for head in row.kept:
                if not 0 <= head < row.n_heads:
                    must = f"an index below {row.n_heads}"
                    raise UnknownName(f"head {head} of {row.site}", must, head)

    @classmethod
    def from_keep(cls, keep: Mapping[str, Iterable[int]], n_heads: Mapping[str, int]) -> HeadMask:
        """Build a mask from the kept heads of each site.

        Args:
            keep: Kept original indices by site; a site that it lacks keeps every head.
            n_heads: Head counts of the uncut model by site.

        Raises:
            UnknownName: a site or a head that does not exist.
            InvalidValue: values that are no indices, such as a row of 0 and 1 for every head: see
                ``from_array``.
        """
        for site in keep:
            if site not in n_heads:
                hint = did_you_mean(site, n_heads)
                raise UnknownName(f"site {site!r}", "a known attention site", repr(site), hint)
        rows = []
        for site, count in n_heads.items():
            # A site that ``keep`` lacks keeps every head.
            kept: Iterable[int] = range(count)
            if site in keep:
                kept = indices(keep[site], f"keep[{site!r}]", count)
            rows.append(SiteKeep(site, count, tuple(sorted(set(kept)))))
        return cls(tuple(rows))

    @classmethod
    def from_array(cls, array: Any, sites: Iterable[AttentionSite]) -> HeadMask:
        """Build a mask from ``[layers, heads]``: 1 or True is kept, 0 or False is removed.

        Args:
            array: A NumPy array, a tensor or nested lists. Rows are in the order of ``sites``,
                heads in original indices; rows may have different lengths, as the sites have.
            sites: The sites of the rows.

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
        # NumPy arrays and tensors become nested lists.
        table = array.tolist() if hasattr(array, "tolist") else array
        must = f"[layers, heads] with one row per site, {len(sites)}"
        if not isinstance(table, Sequence):
            raise InvalidValue("array", must, type(array).__name__)
        if len(table) != len(sites):
            raise InvalidValue("array", must, f"{len(table)} rows")
        rows = []
        for number, (row, site) in enumerate(zip(table, sites, strict=True)):
            where = f"array[{number}], for {site.name}"
            kept = kept_in_row(row, site.n_query_heads, where)
            # A head that an earlier cut removed cannot come back.
            absent = sorted(set(kept) - set(site.heads))
            if absent:
                must = f"1 only for the present heads {list(site.heads)}"
                raise UnknownName(where, must, f"1 for head {absent[0]}")
            rows.append(SiteKeep.of(site, kept))
        return cls(tuple(rows))

    @classmethod
    def full(cls, sites: Iterable[AttentionSite]) -> HeadMask:
        """Keep all heads that are present at ``sites``."""
        return cls(tuple(SiteKeep.of(site, site.heads) for site in sites))

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(row.site for row in self.rows)

    def row(self, site: str) -> SiteKeep:
        for row in self.rows:
            if row.site == site:
                return row
        hint = did_you_mean(site, self.sites)
        raise UnknownName(f"site {site!r}", "a site of this mask", repr(site), hint)

    def kept(self, site: str) -> tuple[int, ...]:
        """Kept original indices of one site."""
        return self.row(site).kept

    def removed(self, site: str) -> tuple[int, ...]:
        """Removed original indices of one site."""
        row = self.row(site)
        kept = frozenset(row.kept)
        return tuple(head for head in range(row.n_heads) if head not in kept)

    @property
    def n_kept(self) -> int:
        """Kept heads and neurons together; `kept_counts` tells them apart."""
        return sum(len(row.kept) for row in self.rows)

    @property
    def kept_counts(self) -> HeadCounts:
        """Heads and neurons that are kept."""
        return HeadCounts.sum((len(row.kept), row.neurons) for row in self.rows)

    @property
    def counts(self) -> HeadCounts:
        """Heads and neurons of the uncut sites."""
        return HeadCounts.sum((row.n_heads, row.neurons) for row in self.rows)

    @property
    def n_heads(self) -> int:
        """Heads and neurons of the uncut sites together; `counts` tells them apart."""
        return sum(row.n_heads for row in self.rows)

    def __contains__(self, head: object) -> bool:
        if not isinstance(head, HeadId) or head.site not in self.sites:
            return False
        return head.head in self.kept(head.site)

    def __iter__(self) -> Iterator[HeadId]:
        for row in self.rows:
            for head in row.kept:
                yield HeadId(row.site, head)

    def __len__(self) -> int:
        return self.n_kept

    def _combine(self, other: HeadMask, operation: Callable[[_Heads, _Heads], _Heads]) -> HeadMask:
        if not isinstance(other, HeadMask):
            return NotImplemented
        # Masks of two models have no common meaning.
        own_counts = {row.site: row.n_heads for row in self.rows}
        other_counts = {row.site: row.n_heads for row in other.rows}
        if own_counts != other_counts:
            must = f"over the same sites and head counts ({own_counts})"
            raise PlanMismatch("HeadMask", must, other_counts)
        rows = []
        for row in self.rows:
            same = other.row(row.site)
            kept = tuple(sorted(operation(frozenset(row.kept), frozenset(same.kept))))
            rows.append(replace(row, kept=kept, neurons=row.neurons or same.neurons))
        return HeadMask(tuple(rows))

    def __or__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, operator.or_)

    def __and__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, operator.and_)

    def __sub__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, operator.sub)

    def __str__(self) -> str:
        width = max(map(len, self.sites), default=0)
        lines = [f"HeadMask: {self.kept_counts.of(self.counts)} kept"]
        for row in self.rows:
            marks = _marks(row)
            lines.append(f"  {row.site:<{width}}  {marks}  {len(row.kept)}/{row.n_heads}")
        return "\n".join(lines)


def _marks(row: SiteKeep) -> str:
    """One mark per head of a row; none where a line cannot hold them, as for neurons."""
    if row.n_heads > _MOST_MARKS:
        return ""
    kept = frozenset(row.kept)
    # The same marks as in the grids of plans.
    return "".join("■" if head in kept else "·" for head in range(row.n_heads))


def without(sites: Iterable[AttentionSite], removed: Mapping[str, Iterable[int]]) -> HeadMask:
    """Keep all present heads but those that ``removed`` names, in original indices by site.

    >>> sites = [AttentionSite(name, "bert", "self", 3, 3, 4, 4, (0, 1, 2)) for name in ("a", "b")]
    >>> without(sites, {"a": [1]}).kept("a"), without(sites, {"a": [1]}).kept("b")
    ((0, 2), (0, 1, 2))
    """
    rows = []
    for site in sites:
        kept = set(site.heads).difference(removed.get(site.name, ()))
        rows.append(SiteKeep.of(site, kept))
    return HeadMask(tuple(rows))
