"""docs/gpu.md, and what other pages say of a GPU, from the records alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from gpu_time import BUSY, Cell
from pages import Record, Row, distinct, interval, machine, of, plain, publish, ratio, read, table
from tradeoff_times import break_even

PAGE = "gpu.md"
#: The model that the page begins with.
FIRST = "bert-base"
#: The share of heads, or of heads and neurons, that the page begins with.
HALF = 0.5
#: A cut is as fast as its work allows, for our purpose, from this share of the limit on.
AIM = 0.95
INTRO = """# On a GPU

Written by `make docs-figures` from the records in `benchmarks/records`; do not edit.

Every cell has two times. *Latency* is the wall clock of a call, from an idle GPU to an idle GPU. *GPU time* is what
lies between two CUDA events around replays of a CUDA graph of the same call, so that launching kernels from Python
costs nothing. A small model keeps Python busier than the GPU: its latency does not change when heads go. Such a cell is
*launch-bound*; a cell is *GPU-bound* where the GPU is busy for at least {busy:.0%} of the latency, of the whole model
and of the cut one. A speed is the time of the whole model over that of the cut one, in the same run, with its 95 %
interval. *Limit* is what multiply-adds alone would give; of a decode step, the bytes of weights and KV cache that it
reads. The limit counts multiply-adds alone: norms, activations and residual sums multiply nothing, stay as large as
before, and take time for the bytes that they move. Code under `torch.compile` makes its own graphs: *by events* is the
time between events around the call, with Python's work before the replay in it.

Inputs have no attention mask, because a mask of ones keeps the flash kernel away. Transformers 5.17 writes such a mask
out for code that is compiled or captured; here it does not, as later versions do not. Clocks are read and never locked.
Energy is read over back-to-back replays alone. How to run it: [benchmarks](https://github.com/headprune/headprune/tree/main/benchmarks).
"""


def draw(records: Path, docs: Path) -> Path:
    """Write the page, from every record there is."""
    return publish(docs / PAGE, lead(of_shapes(records)), page(records))


def lead(shapes: list[Record]) -> str:
    """What was found, and for whom."""
    words = (
        "For those who run a cut model on a GPU: how long a call takes, how long the GPU itself is"
        " busy, and how near that comes to what fewer multiply-adds allow."
    )
    for record in shapes:
        found = [row for row in busiest(record) if row["subject"] == FIRST and row["share"] == HALF]
        if not found:
            continue
        said = " and ".join(f"{ratio(row['call'])} times as fast with {kept(row)}" for row in found)
        first = found[0]
        small = [row for row in eager(record) if row["bound"] == "launch"]
        words += (
            f" On an {record['gpu']} in bf16, {FIRST} at {first['batch']} x {first['tokens']} tokens"
            f" is {said}. {len(small)} of {len(eager(record))} cells in bf16 are launch-bound: Python"
            " limits them, and a cut does not change their latency unless CUDA graphs run it."
        )
    return words


def page(records: Path) -> str:
    """Markdown; every number is computed from the records."""
    cuts, shapes = of_cuts(records), of_shapes(records)
    rest = [*scoring(records), *correctness(records), *queue(records)]
    lines = [INTRO.format(busy=BUSY)]
    if not cuts and not shapes and not rest:
        lines.append(f"On a GPU: {studies.NO_GPU}.")
    for record in cuts:
        lines += [
            "",
            f"## {record['task'].upper()}, an encoder that was cut",
            "",
            machine(record),
            "",
        ]
        lines += [*headline_words(record), *ceilings(record), *cells(of(record, "gpu"))]
        lines += failed(record)
    for record in shapes:
        lines += ["", "## Models of real sizes", "", machine(record), ""]
        lines += [
            (
                "Random weights, for speed does not depend on them; every layer keeps the same share"
                " of its heads, or of its heads and feed-forward neurons. The busiest cell of each"
                " model in bf16, in eager mode:"
            ),
            "",
            *in_short(record),
            "",
            *ceilings(record),
        ]
        for subject, phase in distinct(of(record, "gpu"), "subject", "phase"):
            lines += ["", f"### {subject}, {phase}", ""]
            lines += cells(of(record, "gpu", subject=subject, phase=phase))
        lines += failed(record)
    lines += rest
    return "\n".join(lines) + "\n"


def of_cuts(records: Path) -> list[Record]:
    """Records of ``tradeoff.py`` with cells of a GPU."""
    return [
        record
        for record in read(records, "tradeoff-*.json")
        if "gpu" in record and of(record, "gpu")
    ]


def of_shapes(records: Path) -> list[Record]:
    """Records of ``gpu/shapes.py``, of a GPU."""
    return [record for record in read(records, "gpu-shapes*.json") if "gpu" in record]


# ------------------------------------------------------------------------------------------------
# rows


def limit(row: Row) -> float:
    """What the least work would allow: of multiply-adds, or of bytes where only those are
    counted."""
    if "limit" in row:
        return float(row["limit"])
    whole, cut = row["work"]["macs" if "macs" in row["work"] else "bytes"]
    return float(whole / cut)


def eager(record: Record) -> list[Row]:
    """Rows in bf16, in eager mode, with a warm cache, whose GPU time is known."""
    rows = of(record, "gpu", precision="bfloat16", code="eager", attention="sdpa", cold=False)
    return [row for row in rows if "gpu" in row]


def busiest(record: Record) -> list[Row]:
    """Of each subject and phase, the rows of the cell in bf16 that keeps the GPU busy longest."""
    found = []
    for subject, phase in distinct(eager(record), "subject", "phase"):
        rows = [row for row in eager(record) if (row["subject"], row["phase"]) == (subject, phase)]
        longest = max(rows, key=lambda row: row["gpu"]["original_p50"])
        found += [row for row in rows if Cell.of(row) == Cell.of(longest)]
    return found


def in_short(record: Record) -> list[str]:
    """A line for each subject and phase, and the cuts to a half, of its busiest cell."""
    head = ["model", "batch x tokens", "kept", "latency", "GPU alone", "limit", "bound by"]
    body = []
    for row in busiest(record):
        if row["share"] != HALF:
            continue
        name = f"{row['subject']}, {row['phase']}"
        size = f"{row['batch']} x {row['tokens']}"
        speeds = [ratio(row["call"]), ratio(row["gpu"]), f"{limit(row):.2f}"]
        body.append([name, size, kept(row), *speeds, row["bound"]])
    return table(head, body, left=3)


def kept(row: Row) -> str:
    """How much is kept: heads of an encoder, or a share of every layer."""
    if "kept" in row:
        return f"{row['kept']} kept"
    both = row.get("neurons", 1.0) < 1
    return f"{row['share']:.0%} of heads{' and neurons' if both else ''}"


def flat(row: Row, which: str) -> Row:
    """A row as the tables of other speeds have it, by its latency (``call``) or its GPU time
    (``gpu``)."""
    about = {
        "kept": row["kept"] if "kept" in row else kept(row),
        "batch": row["batch"],
        "length": row["tokens"],
    }
    return {**row[which], **about, "limit": limit(row)}


def headline(record: Record) -> list[Row]:
    """The busiest GPU-bound cell in bf16 and eager mode, a row for each cut; else the one nearest
    to GPU-bound."""
    rows = eager(record)
    if not rows:
        return []
    bound = [row for row in rows if row["bound"] == "gpu"]
    if bound:
        best = max(bound, key=lambda row: row["batch"] * row["tokens"])
    else:
        best = max(rows, key=lambda row: row["gpu"]["pruned_p50"] / row["call"]["pruned_p50"])
    return [row for row in rows if Cell.of(row) == Cell.of(best)]


def shown(record: Record) -> list[Row]:
    """The headline's rows, most heads first, for figures and lines that other devices have, too."""
    rows = [{**flat(row, "gpu"), "said": " in bf16, GPU time"} for row in headline(record)]
    return sorted(rows, key=lambda row: -row["kept"])


def headline_words(record: Record) -> list[str]:
    """What a third of the heads brings where the GPU is busy, beside what the machine can do."""
    third = record["heads"] // 3
    row = next((row for row in headline(record) if row["kept"] == third), None)
    if row is None:
        return []
    share = row["gpu"]["ratio"] / limit(row)
    lines = [
        f"With {third} of {record['heads']} heads, batch {row['batch']} of {row['tokens']} tokens"
        f" in bf16 ({row['bound']}-bound): GPU time {plain(1000 * row['gpu']['original_p50'])} to"
        f" {plain(1000 * row['gpu']['pruned_p50'])} ms, {ratio(row['gpu'])} times as fast,"
        f" {share:.2f} of the limit of {limit(row):.2f}; latency {ratio(row['call'])}."
    ]
    judged = {
        r.get("cut")
        for r in of(record, "quality", kept=third, seed=0)
        if r["way"].startswith(record["timed"])
    }
    if judged - {row.get("cut")}:
        lines.append("The heads of the judged and of the timed model differ.")
    top = next(iter(of(record, "ceiling")), None)
    if top and "macs" in row:
        rates = [
            2 * macs * row["batch"] / row["gpu"][f"{which}_p50"]
            for macs, which in zip(row["macs"], ("original", "pruned"), strict=True)
        ]
        done = " and ".join(f"{rate / 1e12:.0f}" for rate in rates)
        lines.append(
            f"The whole and the cut model compute at {done} TFLOP/s,"
            f" {rates[0] / top['bfloat16_flops']:.0%} and {rates[1] / top['bfloat16_flops']:.0%} of"
            " what a large matrix product reaches on the same machine."
        )
    return [" ".join(lines), ""]


def ceilings(record: Record) -> list[str]:
    """What the machine can do at most."""
    lines = []
    for row in of(record, "ceiling"):
        products = ", ".join(
            f"{name.removesuffix('_flops')} {value / 1e12:.0f}"
            for name, value in row.items()
            if name.endswith("_flops")
        )
        lines += [
            (
                f"This machine's ceilings: {row['copy_bytes'] / 1e12:.2f} TB/s copied; TFLOP/s of"
                f" products: {products}."
            ),
            "",
        ]
    return lines


# ------------------------------------------------------------------------------------------------
# tables


def cells(rows: list[Row]) -> list[str]:
    """A table for each precision, code and attention, and from where on a cut pays."""
    lines: list[str] = []
    for way in distinct(rows, "precision", "code", "attention", "cold"):
        precision, code, attention, cold = way
        mine = [
            row
            for row in rows
            if tuple(row[name] for name in ("precision", "code", "attention", "cold")) == way
        ]
        about = (
            f"{precision}, {code}, {attention} attention"
            + ", L2 cache overwritten before every call" * cold
        )
        lines += [f"**{about}**", "", *one_table(mine), *short_of_limit(mine), *paying(mine), ""]
    return lines[:-1]


def one_table(rows: list[Row]) -> list[str]:
    """A line for each batch and length."""
    cuts = list(dict.fromkeys(map(kept, rows)))
    head = ["batch x tokens", "kernel", "whole, ms: GPU", "latency"]
    head += [word for name in cuts for word in (f"{name}: GPU alone", "latency", "limit")]
    body = []
    for batch, tokens in distinct(rows, "batch", "tokens"):
        here = {kept(row): row for row in rows if (row["batch"], row["tokens"]) == (batch, tokens)}
        first = next(iter(here.values()))
        line = [f"{batch} x {tokens}", ", ".join(first["backends"]) or "-"]
        line += [ms(first, "gpu"), ms(first, "call")]
        for name in cuts:
            line += one_cut(here.get(name))
        body.append(
            [*line, ", ".join(dict.fromkeys(row.get("bound", "-") for row in here.values()))]
        )
    return table([*head, "bound by"], body, left=2)


def one_cut(row: Row | None) -> list[str]:
    """Three cells of the table: a cut's speeds and its limit."""
    if row is None:
        return [""] * 3
    gpu = f"- ({row.get('no_graph', 'no GPU')})"
    if "gpu" in row or "events" in row:
        gpu = ratio(row["gpu"]) if "gpu" in row else f"{ratio(row['events'])} by events"
    return [gpu, f"{row['call']['ratio']:.2f}", f"{limit(row):.2f}"]


def ms(row: Row, which: str) -> str:
    return plain(1000 * row[which]["original_p50"]) if which in row else "-"


def short_of_limit(rows: list[Row]) -> list[str]:
    """GPU-bound cells whose speed is below ``AIM`` of what the least work would allow; the
    introduction says why."""
    said = []
    for row in rows:
        if row.get("bound") == "gpu" and row["gpu"]["ratio"] / limit(row) < AIM:
            share = row["gpu"]["ratio"] / limit(row)
            said.append(f"{row['batch']} x {row['tokens']}, {kept(row)}: {share:.2f}")
    return ["", f"GPU-bound and below {AIM} of the limit: {'; '.join(said)}."] if said else []


def paying(rows: list[Row]) -> list[str]:
    """From which batch and length on a cut pays, by GPU time and by latency; energy where it was
    read."""
    lines: list[str] = []
    for which, name in (("gpu", "GPU time"), ("call", "Latency")):
        mine = [flat(row, which) for row in rows if which in row]
        if len(distinct(mine, "batch", "length")) > len(distinct(mine, "length")):
            lines += ["", f"{name}:", "", *break_even(mine)]
    spent = [row for row in rows if row.get("joules") and all(row["joules"])]
    if spent:
        lines += ["", "Energy per example:", ""]
    for row in spent:
        words = " to ".join(plain(1000 * joules / row["batch"]) for joules in row["joules"])
        lines.append(f"- {row['batch']} x {row['tokens']}, {kept(row)}: {words} mJ.")
    return lines


def failed(record: Record) -> list[str]:
    """Cells that could not be run."""
    rows = [row for row in record["rows"] if row["what"] == "gpu" and "error" in row]
    said = [
        f"- {r.get('subject', '')} {r['precision']} {r['code']} {r['batch']} x {r['tokens']}:"
        f" {r['error']}"
        for r in rows
    ]
    return ["", "Failed:", "", *said] if said else []


# ------------------------------------------------------------------------------------------------
# the rest


def correctness(records: Path) -> list[str]:
    """Largest error as a share of its tolerance, by kind of check."""
    path = records / "gpu-correct.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if record.get("device", {}).get("type") != "cuda":
        return []
    groups: dict[str, list[Row]] = {}
    for check in record["checks"]:
        if not check["check"].startswith("control: "):  # which must be beyond their tolerance
            name = check["test"].partition("::")[0].removeprefix("test_").replace("_", " ")
            groups.setdefault(name, []).append(check)
    body = []
    for name, checks in groups.items():
        passed = sum(check["passed"] for check in checks)
        shares = [
            float(check["error"]) / check["tolerance"] for check in checks if check["tolerance"]
        ]
        body.append(
            [name, str(len(checks)), str(passed), f"{max(shares):.2g}" if shares else "exact"]
        )
    head = ["check", "comparisons", "passed", "largest error over its tolerance"]
    where = record["device"]["name"]
    about = (
        f"On {where} beside the CPU, by {record['n_tests_passed']} tests of `tests/gpu`: fp64, fp32,"
        " TF32, fp16, bf16 and autocast, as far as each applies."
    )
    return ["", "## The same results as on the CPU", "", about, "", *table(head, body)]


def scoring(records: Path) -> list[str]:
    """``leave_one_out`` beside the plain loop over heads."""
    lines: list[str] = []
    for record in read(records, "scoring-*.json"):
        if "gpu" not in record["hardware"] or "leave_one_out" not in record:
            continue
        body = []
        for row in record["leave_one_out"]:
            size = f"{row['layers']} x {row['heads']}, width {row['width']}"
            faster = [row["ratios"][f"{way} / fast"] for way in ("naive", "hp.gated loop")]
            shown = [interval(found["median"], found["p10"], found["p90"]) for found in faster]
            saturated = "yes" if row["saturated"] else ""
            body.append([size, f"{row['batch']} x {row['tokens']}", *shown, saturated])
        head = [
            "layers x heads",
            "batch x tokens",
            "whole passes",
            "loop with `hp.gated`",
            "GPU saturated",
        ]
        about = (
            "Ablation of every head by `leave_one_out`: times as fast as each of two plain loops,"
            " with the 10th and"
        )
        about += " 90th percentile over rounds."
        lines += ["", "## Scoring", "", machine(record), "", about, "", *table(head, body, left=2)]
    return lines


def queue(records: Path) -> list[str]:
    """What ran, and how it ended."""
    path = records / "gpu-queue.json"
    if not path.is_file():
        return []
    entries = json.loads(path.read_text())["entries"]
    body = [
        [e["job"], e["status"], f"{e['seconds']:.0f}", e["commit"][:12], e["created"][:10]]
        for e in entries
    ]
    notes = {e["note"]: None for e in entries if "note" in e}
    return [
        "",
        "## What ran",
        "",
        *table(["job", "ended", "seconds", "commit", "on"], body, left=2),
        *(line for note in notes for line in ("", f"Discarded: {note}.")),
    ]
