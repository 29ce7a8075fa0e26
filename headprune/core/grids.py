"""Grids of cells that draw scores and masks: one row per site, one cell per head.

A feed-forward has thousands of neurons: its row is a bar of as many parts as it has levels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise

from headprune.core.display import Cell, Row, levels
from headprune.core.heads import AttentionSite, HeadId, HeadMask, SiteKeep
from headprune.core.levels import LEVELS, level_widths


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
    several_kinds = len({site.kind for site in sites}) > 1
    neurons = [site.is_feed_forward for site in sites]
    # A row of neurons is drawn as a bar: one mean per level in place of thousands of values.
    bars = [_bar(row) if bar else row for bar, row in zip(neurons, values, strict=True)]
    of_sites = _by_site(kept or ())
    rows = []
    for site, row, row_levels in zip(sites, bars, _levels_of(neurons, bars), strict=True):
        # A site that keeps nothing is in no HeadId.
        of_site = None if kept is None else of_sites.get(site.name, set())
        if site.is_feed_forward:
            cells, note = _neuron_cells(site, row, row_levels, of_site)
        else:
            cells, note = _head_cells(site, row, row_levels, of_site), ""
        rows.append(Row(site.name, cells, site.kind if several_kinds else "", note))
    return rows


def _levels_of(neurons: Sequence[bool], bars: Sequence[Sequence[float]]) -> Iterator[list[float]]:
    """The levels of every site's row.

    All sites share one scale, but neurons have one of their own: each is small beside a head.
    """
    scales = {}
    for kind in (False, True):
        of_kind = [row for bar, row in zip(neurons, bars, strict=True) if bar is kind]
        scales[kind] = iter(levels(list(chain.from_iterable(of_kind))))
    for bar, row in zip(neurons, bars, strict=True):
        yield list(islice(scales[bar], len(row)))


def _by_site(heads: Iterable[HeadId]) -> dict[str, set[int]]:
    """Original indices of heads by the name of their site."""
    of_sites: dict[str, set[int]] = {}
    for head in heads:
        of_sites.setdefault(head.site, set()).add(head.head)
    return of_sites


def mask_rows(mask: HeadMask) -> list[Row]:
    """Draw which heads a mask keeps."""
    return [Row(row.site, *_mask_cells(row)) for row in mask.rows]


def bar_parts(kept: int, whole: int, parts: int = LEVELS) -> int:
    """Return how many of a bar's parts are filled; all or none only where that is exact.

    >>> bar_parts(3686, 9216), bar_parts(1, 9216), bar_parts(9215, 9216), bar_parts(0, 0)
    (5, 1, 11, 0)
    """
    if kept in (0, whole):
        return parts if kept else 0
    return min(max(round(parts * kept / whole), 1), parts - 1)


def _head_cells(
    site: AttentionSite,
    values: Sequence[float],
    unit_levels: Sequence[float],
    kept: Collection[int] | None,
) -> tuple[Cell, ...]:
    # Heads of one unit (a key/value group) share its score.
    level_of: dict[int, float] = {}
    value_of: dict[int, float] = {}
    for unit, value, level in zip(site.units, values, unit_levels, strict=True):
        for head in unit:
            level_of[head], value_of[head] = level, value
    # Heads that an earlier cut removed have a cell without a level.
    cells = []
    for head in range(site.n_query_heads):
        is_kept = head in value_of and (kept is None or head in kept)
        text = f"{value_of[head]:.4g}" if head in value_of else "already removed"
        cells.append(Cell(head, level_of.get(head), is_kept, f"{site.name}[{head}]: {text}"))
    return tuple(cells)


def _bar(values: Sequence[float]) -> list[float]:
    """The mean score of the neurons of each level, from the best level to the worst."""
    ranked = sorted(values, reverse=True)
    spans = pairwise(level_widths(len(ranked)))
    return [sum(ranked[start:stop]) / (stop - start) for start, stop in spans]


def _neuron_cells(
    site: AttentionSite,
    means: Sequence[float],
    bar_levels: Sequence[float],
    kept: Collection[int] | None,
) -> tuple[tuple[Cell, ...], str]:
    """The bar of a feed-forward, and its numbers as text."""
    n_present = len(site.heads)
    n_kept = n_present if kept is None else len(kept)
    # Neurons are removed from the worst up, so the first parts are the kept ones.
    filled = bar_parts(n_kept, n_present, len(means))
    widths = level_widths(n_present)
    cells = []
    for part, (mean, level) in enumerate(zip(means, bar_levels, strict=True)):
        which = f"neurons {widths[part] + 1:,} to {widths[part + 1]:,} by score"
        cells.append(
            Cell(None, level, part < filled, f"{site.name}: {which}, {mean:.4g} on average")
        )
    if kept is None:
        return tuple(cells), f"{n_present:,} neurons, best first"
    return tuple(cells), f"{n_kept:,} of {n_present:,} neurons"


def _mask_cells(row: SiteKeep) -> tuple[tuple[Cell, ...], str, str]:
    """Cells, kind and note of a row."""
    kept = frozenset(row.kept)
    if row.neurons:
        note = f"{len(kept):,} of {row.n_heads:,} neurons"
        filled = bar_parts(len(kept), row.n_heads)
        bar = (Cell(None, None, part < filled, f"{row.site}: {note}") for part in range(LEVELS))
        return tuple(bar), "", note
    cells = []
    for head in range(row.n_heads):
        is_kept = head in kept
        text = "kept" if is_kept else "removed"
        cells.append(Cell(head, None, is_kept, f"{row.site}[{head}]: {text}"))
    return tuple(cells), "", ""
