"""From rows of numbers, one per example, to an estimate: their mean, its standard error and
notes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headprune.core.samples import Curvature
from headprune.scoring._base import Estimate
from headprune.scoring._rows import SummarizedRows

#: Rows that differ by less, relative to the largest number in them, differ by rounding.
_SAME = 1e-6


def averaged(
    rows: Tensor | SummarizedRows,
    n_examples: int | None = None,
    seed: int | None = None,
    row: str = "example",
) -> Estimate:
    """The mean of the rows ``[rows, units]`` with its standard error.

    There are notes where the error is missing or says nothing.

    Args:
        rows: The rows, or their summary.
        n_examples: Default: one per row.
        seed: Of what was drawn.
        row: What a row is.
    """
    if isinstance(rows, SummarizedRows):
        samples, count = rows.samples, rows.count
        values, errors = rows.mean_and_error
    else:
        samples, count = rows, len(rows)
        values, errors = mean_and_error(rows)
    # Say where the standard error is missing or misleading.
    notes = []
    if errors is None:
        notes.append(f"No standard error: the scores rest on a single {row}.")
    # Numbers that differ by rounding only are equal.
    elif bool((samples - samples[0]).abs().max() <= _SAME * samples.abs().max()):
        notes.append(
            f"Every {row} gave the same numbers, so a standard error of 0 says nothing about other"
            " data."
        )
    if not bool(values.any()):
        notes.append("Every score is 0, so the scores do not rank the heads.")
    return Estimate(values, errors, n_examples or count, seed, samples, tuple(notes))


def with_curvature(estimate: Estimate, n_units: int, make: Callable[[], Tensor]) -> Estimate:
    """The estimate with its curvature, or with a note where that is too large to keep."""
    note = Curvature.too_large(n_units)
    if note:
        return replace(estimate, notes=(*estimate.notes, note))
    return replace(estimate, curvature=make())


def mean_and_error(samples: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean over the first axis and its standard error, None for a single sample."""
    if len(samples) < 2:
        return samples.mean(0), None
    return samples.mean(0), samples.std(0) / len(samples) ** 0.5


def in_blocks(samples: Tensor, size: int) -> Tensor:
    """Means of blocks of rows in their order, ``[blocks, units]``; the last block may be
    smaller."""
    if size == 1:
        return samples
    return torch.stack([block.mean(0) for block in samples.split(size)])
