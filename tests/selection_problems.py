"""Problems for selectors, and what each selector of the registry asks for beside scores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headprune.core.codec import EMPTY
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.core.plan import Budget
from headprune.core.samples import Curvature
from headprune.core.scores import Cost, CostTable, HeadScores, ModelFingerprint
from headprune.selection import Selector, registry

SELECTORS = registry.names()
KINDS = ("keep_heads", "keep_params", "keep_macs", "keep_kv")
CURRENCIES = (*KINDS, "speedup")
LENGTH = 10
FIXED = Cost(params=500, macs_fixed=70, macs_per_token=900, macs_per_pair=3, kv_bytes=64)


def site(
    name: str, n_query_heads: int, n_kv_heads: int | None = None, heads: Any = None, **more: Any
) -> AttentionSite:
    heads = tuple(range(n_query_heads)) if heads is None else tuple(heads)
    kind = more.pop("kind", "causal")
    return AttentionSite(
        name, "fake", kind, n_query_heads, n_kv_heads or n_query_heads, 8, 8, heads, **more
    )


def unit_cost(weight: int, kv_bytes: int | None = None) -> Cost:
    """A unit ``weight`` times as dear as the cheapest one; two bytes are KV cache where there is
    one."""
    kv = 16 * weight if kv_bytes is None else kv_bytes
    return Cost(100 * weight, 7 * weight, 30 * weight, 2 * weight, kv)


def make(
    sites: Sequence[AttentionSite], values: Any, costs: Any = None, fixed: Cost = FIXED
) -> HeadScores:
    """Scores; ``costs`` is a Cost a unit, or None for a cost by the number of heads."""
    if costs is None:
        costs = [[unit_cost(len(heads)) for heads in s.units] for s in sites]
    total = Cost.sum([fixed, *(cost for row in costs for cost in row)])
    table = CostTable(total, tuple(map(tuple, costs)), LENGTH)
    rows = tuple(tuple(map(float, row)) for row in values)
    return HeadScores(
        tuple(sites), rows, None, "fake", EMPTY, 4, ModelFingerprint("s", "w"), costs=table
    )


def random_scores(seed: int, dear: bool = False, highest: int = 3, lowest: int = 0) -> HeadScores:
    """Ragged sites: plain heads, KV groups, heads that are gone; many ties; ``dear``: every unit
    its own price."""
    rng = random.Random(seed)
    shapes = [
        site("a", 5),
        site("b", 8, 4, heads=(0, 1, 4, 5, 6, 7)),
        site("c", 4),
        site("d", 6, heads=(1, 5)),
    ]
    rng.shuffle(shapes)
    shapes = shapes[: rng.randint(2, 4)]
    values = [[rng.randint(lowest, highest) for _ in s.units] for s in shapes]
    costs = [[unit_cost(rng.randint(1, 5)) for _ in s.units] for s in shapes] if dear else None
    return make(shapes, values, costs)


def random_table(scores: HeadScores, seed: int, noise: float = 0.0) -> LatencyTable:
    """Latency of its own for every site; with ``noise`` it may fall where a head is added, and 0
    heads may lack."""
    rng = random.Random(seed)
    rows = []
    for s in scores.sites:
        slope, start = rng.uniform(0.5, 2.0), rng.uniform(0.1, 1.0)
        row = [start + slope * n + noise * rng.random() for n in range(len(s.heads) + 1)]
        lacks = noise and len(s.heads) and rng.random() < 0.3
        rows.append(SiteLatency(s.name, (None, *row[1:]) if lacks else tuple(row)))
    whole = rng.uniform(1.0, 3.0) + sum(row.seconds[-1] or 0.0 for row in rows)
    return LatencyTable(whole, tuple(rows), 8, LENGTH, "a clock of ours", "float32")


def fitted(name: str, scores: HeadScores) -> tuple[HeadScores, dict[str, Any]]:
    """The scores and the arguments that a selector needs: each says of a mask what the sum of the
    scores says."""
    needs = registry.get(name).needs
    units = list(scores.units())
    if "curvature" in needs:
        matrix = np.diag([2 * max(unit.value, 0.0) + 1e-9 for unit in units])
        scores = replace(scores, curvature=Curvature.of(matrix))

    def loss(masks: Sequence[HeadMask]) -> Any:
        rows = [
            sum(u.value for u in units if not set(u.heads) <= set(m.kept(u.name))) for m in masks
        ]
        return np.repeat(np.array(rows, float)[:, None], 4, axis=1)

    known: dict[str, Any] = {"loss": loss, "rescore": lambda mask: scores}
    return scores, {key: value for key, value in known.items() if key in needs}


def configured(name: str, **settings: Any) -> Selector:
    chosen: Selector = registry.get(name)(**settings)
    return chosen


def asked(kind: str, share: float) -> Budget:
    """A budget that leaves about this share: as it is, or as a speed-up."""
    return (
        Budget(speedup=max(1 / share, 1 + 1e-9)) if kind == "speedup" else Budget(**{kind: share})
    )
