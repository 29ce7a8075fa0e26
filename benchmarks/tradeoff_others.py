"""The parts of docs/tradeoff.md about records of other benchmarks: ``native``, ``scoring_cost`` and
``startup``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from pages import Record, Row, interval, machine, ratio, read, table

#: Subjects of ``native.py`` for which it promises nothing.
UNPROMISED = ("llama, free",)


def natives(records: Path) -> list[str]:
    lines = ["", "## Beside a model that was built small", ""]
    found = read(records, "native-*.json")
    for record in found:
        aim, rows = record["aim"], record["rows"]
        lines += [
            machine(record),
            "",
            (
                "Speed of the pruned model over the native one of its shape: the mean of"
                f" {record['processes']} processes"
            ),
            (
                "with its 95 % interval, and the slowest and the fastest process, for where weights"
                " lie in memory favours"
            ),
            (
                "one of two models of the same code. *Uncut* is the same comparison before any cut,"
                " where the native one"
            ),
            (
                "is code of its own: its distance from 1 is due to Transformers' code. *The cut's"
                " own share* is"
            ),
            (
                "*pruned* divided by *uncut*; what takes as long in every call weighs more in a"
                " smaller model, so look at the"
            ),
            "milliseconds, too, that a call takes beyond the native model's.",
            (
                f"The target is {aim}: *reached* where the whole interval is at or above it,"
                " *missed* where the whole"
            ),
            (f"interval is below, else *open*. There is no target for {', '.join(UNPROMISED)}."),
            "",
        ]
        body = [cells(aim, row) for row in rows]
        head = ["model", "dtype", "compiled", "batch x tokens", "pruned", "processes", str(aim)]
        head += ["uncut", "the cut's own share", "ms beyond native: cut", "uncut"]
        lines += [*table(head, body, left=2), "", *summary(aim, rows), ""]
    return [*lines, *_missing(found, "native.py")]


def cells(aim: float, row: Row) -> list[str]:
    """A line of the table."""
    about = [
        row["subject"],
        row["dtype"],
        "yes" if row["compiled"] else "no",
        f"{row['batch']} x {row['tokens']}",
    ]
    each = [timed["ratio"] for timed in row["speed"]["processes"]]
    said = "" if row["subject"] in UNPROMISED else against(aim, row["speed"])
    own = [""] * 4
    if "uncut" in row:
        own = [ratio(row["uncut"]), ratio(row["share"])]
        extra = (row[key]["extra_seconds"] for key in ("speed", "uncut"))
        own += [
            interval(*(1e3 * seconds[end] for end in ("mean", "low", "high"))) for seconds in extra
        ]
    return [*about, ratio(row["speed"]), f"{min(each):.2f} to {max(each):.2f}", said, *own]


def summary(aim: float, rows: list[Row]) -> list[str]:
    """What misses the aim, what leaves it open, and what missed it before it was cut."""
    said: dict[str, list[str]] = {"missed": [], "open": []}
    early = []
    for row in (row for row in rows if row["subject"] not in UNPROMISED):
        ways = row["dtype"] + ", compiled" * row["compiled"]
        name, word = (
            f"{row['subject']} {row['batch']} x {row['tokens']} ({ways})",
            against(aim, row["speed"]),
        )
        said.setdefault(word, []).append(name)
        if word == "missed" and "uncut" in row and against(aim, row["uncut"]) == word:
            beyond = [1e3 * row[key]["extra_seconds"]["mean"] for key in ("uncut", "speed")]
            early.append(
                f"{name} misses it uncut, too: {ratio(row['uncut'])}; the cut's own share is"
                f" {ratio(row['share'])}. A call takes {beyond[0]:.2f} ms more than the native"
                f" model's before the cut, {beyond[1]:.2f} ms after it."
            )
    lines = [
        f"{word.capitalize()}: {'; '.join(said[word])}."
        for word in ("missed", "open")
        if said[word]
    ]
    return [" ".join([*lines, *early])] if lines else [f"All reach {aim}."]


def against(aim: float, timed: Row) -> str:
    """What an interval says about an aim."""
    return "reached" if timed["low"] >= aim else "missed" if timed["high"] < aim else "open"


def scoring(records: Path) -> list[str]:
    lines = ["", "## Scoring", ""]
    found = [record for record in read(records, "scoring-*.json") if "throughput" in record]
    for record in found:
        body = []
        for row in record["throughput"]:
            cells = [
                f"{row['ratios'][f'{name}, examples a second']['median']:,.0f}"
                for name in ("taylor", "forward")
            ]
            waits = [
                str(row["waits"][name]) if row["waits"][name] is not None else "-"
                for name in ("taylor", "forward")
            ]
            body.append(
                [
                    row["precision"],
                    str(row["examples"]),
                    str(row["tokens"]),
                    *cells,
                    " / ".join(waits),
                ]
            )
        head = [
            "precision",
            "examples",
            "tokens",
            "`taylor`, examples/s",
            "forward alone",
            "waits for the GPU, both",
        ]
        size = (
            "A BERT of {layers} layers x {heads} heads, width {width}, with random weights.".format(
                **row
            )
        )
        lines += [machine(record), "", size, "", *table(head, body), ""]
    return [*lines, *_missing(found, "scoring_cost.py")]


def startup(records: Path) -> list[str]:
    lines = ["", "## Starting", ""]
    found = read(records, "startup.json")
    for record in found:
        aims = record["aim"]
        body = [
            [f"`{name}`", f"{seconds:.3f}", f"{aims[name]:g}" if name in aims else ""]
            for name, seconds in record["beyond an empty process"].items()
        ]
        lines += [
            machine(record),
            "",
            (
                "Medians of fresh processes. `libraries` imports torch and the base class of"
                " Transformers' models, which"
            ),
            (
                f"every run needs. `run` is a whole run of `{record['settings']['recipe']}` with"
                " little of everything."
            ),
            (
                "`run, overhead` is the rest of it, without the stages that its record times:"
                " imports, `libraries`"
            ),
            (
                "among them, reading and checking the recipe, finding out versions and commit, and"
                " writing."
            ),
            "",
            *table(["", "seconds beyond an empty process", "aimed at, below"], body),
        ]
    return lines if found else [*lines, "No record of `benchmarks/startup.py` yet."]


def _missing(found: list[Record], script: str) -> list[str]:
    if not found:
        return [f"Not measured by `benchmarks/{script}` yet."]
    return studies.no_gpu(record["hardware"] for record in found)[1:]
