"""Tables of docs/tradeoff.md that say how fast, and from which batch on a cut model is faster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from pages import Row, distinct, plain, ratio, table

#: What tells one table from another.
WAY = ("dtype", "attention", "compiled")
#: The study's grid, which ``tradeoff.py`` measures by default; heads kept are of the encoder's 72.
GRID: dict[str, list[Any]] = {
    "attention": ["sdpa", "eager"],
    "compiled": [False, True],
    "length": [32, 128, 512],
    "batch": [1, 8, 32, 128],
    "kept": [54, 36, 24, 14],
}
DTYPES = {"cpu": ["float32"], "cuda": ["float32", "bfloat16"]}
#: Of a cell's 90th percentile over its median: beyond it, something else ran.
DISTURBED = 2


def lacking(rows: list[Row], failed: list[Row]) -> list[str]:
    """Places of the study's grid that one of its tables has no row of; what failed is listed
    elsewhere."""
    tried = distinct([*rows, *failed], "length", "batch")
    lengths: dict[tuple[int, ...], list[int]] = {}
    for length in GRID["length"]:
        lengths.setdefault(
            tuple(batch for batch in GRID["batch"] if (length, batch) not in tried), []
        ).append(length)
    said = []
    for missing, found in lengths.items():
        batches = f"batch {_listed(missing)}" if len(missing) < len(GRID["batch"]) else "any batch"
        said += [f"{_listed(found)} tokens at {batches}"] * bool(missing)
    budgets = [kept for kept in GRID["kept"] if kept not in distinct([*rows, *failed], "kept")]
    said += [f"{_listed(budgets)} heads kept"] * bool(budgets)
    return ["", f"Not measured: {'; '.join(said)}."] if said else []


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def way_words(dtype: str, attention: str, compiled: bool) -> str:
    return f"{dtype}, {attention} attention, {'torch.compile' if compiled else 'eager mode'}"


def times(rows: list[Row], budgets: list[int]) -> list[str]:
    head = ["tokens", "batch", "whole, ms p50 (p90)", "examples/s"]
    head += [word for kept in budgets for word in (f"{kept} kept: ms p50 (p90)", "speed", "limit")]
    memory = any("peak_bytes" in row for row in rows)
    head += ["MiB with weights, whole to smallest"] * memory
    body, apart = [], False
    for length, batch in sorted(distinct(rows, "length", "batch")):
        found = {
            row["kept"]: row for row in rows if (row["length"], row["batch"]) == (length, batch)
        }
        first, last = found[max(found)], found[min(found)]
        cells = [str(length), str(batch), _ms(first, "original"), f"{first['throughput'][0]:,.1f}"]
        for kept in budgets:
            if (row := found.get(kept)) is None:
                cells += [""] * 3
                continue
            ms = _ms(row, "pruned")
            if row["original_p50"] != first["original_p50"]:
                ms, apart = f"{ms} of {plain(1000 * row['original_p50'])}", True
            cells += [ms, timed(row), f"{row['limit']:.2f}"]
        if memory:
            peaks = zip(last.get("peak_bytes", ()), last["weight_bytes"], strict=False)
            cells.append(" to ".join(f"{sum(pair) / 2**20:.0f}" for pair in peaks))
        body.append(cells)
    said = (
        ["", "*of*: timed in another session, in which the whole model took so many ms."]
        if apart
        else []
    )
    return [*table(head, body, left=0), *said]


def _ms(row: Row, which: str) -> str:
    p50, p90 = (plain(1000 * row[f"{which}_{share}"]) for share in ("p50", "p90"))
    return f"{p50} ({p90})"


def disturbed(row: Row) -> bool:
    """Whether something else ran while either model was timed."""
    return any(
        row[f"{which}_p90"] > DISTURBED * row[f"{which}_p50"] for which in ("original", "pruned")
    )


def timed(row: Row) -> str:
    """A speed with its interval, and whether that can be trusted."""
    return ratio(row) + ", disturbed" * disturbed(row)


def break_even(rows: list[Row]) -> list[str]:
    """From which batch on the cut model is faster beyond noise, where it is slower, and where
    neither is shown; disturbed cells do not count."""
    lines = []
    for kept in sorted(distinct(rows, "kept"), reverse=True):
        said = []
        for length in sorted(distinct(rows, "length")):
            cells = sorted(
                (r for r in rows if (r["kept"], r["length"]) == (kept, length)),
                key=lambda r: r["batch"],
            )
            said.append(f"{length} tokens: {_in_words(cells)}")
        what = f"{kept} heads" if isinstance(kept, int) else kept
        lines.append(f"- With {what} kept. {'; '.join(said)}.")
    return lines


def _in_words(cells: list[Row]) -> str:
    """One length, batches in ascending order."""
    kinds = [_kind(row) for row in cells]
    if len(cells) > 1 and set(kinds) == {"faster"}:
        return f"faster at every batch size ({cells[0]['batch']} to {cells[-1]['batch']})"
    words = []
    if len(cells) > 1 and kinds[-1] == "faster":
        start = next(i for i in range(len(cells)) if set(kinds[i:]) == {"faster"})
        words.append(f"faster from batch {cells[start]['batch']} on")
        cells = cells[:start]
    for kind in ("faster", "not faster: slower", "no difference shown", "disturbed"):
        batches = [row["batch"] for row in cells if _kind(row) == kind]
        words += [f"{kind} at batch {_listed(batches)}"] * bool(batches)
    return ", ".join(words)


def _kind(row: Row) -> str:
    if disturbed(row):
        return "disturbed"
    return (
        "faster"
        if row["low"] > 1
        else "not faster: slower"
        if row["high"] < 1
        else "no difference shown"
    )
