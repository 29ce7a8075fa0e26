"""Prune units that are made for a call: bundles of heads, and levels of neurons."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadId
from headprune.core.levels import LEVELS, level_widths
from headprune.core.samples import if_there
from headprune.core.scores import Bundling, Cost, HeadScores

_T = TypeVar("_T")

#: Per bundle of one site, the indices of the units that it is made of.
_Members = list[list[int]]
#: Numbers by site and bundle.
_Rows = tuple[tuple[float, ...], ...]


def bundled(
    scores: HeadScores,
    must_keep: frozenset[HeadId] = frozenset(),
    must_remove: frozenset[HeadId] = frozenset(),
    like: Sequence[AttentionSite] | None = None,
) -> HeadScores:
    """Bundle units that are kept or removed together.

    At feed-forwards, neurons are bundled by rank: with the first n bundles a site is at its n-th
    level (``level_widths``). So a selector decides on a dozen units, not on thousands.

    At sites of the policy ``balanced``, one head of every group is bundled into one unit. Heads are
    bundled by rank within their group: the best of every group, then the second best, and so on.
    So whatever number of bundles a selector keeps, every group keeps as many heads.

    A bundle's score and cost are the sums of its members'; of neurons, the score is what
    ``scores.bundling`` says. Its curvature is that of its members together.

    Args:
        scores: Of single heads at such sites.
        must_keep: Heads that rank first in their group, so that those of several groups share
            bundles.
        must_remove: Heads that rank last in their group.
        like: Sites whose bundles are used again, for scores that were measured anew.

    Raises:
        InvalidValue: groups of unlike size, which ``balanced`` cannot keep as they are.
    """
    if not any(map(_has_bundles, scores.sites)):
        return scores
    # 1. The bundles of every site, and the units that they are made of.
    sites: list[AttentionSite] = []
    members: list[_Members] = []
    for place, (site, values) in enumerate(zip(scores.sites, scores.values, strict=True)):
        new = site
        if _has_bundles(site):
            bundles = (
                like[place].bundles if like else _bundles(site, values, must_keep, must_remove)
            )
            new = replace(site, bundles=bundles)
        sites.append(new)
        members.append(_members(site, new))
    # 2. Scores, standard errors (of independent heads) and costs of every bundle.
    new_values, errors = _scores_of_bundles(scores, members)
    costs = scores.costs
    if costs is not None:
        costs = replace(costs, units=_combined(costs.units, members, Cost.sum))
    curvature, notes = None, scores.notes
    if scores.curvature is not None:
        rows = _flat(members, scores.values)
        curvature, lost = if_there(partial(scores.curvature.merged, rows))
        notes = (*notes, *lost)
    return replace(
        scores,
        sites=tuple(sites),
        values=new_values,
        standard_errors=errors,
        costs=costs,
        samples=None,  # samples are of single heads
        notes=notes,
        curvature=curvature,
    )


def in_rank(site: AttentionSite, values: Sequence[float]) -> list[int]:
    """Return the units of one site by number, the best first; bundles come in that order."""
    numbers = range(len(values))
    if site.bundles is not None:
        return list(numbers)
    # The sort is stable: of equals, the earlier unit comes first.
    return sorted(numbers, key=values.__getitem__, reverse=True)


def _has_bundles(site: AttentionSite) -> bool:
    if site.is_feed_forward:
        return site.bundles is None and len(site.heads) > LEVELS
    return site.policy == "balanced" and len(site.groups) > 1


def _members(old: AttentionSite, new: AttentionSite) -> _Members:
    """For every unit of ``new``, the indices of the units of ``old`` that it is made of."""
    # A unit of several heads is the same in both; its first head stands for it.
    index = {unit[0]: number for number, unit in enumerate(old.units)}
    members = []
    for unit in new.units:
        known = [index[head] for head in unit if head in index]
        members.append(known)
    return members


def _combined(
    rows: Sequence[Sequence[_T]],
    members: Sequence[_Members],
    combine: Callable[[list[_T]], _T],
) -> tuple[tuple[_T, ...], ...]:
    """One value for every bundle of every site, out of the values of its members."""
    combined = []
    for row, bundles in zip(rows, members, strict=True):
        values = []
        for bundle in bundles:
            parts = [row[unit] for unit in bundle]
            values.append(combine(parts))
        combined.append(tuple(values))
    return tuple(combined)


def _scores_of_bundles(
    scores: HeadScores, members: Sequence[_Members]
) -> tuple[_Rows, _Rows | None]:
    """The score of every bundle of every site and, where units have one, its standard error."""
    value_rows: list[tuple[float, ...]] = []
    error_rows: list[tuple[float, ...]] = []
    for place, (site, bundles) in enumerate(zip(scores.sites, members, strict=True)):
        bundling = scores.bundling if site.is_feed_forward else "sum"
        own_values = scores.values[place]
        own_errors = (0.0,) * len(own_values)
        if scores.standard_errors is not None:
            own_errors = scores.standard_errors[place]
        values: list[float] = []
        errors: list[float] = []
        for bundle in bundles:
            score = _bundle_score(
                [own_values[unit] for unit in bundle],
                [own_errors[unit] for unit in bundle],
                bundling,
            )
            values.append(score[0])
            errors.append(score[1])
        value_rows.append(tuple(values))
        error_rows.append(tuple(errors))
    if scores.standard_errors is None:
        return tuple(value_rows), None
    return tuple(value_rows), tuple(error_rows)


def _bundle_score(
    values: Sequence[float], errors: Sequence[float], bundling: Bundling
) -> tuple[float, float]:
    """The score of a bundle and its standard error, to first order, from independent units'."""
    total = sum(values)
    error = sum(map(operator.mul, errors, errors)) ** 0.5
    if bundling == "mean":
        return total / len(values), error / len(values)
    if bundling == "norm":
        norm = math.hypot(*values)
        if norm:
            error = math.hypot(*map(operator.mul, values, errors)) / norm
        return norm, error
    return total, error


def _flat(members: Sequence[_Members], rows: Sequence[Sequence[float]]) -> _Members:
    """The members of all bundles, counted over the units of all sites."""
    flat = []
    first = 0  # the number of units at the sites before
    for bundles, row in zip(members, rows, strict=True):
        for bundle in bundles:
            units = [first + unit for unit in bundle]
            flat.append(units)
        first += len(row)
    return flat


def _bundles(
    site: AttentionSite,
    values: Sequence[float],
    must_keep: frozenset[HeadId],
    must_remove: frozenset[HeadId],
) -> tuple[tuple[int, ...], ...]:
    """Heads of equal rank within their groups, or neurons of neighbouring ranks; best first."""
    value = {unit[0]: score for unit, score in zip(site.units, values, strict=True)}

    def rank(head: int) -> tuple[bool, bool, float, int]:
        name = HeadId(site.name, head)
        # False sorts before True, and equal scores keep the order of the heads.
        return name not in must_keep, name in must_remove, -value[head], head

    if site.is_feed_forward:
        return _neuron_bundles(sorted(site.heads, key=rank), site.n_query_heads)
    if len(set(map(len, site.groups))) > 1:
        hint = "Find the sites with policy='free' or 'group'."
        raise InvalidValue(
            f"{site.name} with policy 'balanced'", "of groups of one size", site.groups, hint
        )
    # One row per group; the columns are the bundles.
    ranked = [sorted(group, key=rank) for group in site.groups]
    return tuple(tuple(sorted(heads)) for heads in zip(*ranked, strict=True))


def _neuron_bundles(neurons: Sequence[int], n_uncut: int) -> tuple[tuple[int, ...], ...]:
    """Bundle neurons that are sorted by rank; each bundle leads from one level to the next."""
    bundles = []
    for start, stop in pairwise(level_widths(len(neurons), n_uncut)):
        bundles.append(tuple(sorted(neurons[start:stop])))
    return tuple(bundles)
