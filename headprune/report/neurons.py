"""The table of layers where heads and neurons share a budget: what each keeps and saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headprune.core.errors import UnknownName
from headprune.core.heads import AttentionSite, HeadCounts
from headprune.core.ladders import SiteLadder
from headprune.core.latency import SAVINGS_FACTOR, LatencyTable
from headprune.core.record import RunRecord
from headprune.report.formats import milliseconds
from headprune.report.heatmap import short_names
from headprune.report.layers import (
    LayerLine,
    LayerTable,
    SiteCost,
    kept_of,
    layer_line,
    site_cost,
    total_cost,
)


@dataclass(frozen=True)
class NeuronLine(LayerLine):
    """One formatted row: the heads or the neurons of a layer, or the sum of all."""

    kept: str  # such as `512 of 3,072 neurons`
    time: tuple[str, str]  # milliseconds per call; empty without a latency table
    saved: str  # milliseconds that the cut saves there, by the latency table
    price: str  # how far this cut alone moves the outputs; empty without ladders


@dataclass(frozen=True)
class NeuronTable(LayerTable):
    """The rows in model order, their sum, and the values of the heading."""

    lines: tuple[NeuronLine, ...]
    total: NeuronLine
    pattern: str  # the parts of the sites' names that all share
    timed_at: str  # batch and length of the times; empty without a latency table

    @property
    def priced(self) -> bool:
        return bool(self.lines[0].price)


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
    parts = list(zip(scores.sites, costs, strict=True))
    prices = _prices(scores.ladders, costs)
    of_times: Sequence[_Times | None] = times or [None] * len(costs)
    for label, part, time, price in zip(labels, parts, of_times, prices, strict=True):
        lines.append(_line(label, [part], length, time, price))
    total = _line("all layers", parts, length, _sum(times))
    timed_at = ""
    if times and latency is not None:
        timed_at = _timed_at(latency, record.metrics.get(SAVINGS_FACTOR))
    cached = any(cost.before.kv_bytes for cost in costs)
    return NeuronTable(tuple(lines), total, length, cached, pattern, timed_at)


def _timed_at(latency: LatencyTable, factor: float | None) -> str:
    words = f"batch {latency.batch_size} × {latency.length} tokens, {latency.device}"
    if factor is not None:
        words += f"; savings scaled by {factor} to the speed of a cut copy"
    return words


def _prices(ladders: Sequence[SiteLadder] | None, costs: Sequence[SiteCost]) -> list[str]:
    """What each site's level costs; empty where no prices were measured."""
    if ladders is None:
        return [""] * len(costs)
    return [f"{ladder.at(cost.kept):.2g}" for ladder, cost in zip(ladders, costs, strict=True)]


def _times(
    sites: Iterable[AttentionSite], costs: Iterable[SiteCost], latency: LatencyTable | None
) -> list[_Times]:
    """Seconds of every site before and after the cut; empty where the table does not say."""
    times: list[_Times] = []
    if latency is None:
        return times
    for site, cost in zip(sites, costs, strict=True):
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
    label: str,
    parts: Sequence[tuple[AttentionSite, SiteCost]],
    length: int,
    time: _Times | None,
    price: str = "",
) -> NeuronLine:
    """The row of one site, or of all together."""
    kept = HeadCounts.sum((cost.kept, site.is_feed_forward) for site, cost in parts)
    whole = HeadCounts.sum((cost.heads, site.is_feed_forward) for site, cost in parts)
    words = kept.of(whole)
    if all(site.is_feed_forward for site, _ in parts):
        words = f"{kept.neurons:,} of {whole.neurons:,} neurons"
    shown, saved = ("", ""), ""
    if time is not None:
        shown = (milliseconds(time[0]), milliseconds(time[1]))
        saved = milliseconds(time[0] - time[1])
    line = layer_line(label, "", total_cost(cost for _, cost in parts), length)
    return NeuronLine(**vars(line), kept=words, time=shown, saved=saved, price=price)
