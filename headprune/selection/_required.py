"""Heads that must stay or must go: what the user names, checked, and as units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.heads import AttentionSite, HeadId
from headprune.core.indices import indices
from headprune.selection._base import Position

#: Heads by site: names to original indices.
Heads = Mapping[str, Iterable[int]]


def named(sites: Sequence[AttentionSite], heads: Heads | None, where: str) -> frozenset[HeadId]:
    """The heads that a mapping from names of sites to original indices names.

    Raises:
        InvalidValue: not such a mapping, or no collection of indices for a site.
        UnknownName: a site that is not scored, or a head that is not present there.
    """
    if heads is None:
        return frozenset()
    if not isinstance(heads, Mapping):
        raise InvalidValue(where, "a mapping from sites' names to lists of heads", repr(heads))
    found, by_name = set(), {site.name: site for site in sites}
    for name, listed in heads.items():
        if name not in by_name:
            raise UnknownName(
                where, "by names of scored sites", repr(name), did_you_mean(str(name), by_name)
            )
        site, place = by_name[name], f"{where}[{name!r}]"
        for head in indices(listed, place, site.n_query_heads):
            if head not in site.heads:
                raise UnknownName(place, f"one of the present heads {list(site.heads)}", head)
            found.add(HeadId(name, head))
    return frozenset(found)


def as_units(
    sites: Sequence[AttentionSite], keep: frozenset[HeadId], remove: frozenset[HeadId]
) -> tuple[frozenset[Position], frozenset[Position]]:
    """The units that hold any of these heads: those that must stay, and those that must go.

    Raises:
        InvalidValue: one unit would have to do both.
    """
    stay, go = (_units(sites, heads) for heads in (keep, remove))
    if both := sorted(stay & go):
        site, unit = both[0]
        heads = list(sites[site].units[unit])
        hint = "" if len(heads) == 1 else f"Heads {heads} stay or go together."
        got = (
            f"{sites[site].name}[{heads[0]}] in both"
            if len(heads) == 1
            else f"{sites[site].name}{heads} in both"
        )
        raise InvalidValue("select(must_keep=, must_remove=)", "about different heads", got, hint)
    return stay, go


def _units(sites: Sequence[AttentionSite], heads: frozenset[HeadId]) -> frozenset[Position]:
    return frozenset(
        (s, u)
        for s, site in enumerate(sites)
        for u, unit in enumerate(site.units)
        if any(HeadId(site.name, head) in heads for head in unit)
    )
