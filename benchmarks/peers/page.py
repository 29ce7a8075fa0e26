"""docs/peers.md: the tables of every record, each number computed from it."""

from __future__ import annotations

import re
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

import studies
import verdict
from pages import publish
from roster import METRICS, OWN, PEERS, REFERENCE, REMARKS, TITLES, budget, is_share

PAGE = "peers.md"
OUTCOMES = ("won", "tied", "a trade", "lost")
#: A base model that takes so many times the fastest one's time, in the same environment, was timed
#: beside other work.
SLOWER = 1.3


def write(records: Path, docs: Path) -> Path:
    """Writes the page."""
    found = studies.records_in(records, "peers")
    made = text(found)
    return publish(docs / PAGE, lead(made), made)


def lead(made: str) -> str:
    """What was found, and for whom, from the outcomes of the page."""
    row = re.compile(r"^\| ([^|]+) \| .* \| (won|\*\*lost\*\*|a trade|tied) \|$", re.MULTILINE)
    found: dict[str, list[str]] = {}
    for peer, outcome in row.findall(made):
        found.setdefault(outcome.strip("*"), []).append(peer)
    counts = ", ".join(f"{name} {len(found.get(name, ()))}" for name in OUTCOMES)
    ahead = "; ".join(dict.fromkeys(found.get("lost", ()))) or "none"
    return (
        "For those who choose a tool: other head pruners, a smaller architecture and INT8 beside"
        " headprune, on the same weights, rows and judging code. Outcomes for headprune, by quality"
        f" and speed together: {counts}. At least once better than headprune: {ahead}. Others can"
        " also start from its cut model: the last tables of each task show that."
    )


def text(records: list[dict[str, Any]]) -> str:
    """Markdown."""
    named = {row["peer"] for record in records for row in record["rows"]}
    lines = [
        "# What else one could use",
        "",
        (
            "Written by `python benchmarks/peers/run.py --figure` from the records in"
            " `benchmarks/records`; do not edit."
        ),
        "",
        "The same weights, rows and judging code for all; each peer in its own pinned environment",
        (
            "(`benchmarks/peers/requirements`). Speed is base model / smaller model in rounds of"
            " both in one process,"
        ),
        (
            "median and 95 % interval over the rounds, of the first draw, with both medians in ms;"
            " the base model is"
        ),
        (
            "PyTorch's in that environment, for ONNX Runtime too. *Unpruned* is timed as two copies"
            " of one model. Accuracy"
        ),
        (
            "(or the measure that a task's tables name; a point is 0.01 of it) is of test rows,"
            " mean ± standard deviation over draws of calibration rows; *against headprune* is the"
            " paired"
        ),
        (
            "difference in points with the same budget, mean over draws with its 95 % interval over"
            " rows, on test and on"
        ),
        (
            "validation rows. *Loads back*: a process of its own that loads what was saved says the"
            " same. Memory is what"
        ),
        (
            "that one (*to run*), and the one that scores and cuts, took at most beyond what they"
            " had before the model."
        ),
        (
            "Seconds (*to score*, *in all*) are of the timed draw, and the machine had other work"
            " beside some rows, above"
        ),
        "all beside those that train: they are no comparison between rows.",
        "",
        (
            "ONNX Runtime's threads wait without spinning here"
            " (`session.intra_op.allow_spinning=0`): by spinning, its"
        ),
        (
            "default, they would slow down the base model whose turn is next. Used by itself, with"
            " its default, it may be"
        ),
        "faster than shown.",
        "",
        *(f"- **{name}**: {peer.about}." for name, peer in PEERS.items() if name in named),
    ]
    lines += studies.no_gpu(record["hardware"] for record in records)
    lacking = [
        title
        for task, title in TITLES.items()
        if task not in {record["task"] for record in records}
    ]
    lines += ["", *(f"{title}: no record yet." for title in lacking)] if lacking else []
    for record in verdict.with_noise_of_all(records):
        lines += section(in_order(record))
    return "\n".join(lines) + "\n"


def in_order(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its peers as the roster has them, whatever was measured first."""
    place = {name: number for number, name in enumerate(PEERS)}

    def rank(row: dict[str, Any]) -> tuple[int, float]:
        return place[row["peer"]], -(row["kept"] or 0)

    return {**record, **{k: sorted(record.get(k, []), key=rank) for k in ("rows", "compared")}}


def section(record: dict[str, Any]) -> list[str]:
    base = next(
        (row for row in record["rows"] if row["peer"] == "unpruned" and "error" not in row), None
    )
    where = record["hardware"]
    used = record["rows_used"]
    cut = [row["kept"] for row in record["rows"] if row["kept"] is not None]
    of_share = cut and is_share(max(cut))
    metric = metric_of(record)
    lines = [
        "",
        f"## {TITLES[record['task']]}, {record['device_used']}"
        + (", heads and neurons" if of_share else ""),
        "",
        f"{where.get('gpu', where['processor'])}, {record['threads']} threads. {record['heads']}"
        f" heads; {used['calibration']} calibration rows, {used['validation']} validation and"
        f" {used['test']} test rows"
        + (f"; test {metric} of the base model {base['test']:.3f}." if base else "."),
        *remarks(record),
        *sessions(record),
    ]
    for kept in sorted({row["kept"] for row in record["rows"]}, key=lambda kept: -(kept or 10**9)):
        rows = [row for row in record["rows"] if row["kept"] == kept]
        lines += [
            "",
            (
                "### The whole model"
                if kept is None
                else f"### {budget(kept, record['heads'])} kept"
            ),
            "",
        ]
        lines += table(record, kept, rows)
    return [*lines, *verdict.text(record), *others(record)]


def remarks(record: dict[str, Any]) -> list[str]:
    """What a reader must know of the rows, and who cannot take part."""
    task = record["task"]
    found = [REMARKS[task]] if task in REMARKS else []
    able = {name for name, peer in PEERS.items() if task in peer.tasks}
    budgets = {row["kept"] for row in record["rows"]}
    others = [
        name for name, peer in PEERS.items() if name not in able and any(map(peer.meets, budgets))
    ]
    if others:
        why = "we have no program for this model or its training"
        found.append(f"Not run, because {why}: {'; '.join(others)}.")
    return ["", " ".join(found)] if found else []


def metric_of(record: dict[str, Any]) -> str:
    """What quality is measured by."""
    return METRICS.get(record["task"], "accuracy")


def sessions(record: dict[str, Any]) -> list[str]:
    """How far apart rows were timed, what the base model took meanwhile, and how many draws there
    are."""
    timed = list(verdict.timed(record).values())
    if not timed:
        return []
    made = [datetime.fromisoformat(row.get("timed", row["created"])) for row in timed]
    hours = (max(made) - min(made)).total_seconds() / 3600
    ranges = []
    for place, shape in enumerate(verdict.shapes(record)):
        took = [row["speed"][place]["base_ms"] for row in timed]
        ranges.append(f"{_ms(min(took))} to {_ms(max(took))} ms at {shape}")
    draws: dict[int, list[float]] = {}
    for kept in sorted({row["kept"] for row in record["rows"] if row["kept"]}, reverse=True):
        most = len(
            {row["seed"] for row in record["rows"] if row["kept"] == kept and "error" not in row}
        )
        draws.setdefault(most, []).append(kept)
    counts = "; ".join(
        f"{most} with {verdict.budgets_in_words(kept)}" for most, kept in draws.items()
    )
    fewer = "; 1 for what trains or does not depend on them" if max(draws, default=1) > 1 else ""
    return [
        "",
        (
            "Each ratio is of its row's own process, where base and smaller model take turns."
            f" These processes lie up to {hours:.1f} hours apart, and the base model's own time"
            f" differs between them and between environments: {', '.join(ranges)}. So compare"
            f" ratios, not ms. Draws of calibration rows: {counts}{fewer}."
        ),
    ]


def table(record: dict[str, Any], kept: float | None, rows: list[dict[str, Any]]) -> list[str]:
    """A row a peer; what failed for every draw has its error beneath."""
    shapes = verdict.shapes(record)
    against = "unpruned" if kept is None else REFERENCE
    head = ["peer", "draws", metric_of(record), f"against {against}", "on validation rows"]
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
            cells += [
                *(map(_speed, timed[0]["speed"]) if timed else ["-"] * len(shapes)),
                *_rest(good, timed),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        else:
            what = (
                "CPU only"
                if all("runs on the CPU only" in error for error in errors)
                else "does not work"
            )
            lines.append(f"| {name} | {what} |" + " - |" * (len(head) - 2))
    reasons = [f"- **{name}** failed: {error}" for name, error in failed.items()]
    reasons += gaps(record, kept, {row["peer"] for row in rows})
    return [*lines, *([""] if reasons else []), *reasons]


def gaps(record: dict[str, Any], kept: float | None, here: set[str]) -> list[str]:
    """Who of the roster has no row among those ``here``, because it cannot or because nobody has
    measured it."""
    known = {row["peer"] for row in record["rows"]}
    even = [name for name, peer in PEERS.items() if peer.even and name in known]
    if kept is None or is_share(kept) or here.intersection(even):
        even = []
    able = [
        name for name, peer in PEERS.items() if record["task"] in peer.tasks and peer.meets(kept)
    ]
    lacking = [name for name in able if name not in (*even, *here)]
    lines = (
        [f"- Those that keep as many heads in every layer have no row here: {'; '.join(even)}."]
        if even
        else []
    )
    return [*lines, *([f"- No row yet: {'; '.join(lacking)}."] if lacking else [])]


def _apart(record: dict[str, Any], name: str, kept: float | None, split: str) -> str:
    against = "unpruned" if kept is None else REFERENCE
    for line in record.get("compared", []):
        if (line["peer"], line["kept"], line["reference"]) == (name, kept, against):
            return verdict.points(line, split)
    return "-"


def _speed(cell: dict[str, Any]) -> str:
    times = f"{_ms(cell['base_ms'])} to {_ms(cell['ms'])}"
    return f"{cell['ratio']:.2f}x [{cell['low']:.2f}, {cell['high']:.2f}], {times}"


def _ms(value: float) -> str:
    """Three figures, or all before the point."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _rest(rows: list[dict[str, Any]], timed: list[dict[str, Any]]) -> list[str]:
    """Means over all draws; seconds of the timed one, the only one meant to have the machine for
    itself."""

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


def others(record: dict[str, Any]) -> list[str]:
    """How models are saved, why some do not come back, and notes of the peers."""
    lines: dict[str, None] = {}
    budgets: dict[tuple[str, str], dict[float | None, None]] = {}
    for row in record["rows"]:
        back = row.get("loads_back", {})
        if back and PEERS[row["peer"]].environment != OWN:
            lines[f"- **{row['peer']}** is saved and loaded with: {back.get('by', 'nothing')}."] = (
                None
            )
        if back and not back["ok"]:
            why = back.get("error") or f"says something else, by {back['difference']:.2g}"
            lines[f"- **{row['peer']}** does not load back: {why}"] = None
        for note in (*row.get("notes", ()), *_disturbed(record, row)):
            budgets.setdefault((row["peer"], note), {})[row["kept"]] = None
    # A note that is the same for several budgets is one line.
    for (peer, note), kept in budgets.items():
        cut = [one for one in kept if one is not None]
        where = verdict.budgets_in_words(cut) if cut else budget(None)
        lines[f"- **{peer}**, {where}: {note}."] = None
    return ["", *lines] if lines else []


def _disturbed(record: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Where the machine was slow beside other sessions; base and smaller model met that in turn."""
    found = []
    for place, cell in enumerate(row.get("speed", ())):
        same = [
            r for r in record["rows"] if r["environment"] == row["environment"] and "speed" in r
        ]
        fastest = min(r["speed"][place]["base_ms"] for r in same)
        if cell["base_ms"] > SLOWER * fastest:
            shape, times = verdict.shapes(record)[place], cell["base_ms"] / fastest
            found.append(
                f"at {shape} the base model took {times:.1f} times its fastest time in that"
                " environment"
            )
    return found
