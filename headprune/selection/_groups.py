"""Budgets for groups of sites: the sites of each budget, and the scores of those sites alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.heads import KINDS, AttentionSite, HeadMask
from headprune.core.plan import Budget, SiteBudget, allowance
from headprune.core.scores import Cost, HeadScores

WHERE = "select(budget=)"


def sites_by_budget(
    sites: Sequence[AttentionSite], budgets: Mapping[str, Budget]
) -> list[tuple[SiteBudget, tuple[int, ...]]]:
    """Every budget with the indices of its sites.

    Raises:
        InvalidValue: not a mapping from strings to budgets, an empty one, or two keys for one site.
        UnknownName: a key that matches no site.
    """
    if not budgets:
        raise InvalidValue(WHERE, "a Budget, or a mapping of at least one", "an empty mapping")
    groups: list[tuple[SiteBudget, tuple[int, ...]]] = []
    key_of: dict[int, str] = {}  # by site: one that two keys name has two budgets
    for key, budget in budgets.items():
        if not isinstance(key, str) or not isinstance(budget, Budget):
            must = (
                "a mapping from a kind (self, causal, cross, feed_forward) or a pattern over sites'"
                " names to a Budget"
            )
            raise InvalidValue(WHERE, must, f"{key!r}: {budget!r}")
        group = SiteBudget(key, budget)
        places = group.places(sites)
        if not places:
            raise _no_such_sites(sites, key)
        for place in places:
            if place in key_of:
                must = f"for other sites than those of {key_of[place]!r}"
                got = f"{sites[place].name}, which both keys name"
                hint = "Give every site at most one budget."
                raise InvalidValue(f"{WHERE}[{key!r}]", must, got, hint)
            key_of[place] = key
        groups.append((group, places))
    return groups


def _no_such_sites(sites: Sequence[AttentionSite], key: str) -> UnknownName:
    """The error of a key that matches no site."""
    present = sorted({site.kind for site in sites})
    names = [site.name for site in sites]
    hint = did_you_mean(key, [*KINDS, *names])
    # A hint that is no guess would list every site of the model.
    if key in ("encoder", "decoder") or not hint.startswith("Did"):
        hint = "Kinds: 'self' (encoder), 'causal' (decoder), 'cross' (decoder to encoder)."
    must = f"a kind ({', '.join(present)}) or a pattern over sites' names, such as {names[0]!r}"
    return UnknownName(f"{WHERE}[{key!r}]", must, "a key that matches no site", hint)


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


def scores_of_sites(scores: HeadScores, places: Iterable[int]) -> HeadScores:
    """The scores of some sites, as if nothing else had a cost."""
    # Samples are of the whole model.
    found = replace(scores, samples=None).of_places(tuple(places))
    if found.costs is None:
        return found
    # A fraction of this budget is one of the cost of these sites.
    total = Cost.sum(chain.from_iterable(found.costs.units))
    return replace(found, costs=replace(found.costs, total=total))
