"""Values as pandas tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

    from headprune.core.scores import HeadScores

_COLUMNS = (
    *("site", "kind", "head", "kv_head", "unit", "score", "standard_error", "rank"),
    *("params", "macs", "kv_bytes"),
)


def scores_frame(scores: HeadScores) -> DataFrame:
    """What ``HeadScores.to_frame`` gives."""
    from pandas import DataFrame

    ranked = scores.ranked()
    ranks = {(unit.site, unit.unit): len(ranked) - place for place, unit in enumerate(ranked)}
    rows: list[dict[str, Any]] = []
    for unit in scores.units():
        site = scores.sites[unit.site]
        shared: dict[str, Any] = {
            "unit": unit.unit,
            "score": unit.value,
            "standard_error": unit.standard_error,
        }
        shared["rank"] = ranks[unit.site, unit.unit]
        if unit.cost is not None and scores.costs is not None:
            macs = unit.cost.macs(scores.costs.length)
            shared |= {"params": unit.cost.params, "macs": macs, "kv_bytes": unit.cost.kv_bytes}
        heads = ({"head": head, "kv_head": site.kv_head(head)} for head in unit.heads)
        rows += [{"site": unit.name, "kind": site.kind, **head, **shared} for head in heads]
    return DataFrame(rows, columns=list(_COLUMNS)).astype({"standard_error": float})
