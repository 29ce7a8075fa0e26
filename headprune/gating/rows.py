"""Tensors of a batch that have a row for every example; parts and copies of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: The keys and indices that lead to a tensor of a batch.
Path: TypeAlias = tuple[Any, ...]


def tensors_at(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor of a batch with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_at(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for key, item in enumerate(value):
            yield from tensors_at(item, (*path, key))


def form(batch: Any) -> tuple[tuple[Path, int, torch.dtype], ...]:
    """Return a batch's paths, numbers of axes and dtypes: equal for batches of one form."""
    return tuple((path, t.ndim, t.dtype) for path, t in tensors_at(batch))


def with_rows(batch: Any, size: int) -> frozenset[Path]:
    """Return the paths of the tensors whose first axis is as long as the batch."""
    # A tensor can be so long by chance; candidates compares several batches.
    rows = set()
    for path, tensor in tensors_at(batch):
        if tensor.ndim and tensor.shape[0] == size:
            rows.add(path)
    return frozenset(rows)


def over_rows(
    value: Any, rows: frozenset[Path], function: Callable[[Tensor], Tensor], path: Path = ()
) -> Any:
    """Apply ``function`` to every tensor at ``rows`` and return the new batch."""
    if isinstance(value, Tensor):
        return function(value) if path in rows else value
    if isinstance(value, Mapping):
        return {k: over_rows(v, rows, function, (*path, k)) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(over_rows(item, rows, function, (*path, k)) for k, item in enumerate(value))
    return value


def repeated_along(tensor: Tensor, copies: int, axis: int) -> Tensor:
    """Repeat a tensor along its example axis: all examples once, then all again, and so on."""
    if copies == 1:
        return tensor
    return torch.cat([tensor] * copies, axis)


def largest_row(batch: Any, rows: frozenset[Path]) -> int:
    """Return how many numbers one example has in the largest tensor with rows."""
    return max((t[0].numel() for path, t in tensors_at(batch) if path in rows), default=1)
