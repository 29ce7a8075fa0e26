"""Which tensors of a batch have a row for every example; batches of some examples, or of all of
them several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: Where a tensor lies in a batch.
Path: TypeAlias = tuple[Any, ...]


def tensors_at(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor of a batch with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_at(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for key, item in enumerate(value):
            yield from tensors_at(item, (*path, key))


def form(batch: Any) -> tuple[tuple[Path, int, torch.dtype], ...]:
    """What batches of one kind have in common: the same tensors with as many axes."""
    return tuple((path, t.ndim, t.dtype) for path, t in tensors_at(batch))


def with_rows(batch: Any, size: int) -> frozenset[Path]:
    """Paths of the tensors whose first axis is as long as the batch; one may be so by chance."""
    return frozenset(path for path, t in tensors_at(batch) if t.ndim and t.shape[0] == size)


def over_rows(
    value: Any, rows: frozenset[Path], function: Callable[[Tensor], Tensor], path: Path = ()
) -> Any:
    """The batch with ``function`` of every tensor at ``rows``."""
    if isinstance(value, Tensor):
        return function(value) if path in rows else value
    if isinstance(value, Mapping):
        return {k: over_rows(v, rows, function, (*path, k)) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(over_rows(item, rows, function, (*path, k)) for k, item in enumerate(value))
    return value


def repeated_along(tensor: Tensor, copies: int, axis: int) -> Tensor:
    """All examples once, then all again, ...: ``copies`` times along an axis whose major order is
    examples."""
    return tensor if copies == 1 else torch.cat([tensor] * copies, axis)


def largest_row(batch: Any, rows: frozenset[Path]) -> int:
    """Numbers that an example has in the largest tensor with rows."""
    return max((t[0].numel() for path, t in tensors_at(batch) if path in rows), default=1)
