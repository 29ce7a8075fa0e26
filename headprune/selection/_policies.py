"""What policies of shared key/value heads mean for a KV cache: possible budgets, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
            must = "used where heads that share a key/value head are removed together"
            raise InvalidValue(
                "Budget.keep_kv", must, f"{site.name} with policy {site.policy!r}", hint
            )


def _shares(site: AttentionSite) -> bool:
    """Whether several query heads share a key/value head."""
    return max(map(len, site.groups), default=0) > 1


def cache_notes(sites: Sequence[AttentionSite], mask: HeadMask) -> tuple[str, ...]:
    """What a KV cache keeps where query heads are removed one by one.

    One line for layers with a single key/value head (MQA), whatever their policy, and one for each
    policy other than ``group``.
    """
    single: list[AttentionSite] = []
    grouped: dict[str, list[AttentionSite]] = {"balanced": [], "free": []}
    for site in sites:
        if _shares(site) and site.n_kv_heads == 1:
            single.append(site)
        elif _shares(site) and site.policy in grouped:
            grouped[site.policy].append(site)
    notes = []
    if single:
        cache = _CacheUse.of(single, mask)
        notes.append(
            "MQA: a layer keeps its only key/value head if it keeps any query head:"
            f" {cache.read} of {cache.present} layers do. Their cache {cache.change}."
        )
    for policy, there in grouped.items():
        if there:
            cache = _CacheUse.of(there, mask)
            notes.append(
                f"{policy}: {cache.read} of {cache.present} shared key/value heads are still read"
                f" and kept. A cache that stores each once {cache.change}."
            )
            if cache.uneven:
                notes[-1] += (
                    " Groups now differ in size, so every step repeats keys and values for each"
                    " query head."
                )
    return tuple(notes)


@dataclass(frozen=True)
class _CacheUse:
    """The key/value heads that kept query heads read.

    Args:
        read: Their number.
        present: The number of key/value heads before.
        change: What becomes of a cache, in words.
        uneven: Whether some of them are read by more kept query heads than others.
    """

    read: int
    present: int
    change: str
    uneven: bool

    @classmethod
    def of(cls, sites: Sequence[AttentionSite], mask: HeadMask) -> _CacheUse:
        read = present = before = after = 0
        uneven = False
        for site in sites:
            kept = set(mask.kept(site.name))
            sizes = [len(kept.intersection(group)) for group in site.groups]
            n_read = len(sizes) - sizes.count(0)
            width = site.head_dim + site.value_dim  # numbers per token of one key/value head
            read += n_read
            present += len(sizes)
            before += width * len(sizes)
            after += width * n_read
            uneven = uneven or len(set(sizes) - {0}) > 1
        change = "stays as it is"
        if after != before:
            change = f"shrinks to {100 * after / before:.0f} %"
        return cls(read, present, change, uneven)
