"""What the policies of shared key/value heads mean for a cache: which budgets work, and what a plan
says of it."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import Budget


def check_cache_budget(sites: Sequence[AttentionSite], budget: Budget) -> None:
    """Refuses ``keep_kv`` where no unit alone frees a key/value head, so that a unit has no share
    of the cache.

    Raises:
        InvalidValue: a causal site with a group of several heads of which single ones may leave.
    """
    if budget.kind != "keep_kv":
        return
    for site in sites:
        if (
            site.kind == "causal"
            and site.policy != "group"
            and any(len(group) > 1 for group in site.groups)
        ):
            hint = (
                "There the cache shrinks only by key/value heads that no kept head reads. Budget by"
                " keep_heads, "
            )
            hint += (
                "keep_params or keep_macs, find the sites with policy='group', or leave this one"
                " out."
            )
            must = "used where heads that share a key/value head leave together"
            raise InvalidValue(
                "Budget.keep_kv", must, f"{site.name} with policy {site.policy!r}", hint
            )


def cache_notes(sites: Sequence[AttentionSite], mask: HeadMask) -> tuple[str, ...]:
    """What a cache keeps where single query heads may leave: a line for each policy other than
    ``group``, and one for layers with one key/value head in all (MQA), whatever their policy."""
    shared = [s for s in sites if any(len(g) > 1 for g in s.groups)]
    notes = []
    if single := [s for s in shared if s.n_kv_heads == 1]:
        stay, cache, _ = _left(single, mask)
        note = (
            "MQA: the one key/value head of a layer stays as long as one of its query heads does, "
        )
        notes.append(f"{note}{stay} of {len(single)}; a cache of them {cache}.")
    for policy in ("balanced", "free"):
        grouped = [s for s in shared if s.policy == policy and s.n_kv_heads > 1]
        if not grouped:
            continue
        stay, cache, uneven = _left(grouped, mask)
        note = (
            f"{policy}: {stay} of {sum(len(s.groups) for s in grouped)} shared key/value heads"
            " stay, those that a "
        )
        note += f"kept head reads; a cache that holds each of them once {cache}."
        if uneven:
            note += (
                " Where groups are of unlike size, every step repeats keys and values for each"
                " query head."
            )
        notes.append(note)
    return tuple(notes)


def _left(sites: Sequence[AttentionSite], mask: HeadMask) -> tuple[int, str, bool]:
    """Key/value heads that are still read, what that makes of a cache, and whether groups become
    unlike in size."""
    stay = whole = left = 0
    uneven = False
    for site in sites:
        counts = [sum(h in mask.kept(site.name) for h in group) for group in site.groups]
        width, read = site.head_dim + site.value_dim, sum(n > 0 for n in counts)
        stay, whole, left = stay + read, whole + width * len(counts), left + width * read
        uneven = uneven or len({n for n in counts if n}) > 1
    return (
        stay,
        "stays as it is" if left == whole else f"shrinks to {100 * left / whole:.0f} %",
        uneven,
    )
