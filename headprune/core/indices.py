"""Head indices, and rows of 0 and 1, as plain integers from lists, NumPy arrays and tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from headprune.core.errors import InvalidValue

_HINT = "For 1 or 0 per head take HeadMask.from_array."
_EITHER = f"{_HINT} Give indices as a list, each once."


def indices(values: Iterable[Any], where: str, n_heads: int | None = None) -> tuple[int, ...]:
    """Convert head indices to plain integers, in their order.

    Args:
        values: A list, a set, a NumPy array or a tensor of integers.
        where: What they are, for an error.
        n_heads: How many heads there are, where that is known.

    Raises:
        InvalidValue: no indices. A row with 0 or 1 for every head is refused too: it would be read
            as the indices 0 and 1. An array for one or two heads may be either, and is refused; a
            list is read as indices.

    >>> indices({2}, "keep"), indices((), "keep")
    ((2,), ())
    """
    listed = values.tolist() if hasattr(values, "tolist") else values
    must = "a collection of head indices"
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Iterable):
        raise InvalidValue(where, must, repr(listed))
    heads = []
    for value in listed:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidValue(where, must, repr(value), _HINT)
        heads.append(operator.index(value))
    if n_heads is not None and _may_be_row(heads, n_heads, hasattr(values, "tolist")):
        raise InvalidValue(where, must, f"{heads}, which may be a row of 0 and 1", _EITHER)
    return tuple(heads)


def _may_be_row(numbers: Sequence[int], n_heads: int, is_array: bool) -> bool:
    """Whether numbers may be meant as a row of 0 and 1, one for every head."""
    if not set(numbers) <= {0, 1}:
        return False
    # A row for three heads or more repeats a number. That of fewer may not, and a list such as
    # [0, 1] is more often one of indices.
    is_repeated = len(set(numbers)) < len(numbers)
    return (is_repeated and len(numbers) >= n_heads) or (is_array and len(numbers) == n_heads <= 2)


def kept_in_row(row: Any, n_heads: int, where: str) -> tuple[int, ...]:
    """Find the heads that a row of 0 and 1 keeps.

    Args:
        row: One value per head: 1 or True where it is kept, 0 or False where it is removed.
        n_heads: How many values there must be.
        where: What the row is, for an error.

    Raises:
        InvalidValue: another number of values, or another value.

    >>> kept_in_row([1, 0, 1], 3, "row 0")
    (0, 2)
    """
    values = row.tolist() if hasattr(row, "tolist") else row
    must = f"one value per head, {n_heads}"
    if not isinstance(values, Sequence):
        raise InvalidValue(where, must, repr(values))
    if isinstance(values, (str, bytes)) or len(values) != n_heads:
        raise InvalidValue(where, must, f"{len(values)}")
    for value in values:
        if value not in (0, 1):
            raise InvalidValue(where, "1 (kept) or 0 (removed) per head", repr(value))
    return tuple(head for head, value in enumerate(values) if value)
