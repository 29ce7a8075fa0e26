"""Budgets for groups of sites: which sites a budget is for, and the scores of those sites alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.heads import KINDS, AttentionSite
from headprune.core.plan import Budget, SiteBudget
from headprune.core.samples import if_there
from headprune.core.scores import Cost, HeadScores

WHERE = "select(budget=)"


def divided(sites: Sequence[AttentionSite], budgets: Mapping[str, Budget]) -> list[tuple[SiteBudget, tuple[int, ...]]]:
    """Every budget with the places of its sites.

    Raises:
        InvalidValue: not a mapping from strings to budgets, an empty one, or two keys for one site.
        UnknownName: a key that is for no site.
    """
    if not budgets:
        raise InvalidValue(WHERE, "a Budget, or a mapping of at least one", "an empty mapping")
    found: list[tuple[SiteBudget, tuple[int, ...]]] = []
    taken: dict[int, str] = {}
    for key, budget in budgets.items():
        if not isinstance(key, str) or not isinstance(budget, Budget):
            must = "a mapping from a kind (self, causal, cross) or a pattern over sites' names to a Budget"
            raise InvalidValue(WHERE, must, f"{key!r}: {budget!r}")
        group = SiteBudget(key, budget)
        places = group.places(sites)
        if not places:
            present = sorted({s.kind for s in sites})
            hint = did_you_mean(key, [*KINDS, *(s.name for s in sites)])
            if key in ("encoder", "decoder") or not hint.startswith("Did"):  # else it would list every site
                hint = "An encoder attends to itself by 'self', a decoder by 'causal', and to the encoder by 'cross'."
            must = f"a kind ({', '.join(present)}) or a pattern over sites' names, such as {sites[0].name!r}"
            raise UnknownName(f"{WHERE}[{key!r}]", must, "one that is for no site", hint)
        for place in places:
            if place in taken:
                name = sites[place].name
                must = f"for sites that {taken[place]!r} leaves out"
                raise InvalidValue(f"{WHERE}[{key!r}]", must, name, "Give every site at most one budget.")
            taken[place] = key
        found.append((group, places))
    return found


def by_kind(sites: Iterable[AttentionSite], budget: Budget) -> dict[str, Budget] | None:
    """The budget as one for each kind of attention; None where all sites are of one kind, or it counts no heads.

    A count of heads becomes its share of all heads, so that every kind keeps the same share.
    """
    sites = tuple(sites)
    kinds = list(dict.fromkeys(site.kind for site in sites if site.heads))
    if len(kinds) < 2 or budget.keep_heads is None:
        return None
    heads = sum(len(site.heads) for site in sites)
    share = budget.keep_heads if isinstance(budget.keep_heads, float) else min(1.0, budget.keep_heads / heads)
    return {kind: Budget(keep_heads=share) for kind in kinds}


def part(scores: HeadScores, places: Iterable[int]) -> HeadScores:
    """The scores of some sites, as if nothing else had a cost."""
    places = list(places)

    def chosen(rows: Sequence[tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
        return tuple(rows[i] for i in places)

    costs = scores.costs
    if costs is not None:
        units = tuple(costs.units[i] for i in places)
        costs = replace(costs, total=Cost.sum(c for row in units for c in row), units=units)
    errors = scores.standard_errors
    flat = [unit.site for unit in scores.units()]
    rows = [i for place in places for i, site in enumerate(flat) if site == place]
    curvature, lost = (None, ()) if scores.curvature is None else if_there(partial(scores.curvature.part, rows))
    return replace(
        scores,
        sites=tuple(scores.sites[i] for i in places),
        values=chosen(scores.values),
        standard_errors=None if errors is None else chosen(errors),
        costs=costs,
        samples=None,
        notes=(*scores.notes, *lost),
        curvature=curvature,
    )
