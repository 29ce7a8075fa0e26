"""What the policies of shared key/value heads mean for a cache: which budgets work, and what a plan says of it."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import Budget


def check_cache_budget(sites: Sequence[AttentionSite], budget: Budget) -> None:
    """Refuses ``keep_kv`` where no unit alone frees a key/value head, so that a unit has no share of the cache.

    Raises:
        InvalidValue: a causal site with a group of several heads of which single ones may leave.
    """
    if budget.kind != "keep_kv":
        return
    for site in sites:
        if site.kind == "causal" and site.policy != "group" and any(len(group) > 1 for group in site.groups):
            hint = "There the cache shrinks only by key/value heads that no kept head reads. Budget by keep_heads, "
            hint += "keep_params or keep_macs, find the sites with policy='group', or leave this one out."
            must = "used where heads that share a key/value head leave together"
            raise InvalidValue("Budget.keep_kv", must, f"{site.name} with policy {site.policy!r}", hint)


def cache_notes(sites: Sequence[AttentionSite], mask: HeadMask) -> tuple[str, ...]:
    """One line for each policy other than ``group``: the key/value heads that stay, and what a cache of them keeps."""
    notes = []
    for policy in ("balanced", "free"):
        grouped = [s for s in sites if s.policy == policy and any(len(g) > 1 for g in s.groups)]
        if not grouped:
            continue
        before = after = whole = left = 0
        uneven = False
        for site in grouped:
            counts = [sum(h in mask.kept(site.name) for h in group) for group in site.groups]
            width, stays = site.head_dim + site.value_dim, sum(n > 0 for n in counts)
            before, after = before + len(counts), after + stays
            whole, left = whole + width * len(counts), left + width * stays
            uneven = uneven or len({n for n in counts if n}) > 1
        cache = "stays as it is" if left == whole else f"shrinks to {100 * left / whole:.0f} %"
        note = f"{policy}: {after} of {before} shared key/value heads stay, those that a kept head reads; "
        note += f"a cache that holds each of them once {cache}."
        if uneven:
            note += " Where groups are of unlike size, every step repeats keys and values for each query head."
        notes.append(note)
    return tuple(notes)
