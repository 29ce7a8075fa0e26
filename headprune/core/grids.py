"""Grids of cells that draw scores and masks: one row per site, one cell per head."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.core.display import Cell, Row, levels
from headprune.core.heads import AttentionSite, HeadId, HeadMask


def score_rows(
    sites: Sequence[AttentionSite],
    values: Sequence[Sequence[float]],
    kept: frozenset[HeadId] | None = None,
) -> list[Row]:
    """Draw scores; heads outside ``kept`` are drawn as removed.

    Args:
        sites: The scored sites.
        values: For every site, one value per unit.
        kept: The kept heads; None where all are kept.
    """
    flat: list[float] = []
    for row in values:
        flat.extend(row)
    # All sites share one scale; each takes its part of the levels in turn.
    remaining_levels = iter(levels(flat))
    several_kinds = len({site.kind for site in sites}) > 1
    rows = []
    for site, site_values in zip(sites, values, strict=True):
        level_of: dict[int, float] = {}
        value_of: dict[int, float] = {}
        for unit, value in zip(site.units, site_values, strict=True):
            level = next(remaining_levels)
            for head in unit:
                level_of[head], value_of[head] = level, value
        cells = []
        for head in range(site.n_query_heads):
            is_kept = head in value_of and (kept is None or HeadId(site.name, head) in kept)
            text = f"{value_of[head]:.4g}" if head in value_of else "already removed"
            cells.append(Cell(head, level_of.get(head), is_kept, f"{site.name}[{head}]: {text}"))
        rows.append(Row(site.name, tuple(cells), site.kind if several_kinds else ""))
    return rows


def mask_rows(mask: HeadMask) -> list[Row]:
    """Draw which heads a mask keeps."""
    rows = []
    for row in mask.rows:
        cells = []
        for head in range(row.n_heads):
            is_kept = head in row.kept
            text = "kept" if is_kept else "removed"
            cells.append(Cell(head, None, is_kept, f"{row.site}[{head}]: {text}"))
        rows.append(Row(row.site, tuple(cells)))
    return rows
