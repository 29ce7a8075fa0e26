"""Units that keep groups balanced: the best head of every KV group together, then the second best, and so on."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from headprune.core.heads import AttentionSite
from headprune.core.scores import Cost, HeadScores


def bundled(scores: HeadScores) -> HeadScores:
    """The scores with one unit for one head of every group, at sites of the policy ``balanced``.

    A bundle's score and cost are the sums of its heads' (the units of a group of grouped queries add up in the same
    way), and heads are bundled by rank within their group. So a better bundle goes before a worse one, and whatever
    number of bundles a selector keeps, every group keeps as many heads.
    """
    if all(s.policy != "balanced" or len(s.groups) < 2 for s in scores.sites):
        return scores
    sites, values, errors, costs = [], [], [], []
    for index, site in enumerate(scores.sites):
        row = dict(zip((u[0] for u in site.units), range(len(site.units)), strict=True))
        if site.policy == "balanced" and len(site.groups) > 1:
            bundles = _bundles(site, {h: scores.values[index][u] for h, u in row.items()})
            site = replace(site, bundles=bundles)
        members = [[row[h] for h in unit if h in row] for unit in site.units]
        sites.append(site)
        values.append(tuple(sum(scores.values[index][u] for u in unit) for unit in members))
        if scores.standard_errors is not None:
            squares = [[scores.standard_errors[index][u] ** 2 for u in unit] for unit in members]
            errors.append(tuple(sum(unit) ** 0.5 for unit in squares))
        if scores.costs is not None:
            costs.append(tuple(Cost.sum(scores.costs.units[index][u] for u in unit) for unit in members))
    return replace(
        scores,
        sites=tuple(sites),
        values=tuple(values),
        standard_errors=tuple(errors) if scores.standard_errors is not None else None,
        costs=replace(scores.costs, units=tuple(costs)) if scores.costs is not None else None,
        samples=None,
    )


def _bundles(site: AttentionSite, values: dict[int, float]) -> tuple[tuple[int, ...], ...]:
    """Heads of equal rank within their groups, best first."""
    ranked = [sorted(group, key=lambda h: (-values[h], h)) for group in site.groups]
    return tuple(tuple(sorted(h for h in rank if h is not None)) for rank in zip_longest(*ranked))
