"""Scores as pandas tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headprune.core.heads import AttentionSite
from headprune.core.units import ScoredUnit

if TYPE_CHECKING:
    from pandas import DataFrame

_COLUMNS = [
    "site",
    "kind",
    "head",
    "kv_head",
    "unit",
    "score",
    "standard_error",
    "rank",
    "params",
    "macs",
    "kv_bytes",
]


def scores_frame(
    sites: Sequence[AttentionSite],
    units: Iterable[ScoredUnit],
    ranks: Mapping[tuple[int, int], int],
    length: int | None,
) -> DataFrame:
    """Make the table of ``HeadScores.to_frame``, one row per head.

    Args:
        sites: The scored sites.
        units: Their units in model order.
        ranks: The rank of each unit, by its site and its place there.
        length: Tokens per example, for ``macs``; None without costs.
    """
    from pandas import DataFrame

    rows: list[dict[str, Any]] = []
    for unit in units:
        site = sites[unit.site]
        shared: dict[str, Any] = {
            "site": unit.name,
            "kind": site.kind,
            "unit": unit.unit,
            "score": unit.value,
            "standard_error": unit.standard_error,
            "rank": ranks[unit.site, unit.unit],
        }
        if unit.cost is not None and length is not None:
            shared["params"] = unit.cost.params
            shared["macs"] = unit.cost.macs(length)
            shared["kv_bytes"] = unit.cost.kv_bytes
        for head in unit.heads:
            own = {"head": head, "kv_head": site.kv_head(head)}
            rows.append({**shared, **own})
    # A column of None alone would have the type object.
    return DataFrame(rows, columns=_COLUMNS).astype({"standard_error": float})
