"""Read a table as its author means it: rows without text or label, and labels such as "1.0"."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from headprune.core.errors import InvalidValue
from headprune.data.sources import Source


def is_missing(value: Any) -> bool:
    """Whether a cell is empty: nothing, NaN, only blanks, or a list of nothing."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, str):
        return not value.strip()
    return value is None or value == []


def complete_rows(rows: Any, columns: Iterable[str]) -> list[int]:
    """Return the numbers of the rows in which none of the columns is empty."""
    cells = [rows[name] for name in columns]
    return [i for i, row in enumerate(zip(*cells, strict=True)) if not any(map(is_missing, row))]


def without_incomplete(
    source: Source, columns: Iterable[str]
) -> tuple[Source, dict[str, list[int]]]:
    """Drop rows with an empty cell in one of these columns, and warn of them.

    Returns:
        The other rows, and their numbers in the data by split.

    Raises:
        InvalidValue: no row of a split is complete.
    """
    columns = list(columns)
    splits, numbers, warnings = {}, {}, list(source.warnings)
    for role, rows in source.splits.items():
        numbers[role] = complete_rows(rows, columns)
        dropped = len(rows) - len(numbers[role])
        if dropped == len(rows):
            must = f"at least one row with {' and '.join(map(repr, columns))}"
            raise InvalidValue(f"data: {role}", must, f"none in {dropped:,} rows")
        splits[role] = rows
        if dropped:
            splits[role] = rows.select(numbers[role])
            empty = " or ".join(map(repr, columns))
            warnings.append(
                f"{dropped:,} of {len(rows):,} {role} rows were dropped: {empty} is empty there"
            )
    return replace(source, splits=splits, warnings=tuple(warnings)), numbers


def with_plain_labels(source: Source, label: str) -> Source:
    """Remove blanks around class names, and make class numbers of 1.0 and 2.0."""
    splits = {}
    for role, rows in source.splits.items():
        splits[role] = rows
        # Lists of labels have no dtype.
        dtype = getattr(rows.features[label], "dtype", "")
        if dtype not in ("string", "large_string", "float32", "float64"):
            continue
        values = list(rows[label])
        plain = list(map(plain_label, values))
        # Fractions are no class numbers, and stay as they are.
        if plain != values or (dtype[0] == "f" and all(isinstance(v, int) for v in plain)):
            splits[role] = rows.remove_columns(label).add_column(label, plain)
    return replace(source, splits=splits)


def plain_label(value: Any) -> Any:
    """Return a label as it is compared.

    >>> plain_label(" billing "), plain_label(2.0), plain_label(2.5)
    ('billing', 2, 2.5)
    """
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
