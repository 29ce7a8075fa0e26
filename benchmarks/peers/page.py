"""docs/peers.md: the tables of every record, each number computed from it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import studies
from roster import OWN, PEERS, REFERENCE, TITLES

from headprune.core.files import write_atomic

PAGE = "peers.md"
#: How peers are called that start from our cut model.
TOGETHER = f"{REFERENCE} + "


def write(records: Path, docs: Path) -> Path:
    """Writes the page."""
    return write_atomic(docs / PAGE, text(studies.records_in(records, "peers")).encode())


def text(records: list[dict[str, Any]]) -> str:
    """Markdown."""
    named = {row["peer"] for record in records for row in record["rows"]}
    lines = [
        "# What else one could use",
        "",
        "Written by `python benchmarks/peers/run.py --figure` from the records in `benchmarks/records`; do not edit.",
        "",
        "The same weights, rows and judging code for all; each peer in its own pinned environment",
        "(`benchmarks/peers/requirements`). Speed is base model / smaller model in rounds of both in one process,",
        "median and 95 % interval over the rounds; the base model is PyTorch's in that environment, for ONNX Runtime",
        "too. Accuracy is of test rows, mean ± standard deviation over draws of calibration rows; *against headprune*",
        "is the paired difference in points with as many heads, with its 95 % interval. *Loads back*: a fresh process",
        "that loads what was saved, alone, says the same. Memory is what that process (*to run*), and the one that",
        "scores and cuts, took at most beyond what they had before the model.",
        "",
        *(f"- **{name}**: {peer.about}." for name, peer in PEERS.items() if name in named),
    ]
    for record in records:
        lines += section(record)
    return "\n".join(lines) + "\n"


def section(record: dict[str, Any]) -> list[str]:
    base = next((row for row in record["rows"] if row["peer"] == "unpruned" and "error" not in row), None)
    where = record["hardware"]
    used = record["rows_used"]
    lines = [
        "",
        f"## {TITLES[record['task']]}, {record['device_used']}",
        "",
        f"{where.get('gpu', where['processor'])}, {record['threads']} threads. {record['heads']} heads; "
        f"{used['calibration']} calibration rows, {used['validation']} validation and {used['test']} test rows"
        + (f"; test accuracy of the base model {base['test']:.3f}." if base else "."),
    ]
    for kept in sorted({row["kept"] for row in record["rows"]}, key=lambda kept: -(kept or 10**9)):
        rows = [row for row in record["rows"] if row["kept"] == kept]
        lines += ["", "### The whole model" if kept is None else f"### {kept} of {record['heads']} heads kept", ""]
        lines += table(record, kept, rows)
    return [*lines, *verdict(record), *others(record)]


def table(record: dict[str, Any], kept: int | None, rows: list[dict[str, Any]]) -> list[str]:
    """A row a peer; what failed for every draw has its error beneath."""
    shapes = [f"{batch} x {length}" if length else f"{batch}" for batch, length in record["shapes"]]
    against = "unpruned" if kept is None else REFERENCE
    head = ["peer", "accuracy", f"against {against}", *(f"speed, {shape}" for shape in shapes)]
    head += ["MB", "loads back", "s to score", "s in all", "MiB to cut", "MiB to run"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    failed: dict[str, str] = {}
    for name in dict.fromkeys(row["peer"] for row in rows):
        draws = [row for row in rows if row["peer"] == name]
        good = [row for row in draws if "error" not in row]
        errors = [row["error"] for row in draws if "error" in row]
        failed |= {name: errors[0]} if errors else {}
        if good:
            cells = [name, studies.spread([row["test"] for row in good]), _apart(record, name, kept)]
            cells += [_speed(row) for row in good[0]["speed"]] + _rest(good)
            lines.append("| " + " | ".join(cells) + " |")
        else:
            lines.append(f"| {name} | does not work |" + " - |" * (len(head) - 2))
    reasons = [f"- **{name}** failed: {error}" for name, error in failed.items()]
    return [*lines, *([""] if reasons else []), *reasons]


def _apart(record: dict[str, Any], name: str, kept: int | None) -> str:
    found = next((c for c in record.get("compared", []) if (c["peer"], c["kept"]) == (name, kept)), None)
    if found is None:
        return "-"
    points = {k: 100 * v for k, v in found["test"].items()}
    return f"{points['difference']:+.1f} [{points['low']:+.1f}, {points['high']:+.1f}]"


def _speed(cell: dict[str, Any]) -> str:
    return f"{cell['ratio']:.2f}x [{cell['low']:.2f}, {cell['high']:.2f}]"


def _rest(rows: list[dict[str, Any]]) -> list[str]:
    def mean(values: list[Any]) -> str:
        known = [v for v in values if v is not None]
        return f"{statistics.fmean(known):.1f}" if known else "-"

    return [
        mean([row["bytes"] and row["bytes"] / 1e6 for row in rows]),
        "yes" if all(row["loads_back"]["ok"] for row in rows) else "**no**",
        mean([row["seconds"].get("score") for row in rows]),
        mean([sum(row["seconds"].values()) for row in rows]),
        mean([row["memory_mib"]["cut"] for row in rows]),
        mean([row["memory_mib"]["run"] for row in rows]),
    ]


def verdict(record: dict[str, Any]) -> list[str]:
    """What beats headprune, and what headprune adds to what keeps all heads."""
    rows = {(row["peer"], row["kept"]): row for row in reversed(record["rows"]) if "error" not in row}  # first draws
    better, faster, added = [], [], []
    for line in record.get("compared", []):
        mine, theirs = rows.get((REFERENCE, line["kept"])), rows[line["peer"], line["kept"]]
        if mine and line["reference"] == REFERENCE and line["test"]["low"] > 0 and not _slower(theirs, mine):
            training = " after training" if PEERS[line["peer"]].trains else ""
            better.append(f"**{line['peer']}** with {line['kept']} heads{training}")
    ours = [row for (name, _), row in rows.items() if name == REFERENCE]
    for (name, kept), row in rows.items():
        if ours and kept is None and all(_slower(o, row) and o["test"] <= row["test"] for o in ours):
            faster.append(f"**{name}**")
        if name.startswith(TOGETHER) and (alone := rows.get((name.removeprefix(TOGETHER), None))):
            gain = row["speed"][-1]["ratio"] / alone["speed"][-1]["ratio"]
            points = 100 * (row["test"] - alone["test"])
            added.append(f"{alone['peer']} {gain:.2f} times as fast at {points:+.1f} points with {kept} heads")
    return [
        "",
        f"- More accurate than {REFERENCE} beyond the interval with as many heads, and not slower: {_list(better)}.",
        f"- With all heads, faster than {REFERENCE} for every shape and no less accurate: {_list(faster)}.",
        f"- What {REFERENCE} adds, for the last shape: {_list(added)}.",
    ]


def _slower(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """For every shape, beyond the intervals."""
    return all(r["high"] < o["low"] for r, o in zip(row["speed"], other["speed"], strict=True))


def _list(words: list[str]) -> str:
    return "; ".join(words) or "none"


def others(record: dict[str, Any]) -> list[str]:
    """How models are saved, why some do not come back, and notes of the peers."""
    lines: dict[str, None] = {}
    for row in record["rows"]:
        back = row.get("loads_back", {})
        if back and PEERS[row["peer"]].environment != OWN:
            lines[f"- **{row['peer']}** is saved and loaded with: {back.get('by', 'nothing')}."] = None
        if back and not back["ok"]:
            why = back.get("error") or f"says something else, by {back['difference']:.2g}"
            lines[f"- **{row['peer']}** does not load back: {why}"] = None
        for note in row.get("notes", ()):
            lines[f"- **{row['peer']}**, {row['kept'] or 'all'} heads: {note}."] = None
    return ["", *lines] if lines else []
