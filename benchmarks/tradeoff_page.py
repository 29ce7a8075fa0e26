"""docs/tradeoff.md and its figure, from the records alone."""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_page
import studies
from pages import Record, Row, distinct, machine, of, plain, publish, ratio, read, table
from tradeoff_others import natives, scoring, startup
from tradeoff_times import (
    DISTURBED,
    DTYPES,
    GRID,
    WAY,
    break_even,
    disturbed,
    lacking,
    timed,
    times,
    way_words,
)

STAMP = ("created", "git_commit", "processor")
PAGE, PICTURE = "tradeoff.md", "tradeoff.svg"
#: What a task's rows do not say by themselves.
ABOUT = {
    "stsb": (
        "The sentence encoder as it is, judged by cosines: nothing is trained on grades, so no way"
        " trains here."
    )
}
#: What is done after heads were chosen, by what a way's name ends in.
AFTER = {
    "": "nothing refitted or trained",
    "lstsq": "the rest refitted by `lstsq`, nothing trained",
    "finetune": "the rest refitted by `lstsq`, then trained",
}
TITLES = {"sst2": "SST-2, accuracy", "trec": "TREC, accuracy", "stsb": "STS-B, Spearman"}


def draw(records: Path, docs: Path) -> Path:
    """Writes the page and the figure, from every record there is."""
    found = drawable(one_each(tradeoffs(records)))
    if found:
        picture(found, docs / PICTURE)
    return publish(docs / PAGE, lead(found), page(records))


def lead(records: list[Record]) -> str:
    """What was found, and for whom: a third of the heads, in the cell of the figure."""
    words = []
    for record in records:
        kept, way = record["heads"] // 3, recovered(record)
        row = next((row for row in shown(record) if row["kept"] == kept), None)
        apart = paired(record, way, kept)
        if row and apart:
            words.append(
                f"{title(record)}: {100 * apart['difference']:+.1f} points {_points(apart)},"
                f" {ratio(row)} times as fast."
            )
    return (
        "For those who ask how much faster a model gets without some of its heads, and at what"
        f" price. A third of an encoder's heads kept, nothing trained. {' '.join(words)} Small"
        " batches and short inputs gain less: the tables have every batch and length. Cuts that"
        " also remove neurons gain more: [one budget](one-budget.md)."
    )


def tradeoffs(records: Path) -> list[Record]:
    """The records of this study."""
    return read(records, "tradeoff-*.json")


def one_each(records: list[Record]) -> list[Record]:
    """Of a task's records on one kind of machine, the fullest: others are of other weights."""
    best: dict[tuple[str, str, str | None], Record] = {}
    for record in records:
        key = record["task"], record["device"], record.get("gpu")
        if key not in best or len(record["rows"]) > len(best[key]["rows"]):
            best[key] = record
    return list(best.values())


def drawable(records: list[Record]) -> list[Record]:
    """Those with both axes of the figure."""
    return [record for record in records if shown(record) and of(record, "quality")]


def page(records: Path) -> str:
    """Markdown; every number is computed from the records."""
    found, between = tradeoffs(records), between_processes(records)
    lines = [
        "# Speed against accuracy",
        "",
        (
            "Written by `make docs-figures` from the records in `benchmarks/records`; do not edit."
            " How each number is"
        ),
        (
            "measured is said by the scripts: `benchmarks/tradeoff.py`, `native.py`,"
            " `scoring_cost.py`, `startup.py`."
        ),
        "",
        (
            "A speed is the time of the whole model over the time of the cut one, in the same run:"
            " 2 is twice as fast. In"
        ),
        "brackets behind it is its 95 % interval over the rounds of one process.",
        *between,
        "",
        (
            "*Limit* is the speed by multiply-adds alone; a model may exceed it. Norms and what else is"
            " as large as before keep"
        ),
        (
            "a model below it; score matrices and softmax, which shrink with the heads and count as"
            " few multiply-adds or"
        ),
        "none, put it above, most of all in eager attention at long inputs.",
        "",
        (
            "A cell is *disturbed*, and shows nothing, where the 90th percentile of either model's"
            f" time is over {DISTURBED} times its median."
        ),
        "",
        (
            "Only models in rows with `+` were refitted or trained after the cut: compare scorers"
            " among the other rows."
        ),
        (
            "Random heads that were refitted, too, are in [pipelines](pipelines.md), for SST-2 and"
            " TREC."
        ),
        *other_tasks(records),
    ]
    if drawable(found):
        lines += ["", f"![quality against speed, by heads kept]({PICTURE})", ""]
        lines += [
            "In the figure, every way of choosing heads is drawn at the speed that the timed way"
            " has."
        ]
    if not found:
        lines += ["", "No record of `benchmarks/tradeoff.py` yet."]
    for record in found:
        lines += [
            "",
            f"## {title(record)}",
            "",
            machine(record),
            "",
            *elsewhere(record),
            *in_short(record),
            *accuracy(record),
        ]
        lines += [*sizes(record), *speed(record), *long_inputs(record)]
    lines += decoder(found)
    lines += not_yet(found)
    lines += [*natives(records), *scoring(records), *startup(records)]
    return "\n".join(lines) + "\n"


def between_processes(records: Path) -> list[str]:
    """How far a speed differs between processes: the largest standard deviation among the rows of
    ``native.py``."""
    most: dict[str, float] = {}
    for record in read(records, "native-*.json"):
        where = record["hardware"].get("gpu", "a CPU")
        for cell in (
            row[name] for row in record["rows"] for name in ("speed", "uncut") if name in row
        ):
            each = [process["ratio"] for process in cell["processes"]]
            most[where] = max(
                most.get(where, 0.0), studies.deviation(each) / statistics.fmean(each)
            )
    said = " and ".join(f"{100 * share:.0f} % on {where}" for where, share in most.items())
    words = (
        f"From process to process a speed differs, too: by a standard deviation of up to {said}"
        " (`native.py`)."
    )
    return [words] if said else []


def other_tasks(records: Path) -> list[str]:
    """Where other tasks' speed and accuracy stand, as far as there are records of them."""
    runs = [
        record["name"]
        for pattern in ("demo.json", "run-*.json")
        for record in read(records, pattern)
    ]
    said = (
        [f"speed and accuracy of whole runs ({', '.join(runs)}): [recipes](recipe-runs.md)"]
        if runs
        else []
    )
    if read(records, "translation-*.json"):
        said.append(
            "what each kind of a translator's attention can spare: [translation](translation.md)"
        )
    if read(records, "kv-groups-*.json"):
        said.append("perplexity of a small Llama without key/value groups: [groups](kv-groups.md)")
    return ["", f"Other tasks: {'; '.join(said)}."] if said else []


def title(record: Record) -> str:
    return f"{metric(record)}, on {record.get('gpu', 'a CPU')}"


def metric(record: Record) -> str:
    """The task with what it is judged by, where that was measured."""
    words = TITLES.get(record["task"], record["task"])
    return words if of(record, "quality") else f"{words.partition(',')[0]}, speed"


def elsewhere(record: Record) -> list[str]:
    """Timed rows of another processor than the record's: it went on on another machine."""
    usual, places = record["hardware"]["processor"], dict[str, dict[str, None]]()
    for row in (row for what in ("speed", "attention", "kv") for row in of(record, what)):
        if (processor := row.get("processor", usual)) != usual:
            places.setdefault(processor, {})[place(row)] = None
    return [
        line
        for name, found in places.items()
        for line in (f"Timed on {name}: {'; '.join(found)}.", "")
    ]


def place(row: Row) -> str:
    """Which cell a timed row is about."""
    if row["what"] == "kv":
        return f"the decoder in {row['dtype']}, prompt {row['prompt']}, batch {row['batch']}"
    of_what = (
        "long inputs" if row["what"] == "attention" else way_words(*(row[name] for name in WAY))
    )
    return f"{of_what}, {row['length']} tokens, batch {row['batch']}"


def not_yet(found: list[Record]) -> list[str]:
    """Tasks of the study without a record, on a CPU and on a GPU."""
    lines = []
    for device, where in (("cpu", "a CPU"), ("cuda", "a GPU")):
        there = {record["task"] for record in found if record["device"] == device}
        names = [words.partition(",")[0] for task, words in TITLES.items() if task not in there]
        if names and (there or device == "cpu"):
            lines.append(f"No record yet, on {where}, of {', '.join(names)}.")
    lines += studies.no_gpu(record["hardware"] for record in found)[not lines :]
    return ["", "## Not measured yet", "", *lines] if lines else []


# ------------------------------------------------------------------------------------------------
# accuracy and size


def in_short(record: Record) -> list[str]:
    """A third of the heads: what it costs and what it brings, in a sentence."""
    if of(record, "gpu"):
        return [*gpu_page.headline_words(record), "Cell by cell: [on a GPU](gpu.md).", ""]
    kept, way = record["heads"] // 3, recovered(record)
    cells = of(
        record,
        "speed",
        kept=kept,
        dtype="float32",
        attention="sdpa",
        compiled=False,
        batch=32,
        length=128,
    )
    apart = paired(record, way, kept)
    if not cells or disturbed(cells[0]):
        return []
    row, cost = cells[0], "; accuracy was not measured here:"
    if apart:
        moved = f"{100 * apart['difference']:+.1f} points {_points(apart)}"
        cost = f" (`{way}`, nothing trained), the test metric moves by {moved}, and"
    return [
        (
            f"With {kept} of {record['heads']} heads{cost} at batch 32 of 128 tokens the model is"
            f" {ratio(row)} times as fast, {row['ratio'] / row['limit']:.2f} of the"
            f" {row['limit']:.2f} that multiply-adds would allow."
        ),
        "",
    ]


def recovered(record: Record) -> str:
    """The timed way, refitted where the record has that."""
    every = distinct(of(record, "quality"), "way")
    return next(
        (way for way in (f"{record['timed']} + lstsq", record["timed"]) if way in every), ""
    )


def accuracy(record: Record) -> list[str]:
    rows = of(record, "quality")
    if not rows:
        return []
    budgets = sorted({row["kept"] for row in rows if row["kept"] < record["heads"]}, reverse=True)
    lines = [
        (
            f"All {record['heads']} heads: {record['base']:.3f}, on {record['judged']} test rows."
            " Mean ± standard"
        ),
        (
            "deviation over draws of calibration rows; in brackets points against all heads, mean"
            " over draws, with their"
        ),
        "95 % interval over examples.",
        "",
    ]
    lines[:0] = [ABOUT[record["task"]], ""] if record["task"] in ABOUT else []
    body = []
    for way in distinct(rows, "way"):
        whole = of(record, "quality", way=way, kept=record["heads"])
        if whole:
            lines[-1:] = [
                (
                    f"All heads, {way.partition(' + ')[2]}d as long as the others:"
                    f" {_quality(record, whole)}."
                ),
                "",
            ]
            continue
        cells = [_quality(record, of(record, "quality", way=way, kept=kept)) for kept in budgets]
        body.append([way, *cells])
    lines += table(["", *(f"{kept} kept" for kept in budgets)], body)
    trained = [
        key for key in distinct(of(record, "paired"), "way", "kept", "against") if key[2] != "base"
    ]
    if trained:
        rows = [row for key in trained if (row := paired(record, *key))]
        words = [
            f"{r['way']}, {r['kept']} kept: {100 * r['difference']:+.1f} {_points(r)}" for r in rows
        ]
        lines += ["", f"Points against all heads trained as long: {'; '.join(words)}."]
    return lines


def _quality(record: Record, draws: list[Row]) -> str:
    if not draws:
        return ""
    found = paired(record, draws[0]["way"], draws[0]["kept"])
    apart = f" ({100 * found['difference']:+.1f} {_points(found)})" if found else ""
    return f"{studies.spread([row['quality'] for row in draws])}{apart}"


def paired(record: Record, way: str, kept: int, against: str = "base") -> Row | None:
    """The difference over the most draws: a record that goes on with more of them keeps the older
    ones."""
    rows = of(record, "paired", way=way, kept=kept, against=against)
    return max(rows, key=lambda row: int(row["draws"]), default=None)


def _points(apart: Row) -> str:
    return f"[{100 * apart['low']:+.1f}, {100 * apart['high']:+.1f}]"


def sizes(record: Record) -> list[str]:
    rows = of(record, "sizes")
    if not rows:
        return []
    names = [name for name in rows[0] if name not in ("what", "kept", "heads", *STAMP)]
    body = [[f"{rows[0]['heads'][0]:.0f}", *(f"{rows[0][name][0]:,.0f}" for name in names)]]
    body += [
        [f"{row['heads'][1]:.0f}", *(f"{row[name][1]:,.0f}" for name in names)] for row in rows
    ]
    about = (
        "MACs are of an example as long as those of the first test batch; a *limit* below is of its"
        " own row's length."
    )
    return ["", about, "", *table(["heads", *names], body, left=0)]


# ------------------------------------------------------------------------------------------------
# speed


def speed(record: Record) -> list[str]:
    lines: list[str] = []
    failed = [row for row in record["rows"] if row["what"] == "speed" and "error" in row]
    ways = distinct(of(record, "speed"), *WAY)
    for way in ways:
        rows = of(record, "speed", **dict(zip(WAY, way, strict=True)))
        budgets = sorted(distinct(rows, "kept"), reverse=True)
        lines += ["", f"### {way_words(*way)}", "", *break_even(rows), "", *times(rows, budgets)]
        lines += lacking(rows, [row for row in failed if tuple(row[name] for name in WAY) == way])
    grid = itertools.product(DTYPES[record["device"]], GRID["attention"], GRID["compiled"])
    never = set(grid) - set(ways) - set(distinct(failed, *WAY))
    if ways and never and not of(record, "gpu"):
        lines += [
            "",
            f"Not measured at all: {'; '.join(way_words(*way) for way in sorted(never))}.",
        ]
    if failed:
        lines += ["", "Failed:", ""]
    lines += [f"- {place(row)}, {row['kept']} kept: {row['error']}" for row in failed]
    if lines:
        about = f"The timed models are those of `{record['timed']}` and the first draw."
        about += " No peak memory is measured under torch.compile."
        lines = ["", about, *lines, *headline(record)]
    return lines


def headline(record: Record) -> list[str]:
    """The encoder at batch 32 of 128 tokens with a third of its heads, next to what multiply-adds
    allow."""
    third = record["heads"] // 3
    rows = of(record, "speed", kept=third, batch=32, length=128)
    lines = []
    for row in rows:
        way = way_words(row["dtype"], row["attention"], row["compiled"])
        share = row["ratio"] / row["limit"]
        lines.append(
            f"- {way}: {timed(row)} of a limit of {row['limit']:.2f}, a share of {share:.2f}."
        )
    intro = f"Batch 32 of 128 tokens, {record['heads'] - third} of {record['heads']} heads removed:"
    return ["", intro, "", *lines] if lines else []


def long_inputs(record: Record) -> list[str]:
    """The attention modules alone, with their projections, and the model, at long inputs."""
    body = []
    for row in of(record, "attention"):
        alone = row["alone"]
        ms = " to ".join(plain(1000 * alone[f"{which}_p50"]) for which in ("original", "pruned"))
        part = [timed(alone), f"{row['attention_limit']:.2f}"]
        model = [timed(row["model"]), f"{row['limit']:.2f}"]
        body.append([str(row["length"]), str(row["batch"]), str(row["kept"]), ms, *part, *model])
    head = [
        "tokens",
        "batch",
        "heads kept",
        "attention, ms",
        "its speed",
        "its limit",
        "model's speed",
        "its limit",
    ]
    about = (
        "In float32 with SDPA, in eager mode. *Attention* is the attention modules, their"
        " projections included."
    )
    title = "### Long inputs: the attention part and the model"
    return ["", title, "", about, "", *table(head, body, left=0)] if body else []


def decoder(records: list[Record]) -> list[str]:
    """The cache of a decoder, of the first record on each device: no task has a part in it."""
    lines: list[str] = []
    for device in dict.fromkeys(record["device"] for record in records):
        rows = next((rows for r in records if r["device"] == device and (rows := of(r, "kv"))), [])
        body = []
        for row in rows:
            a, b = row["bytes"]
            speeds = row["tokens_a_second"]
            cells = [
                row["dtype"],
                str(row["prompt"]),
                str(row["batch"]),
                f"{a:,} to {b:,}",
                f"{a / b:g}",
            ]
            for phase in ("prefill", "decode"):
                rates = (speeds[f"{which}_{phase}"] for which in ("original", "pruned"))
                cells += [" to ".join(f"{rate:,.0f}" for rate in rates), timed(row[phase])]
            body.append(cells)
        if body:
            about = (
                f"A Llama of {rows[0]['layers']} layers, width {rows[0]['hidden_size']}, with"
                " random weights and 8"
            )
            lines += [
                "",
                f"## A decoder with grouped queries, on {'a CPU' if device == 'cpu' else 'a GPU'}",
                "",
            ]
            lines += [f"{about} groups of 4 query heads; every second group is removed.", ""]
            head = ["dtype", "prompt", "batch", "bytes of the cache", "ratio"]
            head += ["prefill tokens/s", "speed", "decode tokens/s", "speed"]
            lines += table(head, body)
    return lines


# ------------------------------------------------------------------------------------------------
# figure


def shown(record: Record) -> list[Row]:
    """The cell that the figure is about: batch 32 of 128 tokens in fp32 with SDPA in eager mode, or
    the nearest.

    Of a GPU, the busiest GPU-bound cell: elsewhere its times are Python's.
    """
    if busiest := gpu_page.shown(record):
        return busiest
    rows = of(record, "speed", compiled=False) or of(record, "speed")
    if not rows:
        return []
    wanted = {"dtype": "float32", "attention": "sdpa", "length": 128, "batch": 32}
    for key, value in wanted.items():
        near = min(
            distinct(rows, key),
            key=lambda v: (v != value, str(v)) if isinstance(v, str) else abs(v - value),
        )  # type: ignore[arg-type, return-value]
        rows = [row for row in rows if row[key] == near]
    return sorted(rows, key=lambda row: -row["kept"])


def picture(records: list[Record], path: Path) -> None:
    """A panel a record: quality against measured speed, a line a way, a point a budget."""
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    # A way has one colour and one place in the legend on all panels.
    ways: list[str] = []
    for record in records:
        ways += [way for way in distinct(of(record, "quality"), "way") if way not in ways]
    figure = Figure(figsize=(4.6 * len(records), 4.2), layout="constrained")
    for panel, record in zip(
        figure.subplots(1, len(records), squeeze=False)[0], records, strict=True
    ):
        rows = shown(record)
        for number, way in enumerate(ways):
            points = []
            for row in rows:
                draws = [r["quality"] for r in of(record, "quality", way=way, kept=row["kept"])]
                if draws:
                    points.append((row["ratio"], statistics.fmean(draws), studies.deviation(draws)))
            if points:
                panel.errorbar(
                    *zip(*points, strict=True),
                    label=way,
                    color=f"C{number}",
                    marker=".",
                    linewidth=1,
                    capsize=2,
                )
        for row in rows:
            panel.axvline(row["ratio"], color="0.85", linewidth=0.8, zorder=0)
            panel.annotate(
                str(row["kept"]), (row["ratio"], 0), xycoords=("data", "axes fraction"), fontsize=7
            )
        panel.axhline(record["base"], color="0.6", linestyle="--", linewidth=1)
        panel.set_title(title(record), fontsize=9)
        panel.set_xlabel(
            f"speed at batch {rows[0]['batch']} of {rows[0]['length']}"
            f" tokens{rows[0].get('said', '')}; heads kept of {record['heads']}"
        )
        panel.grid(alpha=0.2)
        panel.legend(fontsize=6)
    studies.save_figure(figure, path)
