"""What the pages about timed records are made of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Row = dict[str, Any]


def read(records: Path, pattern: str) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted(records.glob(pattern))]


def machine(record: Record) -> str:
    where, versions = ran_on(record["hardware"]), record["versions"]
    return (
        f"{where}; torch {versions['torch']}, transformers {versions['transformers']};"
        f" {record['created'][:10]}."
    )


def ran_on(hardware: Mapping[str, Any]) -> str:
    """The GPU, or the processor with its threads."""
    return hardware.get("gpu") or f"{hardware['processor']}, {threads(hardware)}"


def threads(hardware: Mapping[str, Any]) -> str:
    count: int = hardware["threads"]
    return f"{count} thread{'' if count == 1 else 's'}"


def of(record: Record, what: str, **wanted: Any) -> list[Row]:
    """Rows of a kind that were measured."""
    rows = [row for row in record["rows"] if row["what"] == what and "error" not in row]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def distinct(rows: Iterable[Row], *names: str) -> list[Any]:
    found = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    return [key[0] if len(names) == 1 else key for key in found]


def plain(value: float, digits: int = 3) -> str:
    """A positive number with so many significant digits, or all before the point; never with an
    exponent."""
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


def ratio(row: Row) -> str:
    """A speed with its interval."""
    return interval(row["ratio"], row["low"], row["high"])


def interval(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def table(head: list[str], rows: list[list[str]], left: int = 1) -> list[str]:
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
