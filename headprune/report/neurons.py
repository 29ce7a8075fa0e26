"""The table of layers where heads and neurons share a budget: what each keeps and saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from headprune.core.errors import UnknownName
from headprune.core.heads import AttentionSite, HeadCounts
from headprune.core.latency import LatencyTable
from headprune.core.record import RunRecord
from headprune.core.scores import Cost
from headprune.report.formats import counts, fixed
from headprune.report.heatmap import short_names
from headprune.report.layers import SiteCost, kept_of, site_cost


@dataclass(frozen=True)
class NeuronLine:
    """One formatted row: the heads or the neurons of a layer, or the sum of all.

    Pairs are before and after.
    """

    label: str  # the part of the site's name that differs
    kept: str  # such as `512 of 3,072 neurons`
    share: float  # of them that is kept, in percent
    params: tuple[str, str]
    macs: tuple[str, str]  # multiply-adds per example
    cache: tuple[str, str]  # bytes per token
    time: tuple[str, str]  # milliseconds per call; empty without a latency table
    bought: str  # milliseconds that the cut saves there, by the latency table


@dataclass(frozen=True)
class NeuronTable:
    """The rows in model order, their sum, and the values of the heading."""

    pattern: str  # the parts of the sites' names that all share
    lines: tuple[NeuronLine, ...]
    total: NeuronLine
    length: int  # tokens per example, of the multiply-adds
    timed_at: str  # batch and length of the times; empty without a latency table
    cached: bool  # whether heads have a key/value cache


#: Seconds of a site before and after the cut.
_Times = tuple[float, float]


def neuron_table(record: RunRecord, latency: LatencyTable | None = None) -> NeuronTable | None:
    """Lay out what each layer keeps; None where no neurons were scored, or without plan or costs.

    Args:
        record: The record.
        latency: Of the run; it says how many milliseconds each cut saves.
    """
    scores, plan = record.scores, record.plan
    if scores is None or plan is None or scores.costs is None or scores.counts.neurons is None:
        return None
    # 1. Costs and times of every site.
    costs: list[SiteCost] = []
    for site, units in zip(scores.sites, scores.costs.units, strict=True):
        costs.append(site_cost(site, units, kept_of(plan, site)))
    times = _times(scores.sites, costs, latency)
    # 2. A row per site, and the sum.
    length = scores.costs.length
    pattern, labels = short_names([site.name for site in scores.sites])
    lines = []
    rows = zip(labels, _pairs(scores.sites, costs), times or repeat(None), strict=False)
    for label, pair, time in rows:
        lines.append(_line(label, [pair], length, time))
    total = _line("all layers", list(_pairs(scores.sites, costs)), length, _sum(times))
    timed_at = ""
    if times and latency is not None:
        timed_at = f"batch {latency.batch_size} × {latency.length} tokens, {latency.device}"
    cached = any(cost.before.kv_bytes for cost in costs)
    return NeuronTable(pattern, tuple(lines), total, length, timed_at, cached)


def _pairs(
    sites: Iterable[AttentionSite], costs: Iterable[SiteCost]
) -> Iterable[tuple[AttentionSite, SiteCost]]:
    return zip(sites, costs, strict=True)


def _times(
    sites: Iterable[AttentionSite], costs: Iterable[SiteCost], latency: LatencyTable | None
) -> list[_Times]:
    """Seconds of every site before and after the cut; empty where the table does not say."""
    times: list[_Times] = []
    if latency is None:
        return times
    for site, cost in _pairs(sites, costs):
        try:
            row = latency.row(site.name)
        except UnknownName:  # a table of another model lies in the folder
            return []
        after = row[cost.kept] if cost.kept < len(row) else None
        if after is None or row[-1] is None:
            return []  # cut further than the budget asked, by training in stages
        times.append((row[-1], after))
    return times


def _sum(times: Sequence[_Times]) -> _Times | None:
    """The times of all sites together; None where none are known."""
    if not times:
        return None
    return sum(before for before, _ in times), sum(after for _, after in times)


def _line(
    label: str, parts: Sequence[tuple[AttentionSite, SiteCost]], length: int, time: _Times | None
) -> NeuronLine:
    """The row of one site, or of all together."""
    kept = HeadCounts.sum((cost.kept, site.is_feed_forward) for site, cost in parts)
    whole = HeadCounts.sum((cost.heads, site.is_feed_forward) for site, cost in parts)
    before = Cost.sum(cost.before for _, cost in parts)
    after = Cost.sum(cost.after for _, cost in parts)
    neurons = all(site.is_feed_forward for site, _ in parts)
    words = kept.of(whole)
    if neurons:
        words = f"{kept.neurons:,} of {whole.neurons:,} neurons"
    n_kept, n_whole = kept.heads + (kept.neurons or 0), whole.heads + (whole.neurons or 0)
    shown, bought = ("", ""), ""
    if time is not None:
        shown = (fixed(1000 * time[0], 2), fixed(1000 * time[1], 2))
        bought = fixed(1000 * (time[0] - time[1]), 2)
    return NeuronLine(
        label=label,
        kept=words,
        # A layer that had lost all before has no share.
        share=round(100 * n_kept / n_whole, 1) if n_whole else 0.0,
        params=counts(before.params, after.params),
        macs=counts(before.macs(length), after.macs(length)),
        cache=counts(before.kv_bytes, after.kv_bytes),
        time=shown,
        bought=bought,
    )
