"""The table of layers: heads of every site and their costs, before and after the cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headprune.core.heads import AttentionSite
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.core.scores import Cost
from headprune.report.formats import counts
from headprune.report.heatmap import by_kind, short_names


@dataclass(frozen=True)
class LayerLine:
    """One formatted row: a site, or the sum of all.

    Pairs are before and after; ``share`` is the percentage of heads that are kept.
    """

    label: str  # the part of the site's name that differs
    kind: str  # kind of attention; empty where all are alike
    heads: tuple[str, str]
    params: tuple[str, str]
    macs: tuple[str, str]  # multiply-adds per example
    cache: tuple[str, str]  # bytes per token
    share: float


@dataclass(frozen=True)
class LayerTable:
    """The rows, their sum, and the values of the heading."""

    lines: tuple[LayerLine, ...]
    total: LayerLine  # the sum of all lines
    length: int  # tokens per example
    cached: bool  # whether heads have a key/value cache


@dataclass(frozen=True)
class SiteCost:
    """Heads present and kept, and their costs."""

    heads: int
    kept: int
    before: Cost
    after: Cost


def layer_table(record: RunRecord) -> LayerTable | None:
    """Sum what the heads of every layer cost; None without a plan, without costs, or with neurons.

    A head's cost is what removing it saves, as the scores count it. What heads share is in no row.
    """
    scores, plan = record.scores, record.plan
    if scores is None or plan is None or scores.costs is None:
        return None
    if scores.counts.neurons is not None:
        return None  # `headprune.report.neurons` has heads and neurons in one table
    length = scores.costs.length
    # 1. Add up the units of every site.
    costs = {}
    for site, units in zip(scores.sites, scores.costs.units, strict=True):
        costs[site.name] = site_cost(site, units, kept_of(plan, site))
    # 2. Format a row per site, by kind of attention.
    lines = []
    kinds = by_kind({site.name: site.kind for site in scores.sites})
    for kind, names in kinds:
        labels = short_names(names)[1]
        for name, label in zip(names, labels, strict=True):
            lines.append(layer_line(label, kind, costs[name], length))
    # 3. Add the sum.
    whole = total_cost(costs.values())
    # Encoders have no cache.
    cached = whole.before.kv_bytes > 0
    return LayerTable(tuple(lines), layer_line("all layers", "", whole, length), length, cached)


def kept_of(plan: PruningPlan, site: AttentionSite) -> set[int]:
    """The present heads of a site that a plan keeps."""
    kept = set(site.heads)
    return kept & set(plan.mask.kept(site.name)) if site.name in plan.mask.sites else kept


def site_cost(site: AttentionSite, units: Sequence[Cost], kept: set[int]) -> SiteCost:
    """Sum the costs of a site's units; after the cut, only units that keep all heads count."""
    after = []
    for heads, cost in zip(site.units, units, strict=True):
        if set(heads) <= kept:
            after.append(cost)
    return SiteCost(len(site.heads), len(kept), Cost.sum(units), Cost.sum(after))


def total_cost(costs: Iterable[SiteCost]) -> SiteCost:
    """The costs of several sites together."""
    heads = kept = 0
    before, after = [], []
    for cost in costs:
        heads += cost.heads
        kept += cost.kept
        before.append(cost.before)
        after.append(cost.after)
    return SiteCost(heads, kept, Cost.sum(before), Cost.sum(after))


def layer_line(label: str, kind: str, cost: SiteCost, length: int) -> LayerLine:
    """Format the row of one site, or of all together."""
    before, after = cost.before, cost.after
    # A layer that had lost all heads before has no share.
    share = 100 * cost.kept / cost.heads if cost.heads else 0.0
    return LayerLine(
        label=label,
        kind=kind,
        heads=(f"{cost.heads:,}", f"{cost.kept:,}"),
        params=counts(before.params, after.params),
        macs=counts(before.macs(length), after.macs(length)),
        cache=counts(before.kv_bytes, after.kv_bytes),
        share=round(share, 1),
    )
