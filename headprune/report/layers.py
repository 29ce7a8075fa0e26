"""The table of layers: heads, parameters, multiply-adds and cache of every site's heads, before and
after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headprune.core.record import RunRecord
from headprune.core.scores import Cost
from headprune.report.formats import counts
from headprune.report.heatmap import by_kind, short_names


@dataclass(frozen=True)
class LayerLine:
    """One formatted row: a site, or the sum of all; pairs are before and after, ``share`` the
    percent that stays."""

    label: str
    kind: str
    heads: tuple[str, str]
    params: tuple[str, str]
    macs: tuple[str, str]
    cache: tuple[str, str]
    share: float


@dataclass(frozen=True)
class LayerTable:
    """The rows, their sum, and what the heading needs."""

    lines: tuple[LayerLine, ...]
    total: LayerLine
    length: int
    cached: bool


@dataclass(frozen=True)
class _Side:
    """Heads present and kept, and what they cost."""

    heads: int
    kept: int
    before: Cost
    after: Cost


def layer_table(record: RunRecord) -> LayerTable | None:
    """What the heads of every layer cost before and after the plan; None without a plan or without
    costs.

    A head's cost is what leaves the model with it, as the scores counted it; what heads share is in
    no row.
    """
    scores, plan = record.scores, record.plan
    if scores is None or plan is None or scores.costs is None:
        return None
    length, costs = scores.costs.length, scores.costs.units
    sides = {}
    for site, units in zip(scores.sites, costs, strict=True):
        kept = set(plan.mask.kept(site.name)) if site.name in plan.mask.sites else set(site.heads)
        stays = [cost for heads, cost in zip(site.units, units, strict=True) if set(heads) <= kept]
        sides[site.name] = _Side(
            len(site.heads), len(kept & set(site.heads)), Cost.sum(units), Cost.sum(stays)
        )
    lines = []
    for kind, names in by_kind({site.name: site.kind for site in scores.sites}):
        labels = short_names(names)[1]
        lines += [
            _line(label, kind, sides[name], length)
            for name, label in zip(names, labels, strict=True)
        ]
    every = list(sides.values())
    whole = _Side(
        sum(side.heads for side in every),
        sum(side.kept for side in every),
        Cost.sum(side.before for side in every),
        Cost.sum(side.after for side in every),
    )
    total = _line("all layers", "", whole, length)
    return LayerTable(tuple(lines), total, length, any(c.kv_bytes for row in costs for c in row))


def _line(label: str, kind: str, side: _Side, length: int) -> LayerLine:
    def pair(number: Callable[[Cost], int]) -> tuple[str, str]:
        return counts(number(side.before), number(side.after))

    return LayerLine(
        label=label,
        kind=kind,
        heads=(f"{side.heads:,}", f"{side.kept:,}"),
        params=pair(lambda cost: cost.params),
        macs=pair(lambda cost: cost.macs(length)),
        cache=pair(lambda cost: cost.kv_bytes),
        share=round(100 * side.kept / side.heads, 1) if side.heads else 0.0,
    )
