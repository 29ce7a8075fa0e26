"""Speed as a table, and as a grid of batch by length with the line of break-even."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headprune.core.record import SpeedRow
from headprune.report.formats import fixed, milliseconds, times


@dataclass(frozen=True)
class SpeedLine:
    """One formatted row of the speed table."""

    batch: str
    length: str
    original: tuple[str, str]  # median and 90th percentile, ms
    pruned: tuple[str, str]  # median and 90th percentile, ms
    ratio: str  # original over pruned: above 1 is faster
    interval: str  # 95 %
    verdict: str  # such as `1.12× as fast`
    tone: str  # good, bad or plain
    rounds: str  # of timing both models in turn


@dataclass(frozen=True)
class SpeedCell:
    """One cell of the grid.

    Args:
        ratio: The formatted ratio; empty where nothing was measured.
        tone: good, bad or plain, as in the table.
        title: Place, verdict and interval as one text.
        edges: Sides (``right``, ``bottom``) on which a neighbour is faster and this one not, or the
            other way round.
    """

    ratio: str
    tone: str
    title: str
    edges: tuple[str, ...]


@dataclass(frozen=True)
class SpeedGrid:
    """Batch sizes down, lengths across."""

    batches: tuple[str, ...]
    lengths: tuple[str, ...]
    cells: tuple[tuple[SpeedCell, ...], ...]  # [batches, lengths]
    words: str  # where break-even is


def verdict(row: SpeedRow) -> tuple[str, str]:
    """Put a ratio into words, with its tone; an interval that holds 1 shows no difference."""
    if not all(map(math.isfinite, (row.ratio, row.low, row.high))) or row.ratio <= 0:
        return "no usable timing", "plain"
    if row.low > 1:
        return f"{times(row.ratio)} as fast", "good"
    if row.high < 1:
        return f"slower ({times(row.ratio)} as fast)", "bad"
    return "no measurable difference in speed", "plain"


def speed_line(row: SpeedRow) -> SpeedLine:
    """Format a row of the table."""
    words, tone = verdict(row)
    return SpeedLine(
        batch=f"{row.batch:,}",
        length=f"{row.length:,}",
        original=(milliseconds(row.original_p50), milliseconds(row.original_p90)),
        pruned=(milliseconds(row.pruned_p50), milliseconds(row.pruned_p90)),
        ratio=times(row.ratio),
        interval=f"{fixed(row.low, 3)} to {fixed(row.high, 3)}",
        verdict=words,
        tone=tone,
        rounds=f"{row.rounds:,}",
    )


def speed_grid(rows: Sequence[SpeedRow]) -> SpeedGrid | None:
    """Lay out speed by batch and length; None with fewer than two cells."""
    lines = {(row.batch, row.length): speed_line(row) for row in rows}
    if len(lines) < 2:
        return None
    batches = sorted({batch for batch, _ in lines})
    lengths = sorted({length for _, length in lines})
    cells = []
    for y, batch in enumerate(batches):
        row = []
        for x, length in enumerate(lengths):
            # The last row and column have no neighbour on that side.
            neighbours = {}
            if x + 1 < len(lengths):
                neighbours["right"] = (batch, lengths[x + 1])
            if y + 1 < len(batches):
                neighbours["bottom"] = (batches[y + 1], length)
            row.append(_cell(lines, (batch, length), neighbours))
        cells.append(tuple(row))
    return SpeedGrid(
        batches=tuple(f"{batch:,}" for batch in batches),
        lengths=tuple(f"{length:,}" for length in lengths),
        cells=tuple(cells),
        words=_break_even([line.tone for line in lines.values()]),
    )


def _cell(
    lines: Mapping[tuple[int, int], SpeedLine],
    place: tuple[int, int],
    neighbours: Mapping[str, tuple[int, int]],
) -> SpeedCell:
    line = lines.get(place)
    if line is None:
        batch, length = place
        return SpeedCell("", "plain", f"batch {batch} × {length} tokens: not measured", ())
    edges = []
    for side, neighbour in neighbours.items():
        other = lines.get(neighbour)
        # Break-even lies between a faster cell and one that is not.
        if other is not None and (line.tone == "good") != (other.tone == "good"):
            edges.append(side)
    title = (
        f"batch {line.batch} × {line.length} tokens: {line.verdict}, 95 % interval {line.interval}"
    )
    return SpeedCell(line.ratio, line.tone, title, tuple(edges))


def _break_even(tones: Sequence[str]) -> str:
    """Say where break-even is."""
    faster = tones.count("good")
    if faster == len(tones):
        return (
            "The pruned model is faster everywhere that was measured; break-even lies outside of"
            " the grid."
        )
    if not faster:
        return (
            "The pruned model is measurably faster nowhere in the grid; break-even lies outside of"
            " it."
        )
    return (
        f"The pruned model is measurably faster in {faster} of {len(tones)} places; the thick line"
        " is break-even, between these and the others."
    )
