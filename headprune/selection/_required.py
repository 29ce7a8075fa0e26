"""Heads that must be kept or removed: checks of the named heads, and their units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.heads import AttentionSite, HeadId
from headprune.core.indices import indices
from headprune.selection._base import Position, members_of

#: Original head indices by name of their site.
Heads = Mapping[str, Iterable[int]]


def head_ids(sites: Sequence[AttentionSite], heads: Heads | None, where: str) -> frozenset[HeadId]:
    """The heads of a mapping from names of sites to original indices.

    Raises:
        InvalidValue: not such a mapping, or no collection of indices for a site.
        UnknownName: a site that is not scored, or a head that is not present there.
    """
    if heads is None:
        return frozenset()
    if not isinstance(heads, Mapping):
        raise InvalidValue(where, "a mapping from sites' names to lists of heads", repr(heads))
    by_name = {site.name: site for site in sites}
    ids: set[HeadId] = set()
    for name, listed in heads.items():
        if name not in by_name:
            # A typing error would silently protect nothing.
            hint = did_you_mean(str(name), by_name)
            raise UnknownName(where, "a mapping from names of scored sites", repr(name), hint)
        site = by_name[name]
        there = f"{where}[{name!r}]"
        for head in indices(listed, there, site.n_query_heads):
            if head not in site.heads:
                raise UnknownName(there, site.present_heads, head)
            ids.add(HeadId(name, head))
    return frozenset(ids)


def as_units(
    sites: Sequence[AttentionSite], keep: frozenset[HeadId], remove: frozenset[HeadId]
) -> tuple[frozenset[Position], frozenset[Position]]:
    """The units that hold any of these heads: units to keep, and units to remove.

    Raises:
        InvalidValue: a unit that would be in both.
    """
    must_keep = _units(sites, keep)
    must_remove = _units(sites, remove)
    both = sorted(must_keep & must_remove)
    if both:
        place, unit = both[0]
        site = sites[place]
        hint = ""
        if len(site.units[unit]) > 1:
            hint = f"{members_of(site, unit).capitalize()} are kept or removed together."
        raise InvalidValue(
            "select(must_keep=, must_remove=)",
            "about different heads",
            f"{site.words(site.units[unit])} in both",
            hint,
        )
    return must_keep, must_remove


def _units(sites: Sequence[AttentionSite], heads: frozenset[HeadId]) -> frozenset[Position]:
    positions: set[Position] = set()
    for place, site in enumerate(sites):
        wanted = {head.head for head in heads if head.site == site.name}
        for number, unit in enumerate(site.units):
            if not wanted.isdisjoint(unit):
                positions.add((place, number))
    return frozenset(positions)
