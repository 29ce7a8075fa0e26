"""Budgets for groups of sites: the sites of each budget, and the scores of those sites alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.heads import KINDS, AttentionSite, HeadMask
from headprune.core.plan import Budget, SiteBudget, allowance
from headprune.core.samples import if_there
from headprune.core.scores import Cost, HeadScores

_T = TypeVar("_T")

WHERE = "select(budget=)"


def divided(
    sites: Sequence[AttentionSite], budgets: Mapping[str, Budget]
) -> list[tuple[SiteBudget, tuple[int, ...]]]:
    """Every budget with the indices of its sites.

    Raises:
        InvalidValue: not a mapping from strings to budgets, an empty one, or two keys for one site.
        UnknownName: a key that is for no site.
    """
    if not budgets:
        raise InvalidValue(WHERE, "a Budget, or a mapping of at least one", "an empty mapping")
    groups: list[tuple[SiteBudget, tuple[int, ...]]] = []
    key_of: dict[int, str] = {}  # by site: one that two keys name has two budgets
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
            raise _no_such_sites(sites, key)
        for place in places:
            if place in key_of:
                must = f"for sites that {key_of[place]!r} leaves out"
                hint = "Give every site at most one budget."
                raise InvalidValue(f"{WHERE}[{key!r}]", must, sites[place].name, hint)
            key_of[place] = key
        groups.append((group, places))
    return groups


def _no_such_sites(sites: Sequence[AttentionSite], key: str) -> UnknownName:
    """The error of a key that is for no site."""
    present = sorted({site.kind for site in sites})
    names = [site.name for site in sites]
    hint = did_you_mean(key, [*KINDS, *names])
    # A hint that is no guess would list every site of the model.
    if key in ("encoder", "decoder") or not hint.startswith("Did"):
        hint = (
            "An encoder attends to itself by 'self', a decoder by 'causal', and to the"
            " encoder by 'cross'."
        )
    must = f"a kind ({', '.join(present)}) or a pattern over sites' names, such as {names[0]!r}"
    return UnknownName(f"{WHERE}[{key!r}]", must, "one that is for no site", hint)


def heads_by_kind(sites: Iterable[AttentionSite], mask: HeadMask | None = None) -> dict[str, int]:
    """Count the heads of each kind of attention: those present, or those that a mask keeps."""
    counts: dict[str, int] = {}
    for site in sites:
        if site.heads and not site.is_feed_forward:  # whose neurons are no heads
            heads = site.heads if mask is None else mask.kept(site.name)
            counts[site.kind] = counts.get(site.kind, 0) + len(heads)
    return counts


def by_kind(sites: Iterable[AttentionSite], budget: Budget) -> dict[str, Budget] | None:
    """The budget as a count of heads for each kind of attention.

    Every kind keeps the same share of its heads; the remainder of rounding goes to the largest
    fractions.

    Returns:
        None where all sites are of one kind, where the budget counts no heads, or where a kind
        would keep none.
    """
    heads = heads_by_kind(sites)
    # One kind alone needs no budget of its own.
    if len(heads) < 2 or budget.keep_heads is None:
        return None
    total = sum(heads.values())
    kept = min(total, allowance(budget.keep_heads, total))
    # Whole numbers throughout, so that no rounding of a share decides where a head goes.
    counts = {kind: kept * count // total for kind, count in heads.items()}
    by_fraction = sorted(heads, key=lambda kind: -(kept * heads[kind] % total))
    for kind in by_fraction[: kept - sum(counts.values())]:
        counts[kind] += 1
    if not all(counts.values()):
        return None
    return {kind: replace(budget, keep_heads=count) for kind, count in counts.items()}


def part(scores: HeadScores, places: Iterable[int]) -> HeadScores:
    """The scores of some sites, as if nothing else had a cost."""
    places = list(places)
    errors = scores.standard_errors
    if errors is not None:
        errors = _chosen(errors, places)
    costs = scores.costs
    if costs is not None:
        units = _chosen(costs.units, places)
        # A fraction of this budget is one of the cost of these sites.
        costs = replace(costs, total=Cost.sum(chain.from_iterable(units)), units=units)
    curvature, notes = None, scores.notes
    if scores.curvature is not None:
        rows = _flat_units(scores, places)
        curvature, lost = if_there(partial(scores.curvature.part, rows))
        notes = (*notes, *lost)
    return replace(
        scores,
        sites=_chosen(scores.sites, places),
        values=_chosen(scores.values, places),
        standard_errors=errors,
        costs=costs,
        samples=None,  # samples are of the whole model
        notes=notes,
        curvature=curvature,
        ladders=None if scores.ladders is None else _chosen(scores.ladders, places),
    )


def _chosen(rows: Sequence[_T], places: Iterable[int]) -> tuple[_T, ...]:
    return tuple(rows[place] for place in places)


def _flat_units(scores: HeadScores, places: Iterable[int]) -> list[int]:
    """The units of some sites, counted over the units of all sites."""
    first = [0]  # per site, the number of units before it
    for row in scores.values:
        first.append(first[-1] + len(row))
    flat: list[int] = []
    for place in places:
        flat.extend(range(first[place], first[place + 1]))
    return flat
