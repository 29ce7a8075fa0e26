"""From numbers a row, one row an example, to an estimate: their mean, its standard error, and what
to say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headprune.core.samples import Curvature
from headprune.scoring._base import Estimate
from headprune.scoring._rows import Rows

#: Rows that differ by less, relative to the largest number in them, differ by rounding.
_SAME = 1e-6


def averaged(
    rows: Tensor | Rows,
    n_examples: int | None = None,
    seed: int | None = None,
    row: str = "example",
) -> Estimate:
    """The mean of the rows ``[rows, units]`` with its standard error, and notes where that is
    missing or says nothing.

    Args:
        rows: The rows, or what there was room for.
        n_examples: Default: one a row.
        seed: Of what was drawn.
        row: What a row is, in words.
    """
    if isinstance(rows, Rows):
        samples, count, (values, errors) = rows.samples, rows.count, rows.mean_and_error
    else:
        samples, count, (values, errors) = rows, len(rows), mean_and_error(rows)
    notes = []
    if errors is None:
        notes.append(f"No standard error: the scores rest on a single {row}.")
    elif bool((samples - samples[0]).abs().max() <= _SAME * samples.abs().max()):
        notes.append(
            f"Every {row} gave the same numbers, so that a standard error of 0 promises nothing"
            " about others."
        )
    if not bool(values.any()):
        notes.append("Every score is 0, so that they tell no head from another.")
    return Estimate(values, errors, n_examples or count, seed, samples, tuple(notes))


def with_curvature(estimate: Estimate, n_units: int, make: Callable[[], Tensor]) -> Estimate:
    """The estimate with its curvature; without it, and with a note, where that is too large to
    keep."""
    said = Curvature.too_large(n_units)
    if said:
        return replace(estimate, notes=(*estimate.notes, said))
    return replace(estimate, curvature=make())


def mean_and_error(samples: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean over the first axis and its standard error, None for a single sample."""
    if len(samples) < 2:
        return samples.mean(0), None
    return samples.mean(0), samples.std(0) / len(samples) ** 0.5


def in_blocks(samples: Tensor, size: int) -> Tensor:
    """Means of blocks of rows in their order, ``[blocks, units]``; the last block may be
    smaller."""
    return samples if size == 1 else torch.stack([block.mean(0) for block in samples.split(size)])
