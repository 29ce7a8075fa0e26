"""What the pages about timed records are made of."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from headprune.core.files import write_atomic

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


#: Rows and columns of a table that a page shows; a larger one is folded.
SHOWN, SHOWN_COLUMNS = 8, 10
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
_RESULTS = re.compile(r"^(?:#{2,} |!\[|\|)", re.MULTILINE)


def publish(path: Path, lead: str, text: str) -> Path:
    """Write a page of results, which begins with what was found and for whom."""
    return write_atomic(path, shaped(lead, text).encode())


def shaped(lead: str, text: str) -> str:
    """The page with ``lead`` after its title; how it was measured, and long tables, are folded.

    What stands before the first heading, picture or table says how it was measured.
    """
    title, _, rest = text.partition("\n\n")
    first = _RESULTS.search(rest)
    end = first.start() if first else len(rest)
    method = folded("How it was measured", rest[:end].strip())
    results = _TABLE.sub(lambda found: _short(found[0]), rest[end:])
    return (
        f"{title}\n\n{fill(lead, 100, break_long_words=False, break_on_hyphens=False)}\n\n{method}\n{results}".rstrip()
        + "\n"
    )


def _short(rows: str) -> str:
    count = rows.count("\n") - 2  # without head and rule
    columns = rows.partition("\n")[0].count(" | ") + 1
    if count <= SHOWN and columns <= SHOWN_COLUMNS:
        return rows
    size = f"{count} row{'' if count == 1 else 's'} and {columns} columns"
    return folded(f"Table of {size}", rows.rstrip())


def folded(summary: str, text: str) -> str:
    """Markdown that a reader unfolds, on a code host and on the site."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>\n'
