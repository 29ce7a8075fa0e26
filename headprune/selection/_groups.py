"""Budgets for groups of sites: which sites a budget is for, and the scores of those sites alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.heads import KINDS, AttentionSite
from headprune.core.plan import Budget, SiteBudget, allowance
from headprune.core.samples import if_there
from headprune.core.scores import Cost, HeadScores

WHERE = "select(budget=)"


def divided(
    sites: Sequence[AttentionSite], budgets: Mapping[str, Budget]
) -> list[tuple[SiteBudget, tuple[int, ...]]]:
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
            must = (
                "a mapping from a kind (self, causal, cross) or a pattern over sites' names to a"
                " Budget"
            )
            raise InvalidValue(WHERE, must, f"{key!r}: {budget!r}")
        group = SiteBudget(key, budget)
        places = group.places(sites)
        if not places:
            present = sorted({s.kind for s in sites})
            hint = did_you_mean(key, [*KINDS, *(s.name for s in sites)])
            if key in ("encoder", "decoder") or not hint.startswith(
                "Did"
            ):  # else it would list every site
                hint = (
                    "An encoder attends to itself by 'self', a decoder by 'causal', and to the"
                    " encoder by 'cross'."
                )
            must = (
                f"a kind ({', '.join(present)}) or a pattern over sites' names, such as"
                f" {sites[0].name!r}"
            )
            raise UnknownName(f"{WHERE}[{key!r}]", must, "one that is for no site", hint)
        for place in places:
            if place in taken:
                name = sites[place].name
                must = f"for sites that {taken[place]!r} leaves out"
                raise InvalidValue(
                    f"{WHERE}[{key!r}]", must, name, "Give every site at most one budget."
                )
            taken[place] = key
        found.append((group, places))
    return found


def by_kind(sites: Iterable[AttentionSite], budget: Budget) -> dict[str, Budget] | None:
    """The budget as a count of heads for each kind of attention; None where all sites are of one
    kind, where it counts no heads, or where a kind would keep none.

    Every kind keeps the same share of its heads; what rounding leaves goes to the largest
    fractions.
    """
    heads: dict[str, int] = {}
    for site in sites:
        if site.heads:
            heads[site.kind] = heads.get(site.kind, 0) + len(site.heads)
    if len(heads) < 2 or budget.keep_heads is None:
        return None
    total = sum(heads.values())
    kept = min(total, allowance(budget.keep_heads, total))
    counts = {kind: kept * count // total for kind, count in heads.items()}
    by_fraction = sorted(heads, key=lambda kind: -(kept * heads[kind] % total))
    for kind in by_fraction[: kept - sum(counts.values())]:
        counts[kind] += 1
    if not all(counts.values()):
        return None
    return {kind: Budget(keep_heads=count) for kind, count in counts.items()}


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
    curvature, lost = (
        (None, ()) if scores.curvature is None else if_there(partial(scores.curvature.part, rows))
    )
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
