"""Units that keep groups balanced: the best head of every KV group together, then the second best,
and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadId
from headprune.core.samples import if_there
from headprune.core.scores import Cost, HeadScores


def bundled(
    scores: HeadScores,
    stay: frozenset[HeadId] = frozenset(),
    go: frozenset[HeadId] = frozenset(),
    like: Sequence[AttentionSite] | None = None,
) -> HeadScores:
    """The scores with one unit for one head of every group, at sites of the policy ``balanced``.

    A bundle's score and cost are the sums of its heads', its curvature that of its heads together
    (the units of a group of grouped queries add up in the same way), and heads are bundled by rank
    within their group. So a better bundle goes before a worse one, and whatever number of bundles a
    selector keeps, every group keeps as many heads.

    Args:
        scores: Of single heads at such sites.
        stay: Heads that rank first in their group, so that those of several groups share bundles.
        go: Heads that rank last in their group.
        like: Sites whose bundles to take over, in place of new ones by rank.

    Raises:
        InvalidValue: groups of unlike size, which ``balanced`` cannot leave as they are.
    """
    if all(s.policy != "balanced" or len(s.groups) < 2 for s in scores.sites):
        return scores
    sites, values, errors, costs = [], [], [], []
    merged: list[list[int]] = []  # the units, flat, that make each bundle
    start = 0
    for index, site in enumerate(scores.sites):
        row = dict(zip((u[0] for u in site.units), range(len(site.units)), strict=True))
        if site.policy == "balanced" and len(site.groups) > 1:
            value = {h: scores.values[index][u] for h, u in row.items()}
            site = replace(
                site, bundles=like[index].bundles if like else _bundles(site, value, stay, go)
            )
        members = [[row[h] for h in unit if h in row] for unit in site.units]
        sites.append(site)
        merged += [[start + u for u in unit] for unit in members]
        start += len(row)
        values.append(tuple(sum(scores.values[index][u] for u in unit) for unit in members))
        if scores.standard_errors is not None:
            squares = [[scores.standard_errors[index][u] ** 2 for u in unit] for unit in members]
            errors.append(tuple(sum(unit) ** 0.5 for unit in squares))
        if scores.costs is not None:
            costs.append(
                tuple(Cost.sum(scores.costs.units[index][u] for u in unit) for unit in members)
            )
    curvature, lost = (
        (None, ())
        if scores.curvature is None
        else if_there(partial(scores.curvature.merged, merged))
    )
    return replace(
        scores,
        sites=tuple(sites),
        values=tuple(values),
        standard_errors=tuple(errors) if scores.standard_errors is not None else None,
        costs=replace(scores.costs, units=tuple(costs)) if scores.costs is not None else None,
        samples=None,
        notes=(*scores.notes, *lost),
        curvature=curvature,
    )


def _bundles(
    site: AttentionSite, values: dict[int, float], stay: frozenset[HeadId], go: frozenset[HeadId]
) -> tuple[tuple[int, ...], ...]:
    """Heads of equal rank within their groups, best first."""
    if len({len(group) for group in site.groups}) > 1:
        hint = "Find the sites with policy='free' or 'group'."
        raise InvalidValue(
            f"{site.name} with policy 'balanced'", "of groups of one size", site.groups, hint
        )

    def rank(head: int) -> tuple[bool, bool, float, int]:
        name = HeadId(site.name, head)
        return name not in stay, name in go, -values[head], head

    ranked = [sorted(group, key=rank) for group in site.groups]
    return tuple(tuple(sorted(row)) for row in zip(*ranked, strict=True))
