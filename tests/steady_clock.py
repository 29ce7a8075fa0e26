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
