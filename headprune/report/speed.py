"""Speed in words and as a grid: a ratio and its interval a row, and batch by length with the line
of break-even."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headprune.core.record import SpeedRow
from headprune.report.formats import fixed, milliseconds, times


@dataclass(frozen=True)
class SpeedLine:
    """One formatted row of the speed table."""

    batch: str
    length: str
    original: tuple[str, str]
    pruned: tuple[str, str]
    ratio: str
    interval: str
    verdict: str
    tone: str
    rounds: str


@dataclass(frozen=True)
class SpeedCell:
    """One place of the grid.

    Args:
        ratio: In words; empty where nothing was measured.
        tone: good, bad or plain, as in the table.
        title: Everything in words.
        edges: Sides (``right``, ``bottom``) beyond which the verdict changes between faster and not
            faster.
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
    cells: tuple[tuple[SpeedCell, ...], ...]
    words: str


def verdict(row: SpeedRow) -> tuple[str, str]:
    """What a ratio says, and its tone; an interval that holds 1 says nothing."""
    if not all(map(math.isfinite, (row.ratio, row.low, row.high))) or row.ratio <= 0:
        return "no usable timing", "plain"
    if row.low > 1:
        return f"{times(row.ratio)} faster", "good"
    if row.high < 1:
        return f"{times(1 / row.ratio)} slower", "bad"
    return "no measurable difference in speed", "plain"


def speed_line(row: SpeedRow) -> SpeedLine:
    """A row of the table."""
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
    """The grid, where there are two or more places; None otherwise."""
    found = {(row.batch, row.length): row for row in rows}
    if len(found) < 2:
        return None
    batches, lengths = (sorted({at[i] for at in found}) for i in (0, 1))
    tones = {at: verdict(row)[1] for at, row in found.items()}

    def cell(y: int, x: int) -> SpeedCell:
        at = (batches[y], lengths[x])
        if at not in found:
            return SpeedCell("", "plain", f"batch {at[0]} × {at[1]} tokens: not measured", ())
        line = speed_line(found[at])
        beyond = {"right": (batches[y], lengths[x + 1]) if x + 1 < len(lengths) else None}
        beyond["bottom"] = (batches[y + 1], lengths[x]) if y + 1 < len(batches) else None
        edges = [
            side
            for side, to in beyond.items()
            if to in tones and _faster(tones[at]) != _faster(tones[to])
        ]
        title = (
            f"batch {line.batch} × {line.length} tokens: {line.verdict}, 95 % interval"
            f" {line.interval}"
        )
        return SpeedCell(line.ratio, line.tone, title, tuple(edges))

    cells = tuple(tuple(cell(y, x) for x in range(len(lengths))) for y in range(len(batches)))
    return SpeedGrid(
        tuple(f"{b:,}" for b in batches), tuple(f"{n:,}" for n in lengths), cells, _words(tones)
    )


def _faster(tone: str) -> bool:
    return tone == "good"


def _words(tones: dict[tuple[int, int], str]) -> str:
    """Where break-even is, in words."""
    faster = sum(map(_faster, tones.values()))
    if faster == len(tones):
        return (
            "The pruned model is faster everywhere that was measured; break-even lies outside of"
            " the grid."
        )
    if not faster:
        return (
            "The pruned model is surely faster nowhere that was measured; break-even lies outside"
            " of the grid."
        )
    return (
        f"The pruned model is surely faster in {faster} of {len(tones)} places; the thick line is"
        " break-even, between these and the others."
    )
