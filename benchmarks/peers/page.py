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
LOST, TRADE = "**lost**", "a trade"
#: A base model that takes so many times the fastest one's time, in the same environment, was timed beside other work.
SLOWER = 1.3


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
        "median and 95 % interval over the rounds, of the first draw, with both medians in ms; the base model is",
        "PyTorch's in that environment, for ONNX Runtime too. Accuracy is of test rows, mean ± standard deviation over",
        "draws of calibration rows; *against headprune* is the paired difference in points with as many heads, mean",
        "over draws with its 95 % interval over rows, on test and on validation rows. *Loads back*: a process of its",
        "own that loads what was saved says the same. Memory is what that one (*to run*), and the one that scores and",
        "cuts, took at most beyond what they had before the model. *Unpruned* is timed as two copies of one model.",
        "",
        *(f"- **{name}**: {peer.about}." for name, peer in PEERS.items() if name in named),
    ]
    lines += studies.no_gpu(record["hardware"] for record in records)
    for record in records:
        lines += section(in_order(record))
    return "\n".join(lines) + "\n"


def in_order(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its peers as the roster has them, whatever was measured first."""
    place = {name: number for number, name in enumerate(PEERS)}

    def rank(row: dict[str, Any]) -> tuple[int, int]:
        return place[row["peer"]], -(row["kept"] or 0)

    return {**record, **{k: sorted(record.get(k, []), key=rank) for k in ("rows", "compared")}}


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
    head = ["peer", "draws", "accuracy", f"against {against}", "on validation rows"]
    head += [f"speed, {shape}, ms" for shape in shapes]
    head += ["MB", "loads back", "s to score", "s in all", "MiB to cut", "MiB to run"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    failed: dict[str, str] = {}
    for name in dict.fromkeys(row["peer"] for row in rows):
        draws = [row for row in rows if row["peer"] == name]
        good = [row for row in draws if "error" not in row]
        errors = [row["error"] for row in draws if "error" in row]
        failed |= {name: errors[0]} if errors else {}
        if good:
            cells = [name, str(len(good)), studies.spread([row["test"] for row in good])]
            cells += [_apart(record, name, kept, split) for split in ("test", "validation")]
            timed = [row for row in good if "speed" in row]
            cells += [*(map(_speed, timed[0]["speed"]) if timed else ["-"] * len(shapes)), *_rest(good, timed)]
            lines.append("| " + " | ".join(cells) + " |")
        else:
            what = "CPU only" if all("runs on the CPU only" in error for error in errors) else "does not work"
            lines.append(f"| {name} | {what} |" + " - |" * (len(head) - 2))
    reasons = [f"- **{name}** failed: {error}" for name, error in failed.items()]
    even = [name for name, peer in PEERS.items() if peer.even and any(row["peer"] == name for row in record["rows"])]
    if even and kept is not None and not any(row["peer"] in even for row in rows):
        reasons.append(f"- No row here have those that keep as many heads in every layer: {', '.join(even)}.")
    return [*lines, *([""] if reasons else []), *reasons]


def _apart(record: dict[str, Any], name: str, kept: int | None, split: str) -> str:
    against = "unpruned" if kept is None else REFERENCE
    for line in record.get("compared", []):
        if (line["peer"], line["kept"], line["reference"]) == (name, kept, against):
            return _points(line, split)
    return "-"


def _points(line: dict[str, Any], split: str = "test") -> str:
    points = {k: 100 * v for k, v in line[split].items()}
    return f"{points['difference']:+.1f} [{points['low']:+.1f}, {points['high']:+.1f}]"


def _speed(cell: dict[str, Any]) -> str:
    times = f"{cell['base_ms']:.3g} to {cell['ms']:.3g}"
    return f"{cell['ratio']:.2f}x [{cell['low']:.2f}, {cell['high']:.2f}], {times}"


def _rest(rows: list[dict[str, Any]], timed: list[dict[str, Any]]) -> list[str]:
    """Of all draws; seconds of those alone that ran on an idle machine."""

    def mean(values: list[Any]) -> str:
        known = [v for v in values if v is not None]
        return f"{statistics.fmean(known):.1f}" if known else "-"

    return [
        mean([row["bytes"] and row["bytes"] / 1e6 for row in rows]),
        "yes" if all(row["loads_back"]["ok"] for row in rows) else "**no**",
        mean([row["seconds"].get("score") for row in timed]),
        mean([sum(row["seconds"].values()) for row in timed]),
        mean([row["memory_mib"]["cut"] for row in rows]),
        mean([row["memory_mib"]["run"] for row in rows]),
    ]


def verdict(record: dict[str, Any]) -> list[str]:
    """Every peer against ours, by paired accuracy and by speed together."""
    rows = {(row["peer"], row["kept"]): row for row in record["rows"] if "speed" in row}
    noise = repeated(rows)
    body, unbeaten = [], dict[str, dict[str, None]]()
    for line in record.get("compared", []):
        theirs = rows.get((line["peer"], line["kept"]))
        ours = rows.get((line["reference"], line["reference_kept"]))
        alone = not _ours(line["peer"]) and not line["peer"].startswith(TOGETHER)
        if theirs and ours and _ours(line["reference"]) and alone:
            kept = [str(n) if n is not None else "all" for n in (line["kept"], line["reference_kept"])]
            speed = _faster(theirs, ours, noise)
            outcome = _outcome(line["test"], speed)
            body.append([line["peer"], kept[0], line["reference"], kept[1], _points(line), speed or "-", outcome])
            if outcome in (LOST, TRADE):
                unbeaten.setdefault(line["peer"], {})[_best(rows, line["reference_kept"])] = None
    head = ["peer", "heads", "held to", "heads", "points", "the faster", "outcome for headprune"]
    added = []
    for (name, kept), row in rows.items():
        if name.startswith(TOGETHER) and (alone := rows.get((name.removeprefix(TOGETHER), None))):
            both, one = row["speed"][-1], alone["speed"][-1]
            gain = (
                f"{both['ratio'] / one['ratio']:.2f} [{both['low'] / one['high']:.2f}, {both['high'] / one['low']:.2f}]"
            )
            points = 100 * (row["test"] - alone["test"])
            added.append(f"{alone['peer']} {gain} times as fast at {points:+.1f} points with {kept} heads")
    lines = [
        "",
        "### Accuracy and speed together",
        "",
        "*The faster* is so for every shape, beyond the intervals and by more than models of one shape differ from",
        f"row to row: up to {100 * noise:.1f} % here, by *unpruned*, and ours with and without a refit. *Lost*: theirs",
        "is surely more accurate and not slower, or faster and not surely less accurate. *Won* is the other way round.",
        "*A trade*: one is surely more accurate, the other faster. *Tied*: of one speed, and so close in accuracy that",
        "the test rows cannot tell.",
        "",
        "| " + " | ".join(head) + " |",
        "| --- | ---: | --- | ---: | ---: | --- | --- |",
        *("| " + " | ".join(cells) + " |" for cells in body),
    ]
    words = f"What {REFERENCE} adds to others, for the last shape and the first draw: {'; '.join(added) or 'nothing'}."
    answers = [
        f"- Why **{name}** is not beaten: {PEERS[name].answer or 'it is not known why'}. Of ours the most accurate:"
        f" {'; '.join(best)}."
        for name, best in unbeaten.items()
    ]
    return [*lines, "", *answers, *([""] if answers else []), words]


def repeated(rows: dict[tuple[str, int | None], dict[str, Any]]) -> float:
    """The largest share by which the speed of models of one shape differs from row to row."""
    found = [abs(cell["ratio"] - 1) for cell in rows.get(("unpruned", None), {}).get("speed", ())]
    for (name, kept), row in rows.items():
        if name == REFERENCE and (other := rows.get((f"{REFERENCE}, not refitted", kept))):
            pairs = zip(row["speed"], other["speed"], strict=True)
            found += [abs(a["ratio"] / b["ratio"] - 1) for a, b in pairs]
    return max(found, default=0.0)


def _best(rows: dict[tuple[str, int | None], dict[str, Any]], kept: int | None) -> str:
    """Our most accurate model with so many heads."""
    own = [row for (name, k), row in rows.items() if k == kept and _ours(name)]
    best = max(own, key=lambda row: float(row["test"]))
    speeds = " and ".join(f"{cell['ratio']:.2f}x" for cell in best["speed"])
    return f"{kept} heads, *{best['peer']}*, {best['test']:.3f} at {speeds}"


def _ours(name: str) -> bool:
    """Whether a row is a model of ours, by itself."""
    return name == REFERENCE or name.startswith(f"{REFERENCE}, ")


def _faster(theirs: dict[str, Any], ours: dict[str, Any], noise: float) -> str:
    if _slower(ours, theirs, noise):
        return "theirs"
    return "ours" if _slower(theirs, ours, noise) else ""


def _outcome(points: dict[str, float], faster: str) -> str:
    """What a paired difference (theirs less ours) and the faster one come to, for us."""
    better = "theirs" if points["low"] > 0 else "ours" if points["high"] < 0 else ""
    if {better, faster} == {"theirs", "ours"}:
        return TRADE
    told = better or faster
    return {"theirs": LOST, "ours": "won", "": "tied"}[told]


def _slower(row: dict[str, Any], other: dict[str, Any], noise: float) -> bool:
    """For every shape, beyond the intervals and the noise between rows."""
    pairs = list(zip(row["speed"], other["speed"], strict=True))
    return all(r["high"] < o["low"] and r["ratio"] * (1 + noise) < o["ratio"] for r, o in pairs)


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
        for note in (*row.get("notes", ()), *_disturbed(record, row)):
            lines[f"- **{row['peer']}**, {row['kept'] or 'all'} heads: {note}."] = None
    return ["", *lines] if lines else []


def _disturbed(record: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Where the machine was busy: ratios of interleaved rounds hold, their intervals are wide."""
    found = []
    for place, cell in enumerate(row.get("speed", ())):
        same = [r for r in record["rows"] if r["environment"] == row["environment"] and "speed" in r]
        fastest = min(r["speed"][place]["base_ms"] for r in same)
        if cell["base_ms"] > SLOWER * fastest:
            batch, length = record["shapes"][place]
            shape = f"{batch} x {length}" if length else f"{batch}"
            found.append(f"at {shape} the base model took {cell['base_ms'] / fastest:.1f} times what it took at best")
    return found
