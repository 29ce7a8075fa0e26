"""What policies of shared key/value heads mean for a KV cache: possible budgets, and notes."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import Budget


def check_cache_budget(sites: Sequence[AttentionSite], budget: Budget) -> None:
    """Refuse ``keep_kv`` where no unit alone frees a key/value head.

    There a unit has no share of the cache.

    Raises:
        InvalidValue: a causal site with a group of several heads that are removed one by one.
    """
    if budget.kind != "keep_kv":
        return
    for site in sites:
        if site.kind == "causal" and site.policy != "group" and _shares(site):
            hint = (
                "There the cache shrinks only by key/value heads that no kept head reads. Budget by"
                " keep_heads, keep_params or keep_macs, find the sites with policy='group', or"
                " leave this one out."
            )
            must = "used where heads that share a key/value head leave together"
            raise InvalidValue(
                "Budget.keep_kv", must, f"{site.name} with policy {site.policy!r}", hint
            )


def _shares(site: AttentionSite) -> bool:
    """Whether several query heads share a key/value head."""
    return any(len(group) > 1 for group in site.groups)


def cache_notes(sites: Sequence[AttentionSite], mask: HeadMask) -> tuple[str, ...]:
    """What a KV cache keeps where query heads are removed one by one.

    One line for layers with a single key/value head (MQA), whatever their policy, and one for each
    policy other than ``group``.
    """
    shared = [site for site in sites if _shares(site)]
    notes = []
    single = [site for site in shared if site.n_kv_heads == 1]
    if single:
        read, cache, _ = _cache_of(single, mask)
        notes.append(
            "MQA: the one key/value head of a layer stays as long as one of its query heads does,"
            f" {read} of {len(single)}; a cache of them {cache}."
        )
    several = [site for site in shared if site.n_kv_heads > 1]
    for policy in ("balanced", "free"):
        grouped = [site for site in several if site.policy == policy]
        if not grouped:
            continue
        read, cache, uneven = _cache_of(grouped, mask)
        present = sum(len(site.groups) for site in grouped)
        note = (
            f"{policy}: {read} of {present} shared key/value heads stay, those that a kept head"
            f" reads; a cache that holds each of them once {cache}."
        )
        if uneven:
            note += (
                " Where groups are of unlike size, every step repeats keys and values for each"
                " query head."
            )
        notes.append(note)
    return tuple(notes)


def _cache_of(sites: Sequence[AttentionSite], mask: HeadMask) -> tuple[int, str, bool]:
    """Key/value heads that kept heads read, what becomes of a cache, and whether groups differ.

    Groups differ where some kept heads share a key/value head with more others than some do.
    """
    read = before = after = 0
    uneven = False
    for site in sites:
        kept = set(mask.kept(site.name))
        sizes = [len(kept.intersection(group)) for group in site.groups]
        sizes_of_read = [size for size in sizes if size]
        width = site.head_dim + site.value_dim  # numbers per token of one key/value head
        read += len(sizes_of_read)
        before += width * len(sizes)
        after += width * len(sizes_of_read)
        uneven = uneven or len(set(sizes_of_read)) > 1
    if after == before:
        return read, "stays as it is", uneven
    return read, f"shrinks to {100 * after / before:.0f} %", uneven
