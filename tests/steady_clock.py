"""Latency tables whose times do not depend on the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headprune.bench.latency_tables import latency_table
from headprune.core.latency import LatencyTable, SiteLatency


def steady_table(*args: Any, **kwargs: Any) -> LatencyTable:
    """A table that is measured, in no time, and then gets other times: 1 s for the model, 0.1 s of
    it for a head."""
    found = latency_table(*args, **{**kwargs, "seconds": 0})
    rows = tuple(
        SiteLatency(r.site, tuple(0.1 * n for n in range(len(r.seconds)))) for r in found.sites
    )
    return replace(found, whole=1.0, sites=rows)


def steady_levels(*args: Any, **kwargs: Any) -> LatencyTable:
    """A table with neurons that is measured, in no time, and then gets other times: 1 s for the
    model, shared by its sites; units of a site take equal parts of its share."""
    found = latency_table(*args, **{**kwargs, "seconds": 0})
    share = 1.0 / len(found.sites)
    rows = []
    for row in found.sites:
        most = len(row.seconds) - 1
        seconds = [None if s is None else share * n / most for n, s in enumerate(row.seconds)]
        rows.append(replace(row, seconds=tuple(seconds)))
    return replace(found, whole=1.0, sites=tuple(rows))
