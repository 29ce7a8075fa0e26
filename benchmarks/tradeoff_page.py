"""docs/tradeoff.md, its figure, and the README's block about it, from the records alone."""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

from headprune.core.files import write_atomic

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from pages import Record, Row, distinct, machine, of, ratio, read, table
from tradeoff_others import natives, scoring, startup

WAY, STAMP = ("dtype", "attention", "compiled"), ("created", "git_commit", "processor")
PAGE, PICTURE = "tradeoff.md", "tradeoff.svg"
#: What a task's rows do not say by themselves.
ABOUT = {
    "stsb": "The sentence encoder as it is, judged by cosines: nothing is trained on grades, so no way trains here."
}
TITLES = {"sst2": "SST-2, accuracy", "trec": "TREC, accuracy", "stsb": "STS-B, Spearman"}


def draw(records: Path, docs: Path) -> Path:
    """Writes the page and the figure, from every record there is."""
    found = drawable(tradeoffs(records))
    if found:
        picture(found, docs / PICTURE)
    return write_atomic(docs / PAGE, page(records).encode())


def tradeoffs(records: Path) -> list[Record]:
    """The records of this study."""
    return read(records, "tradeoff-*.json")


def drawable(records: list[Record]) -> list[Record]:
    """Those with both axes of the figure."""
    return [record for record in records if of(record, "speed") and of(record, "quality")]


def page(records: Path) -> str:
    """Markdown; every number is computed from the records."""
    found = tradeoffs(records)
    lines = [
        "# Speed against accuracy",
        "",
        "Written by `make docs-figures` from the records in `benchmarks/records`; do not edit. How each number is",
        "measured is said by the scripts: `benchmarks/tradeoff.py`, `native.py`, `scoring_cost.py`, `startup.py`.",
        "",
        "A speed is the time of the whole model over the time of the cut one, in the same run: 2 is twice as fast. In",
        "brackets are 95 % intervals. *Limit* is what multiply-adds alone would give, and no bound: norms and what",
        "else is as large as before keep a model below it; score matrices and softmax, which shrink with the heads and",
        "count as few multiply-adds or none, put it above, most of all in eager attention at long inputs.",
        "",
        "Of a ViT, a GPT and whatever else was run from end to end: [recipes](recipe-runs.md). Of a translator, what",
        "each kind of attention can spare: [translation](translation.md).",
    ]
    if drawable(found):
        lines += ["", f"![quality against speed, by heads kept]({PICTURE})", ""]
        lines += ["In the figure, every way of choosing heads is drawn at the speed that the timed way has."]
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


def title(record: Record) -> str:
    return f"{TITLES.get(record['task'], record['task'])}, on {record.get('gpu', 'a CPU')}"


def elsewhere(record: Record) -> list[str]:
    """Timed rows of another processor than the record's: it went on on another machine."""
    usual, places = record["hardware"]["processor"], dict[str, dict[str, None]]()
    for row in (row for what in ("speed", "attention", "kv") for row in of(record, what)):
        if (processor := row.get("processor", usual)) != usual:
            places.setdefault(processor, {})[place(row)] = None
    return [line for name, found in places.items() for line in (f"Timed on {name}: {'; '.join(found)}.", "")]


def place(row: Row) -> str:
    """Which cell a timed row is about."""
    if row["what"] == "kv":
        return f"the decoder in {row['dtype']}, prompt {row['prompt']}, batch {row['batch']}"
    of_what = "long inputs" if row["what"] == "attention" else way_words(*(row[name] for name in WAY))
    return f"{of_what}, {row['length']} tokens, batch {row['batch']}"


def not_yet(found: list[Record]) -> list[str]:
    """Tasks of the study without a record, on a CPU and on a GPU."""
    lines = []
    for device, where in (("cpu", "a CPU"), ("cuda", "a GPU")):
        there = {record["task"] for record in found if record["device"] == device}
        names = [words.partition(",")[0] for task, words in TITLES.items() if task not in there]
        if names and (there or device == "cpu"):
            lines.append(f"No record yet, on {where}, of {', '.join(names)}.")
    lines += studies.no_gpu(record["hardware"] for record in found)
    return ["", "## Not measured yet", "", *lines] if lines else []


# ------------------------------------------------------------------------------------------------ accuracy and size


def in_short(record: Record) -> list[str]:
    """A third of the heads: what it costs and what it brings, in a sentence."""
    kept, way = record["heads"] // 3, recovered(record)
    cells = of(record, "speed", kept=kept, dtype="float32", attention="sdpa", compiled=False, batch=32, length=128)
    apart = paired(record, way, kept)
    if not cells or not apart:
        return []
    row = cells[0]
    return [
        f"With {kept} of {record['heads']} heads (`{way}`, nothing trained), the test metric moves by"
        f" {100 * apart['difference']:+.1f} points {_points(apart)}, and at batch 32 of 128 tokens the model is"
        f" {ratio(row)} times as fast, {row['ratio'] / row['limit']:.2f} of the {row['limit']:.2f} that multiply-adds"
        " would allow.",
        "",
    ]


def recovered(record: Record) -> str:
    """The timed way, refitted where the record has that."""
    every = distinct(of(record, "quality"), "way")
    return next((way for way in (f"{record['timed']} + lstsq", record["timed"]) if way in every), "")


def accuracy(record: Record) -> list[str]:
    rows = of(record, "quality")
    if not rows:
        return []
    budgets = sorted({row["kept"] for row in rows if row["kept"] < record["heads"]}, reverse=True)
    lines = [
        f"All {record['heads']} heads: {record['base']:.3f}, on {record['judged']} test rows. Mean ± standard",
        "deviation over draws of calibration rows; in brackets points against all heads, mean over draws, with their",
        "95 % interval over examples.",
        "",
    ]
    lines[:0] = [ABOUT[record["task"]], ""] if record["task"] in ABOUT else []
    body = []
    for way in distinct(rows, "way"):
        whole = of(record, "quality", way=way, kept=record["heads"])
        if whole:
            lines[-1:] = [
                f"All heads, {way.partition(' + ')[2]}d as long as the others: {_quality(record, whole)}.",
                "",
            ]
            continue
        cells = [_quality(record, of(record, "quality", way=way, kept=kept)) for kept in budgets]
        body.append([way, *cells])
    lines += table(["", *(f"{kept} kept" for kept in budgets)], body)
    trained = [key for key in distinct(of(record, "paired"), "way", "kept", "against") if key[2] != "base"]
    if trained:
        rows = [row for key in trained if (row := paired(record, *key))]
        words = [f"{r['way']}, {r['kept']} kept: {100 * r['difference']:+.1f} {_points(r)}" for r in rows]
        lines += ["", f"Points against all heads trained as long: {'; '.join(words)}."]
    return lines


def _quality(record: Record, draws: list[Row]) -> str:
    if not draws:
        return ""
    found = paired(record, draws[0]["way"], draws[0]["kept"])
    apart = f" ({100 * found['difference']:+.1f} {_points(found)})" if found else ""
    return f"{studies.spread([row['quality'] for row in draws])}{apart}"


def paired(record: Record, way: str, kept: int, against: str = "base") -> Row | None:
    """The difference over the most draws: a record that goes on with more of them keeps the older ones."""
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
    body += [[f"{row['heads'][1]:.0f}", *(f"{row[name][1]:,.0f}" for name in names)] for row in rows]
    return ["", *table(["heads", *names], body, left=0)]


# ------------------------------------------------------------------------------------------------ speed


def speed(record: Record) -> list[str]:
    lines: list[str] = []
    failed = [row for row in record["rows"] if row["what"] == "speed" and "error" in row]
    everything, ways = of(record, "speed"), distinct(of(record, "speed"), *WAY)
    for way in ways:
        rows = of(record, "speed", **dict(zip(WAY, way, strict=True)))
        budgets = sorted(distinct(rows, "kept"), reverse=True)
        lines += ["", f"### {way_words(*way)}", "", *break_even(rows), "", *times(rows, budgets)]
        lines += lacking(rows, [row for row in failed if tuple(row[name] for name in WAY) == way], everything)
    never = set(itertools.product(*(distinct(everything, name) for name in WAY))) - set(ways)
    if never:
        lines += ["", f"Not measured at all: {'; '.join(way_words(*way) for way in sorted(never))}."]
    if failed:
        lines += ["", "Failed:", ""]
    lines += [f"- {place(row)}, {row['kept']} kept: {row['error']}" for row in failed]
    if lines:
        about = f"The timed models are those of `{record['timed']}` and the first draw."
        lines = ["", f"{about} No peak memory is measured under torch.compile.", *lines, *headline(record)]
    return lines


def lacking(rows: list[Row], failed: list[Row], everything: list[Row]) -> list[str]:
    """Places of the record's whole grid that one of its tables has no row of; what failed is listed elsewhere."""
    tried = {(row["length"], row["batch"]) for row in (*rows, *failed)}
    lengths, batches = (sorted(distinct(everything, name)) for name in ("length", "batch"))
    said = []
    for length in lengths:
        missing = [str(batch) for batch in batches if (length, batch) not in tried]
        said += [f"batch {', '.join(missing)} of {length} tokens"] * bool(missing)
    budgets = set(distinct(everything, "kept")) - set(distinct([*rows, *failed], "kept"))
    said += [f"{', '.join(map(str, sorted(budgets, reverse=True)))} heads kept"] * bool(budgets)
    return ["", f"Not measured: {'; '.join(said)}."] if said else []


def way_words(dtype: str, attention: str, compiled: bool) -> str:
    return f"{dtype}, {attention} attention, {'torch.compile' if compiled else 'eager mode'}"


def times(rows: list[Row], budgets: list[int]) -> list[str]:
    head = ["tokens", "batch", "whole, ms p50 (p90)", "examples/s"]
    head += [word for kept in budgets for word in (f"{kept} kept: ms p50 (p90)", "speed", "limit")]
    memory = any("peak_bytes" in row for row in rows)
    joules = any(any(row.get("joules_an_example") or []) for row in rows)
    head += ["MiB with weights, whole to smallest"] * memory + ["J/example, whole to smallest"] * joules
    body = []
    for length, batch in sorted(distinct(rows, "length", "batch")):
        found = {row["kept"]: row for row in rows if (row["length"], row["batch"]) == (length, batch)}
        first, last = found[max(found)], found[min(found)]
        cells = [str(length), str(batch), _ms(first, "original"), f"{first['throughput'][0]:,.1f}"]
        for kept in budgets:
            row = found.get(kept)
            cells += [_ms(row, "pruned"), ratio(row), f"{row['limit']:.2f}"] if row else ["", "", ""]
        if memory:
            peaks = zip(last.get("peak_bytes", ()), last["weight_bytes"], strict=False)
            cells.append(" to ".join(f"{sum(pair) / 2**20:.0f}" for pair in peaks))
        if joules:
            spent = last.get("joules_an_example") or [None]
            cells.append(" to ".join(f"{n:.3g}" for n in spent) if all(spent) else "")
        body.append(cells)
    return table(head, body, left=0)


def _ms(row: Row, which: str) -> str:
    return f"{1000 * row[f'{which}_p50']:.3g} ({1000 * row[f'{which}_p90']:.3g})"


def break_even(rows: list[Row]) -> list[str]:
    """From which batch on the cut model is surely faster, where it is surely slower, and where neither can be said."""
    lines = []
    for kept in sorted(distinct(rows, "kept"), reverse=True):
        said = []
        for length in sorted(distinct(rows, "length")):
            cells = sorted((r for r in rows if (r["kept"], r["length"]) == (kept, length)), key=lambda r: r["batch"])
            said.append(f"{length} tokens: {_in_words(cells)}")
        lines.append(f"- With {kept} heads kept. {'; '.join(said)}.")
    return lines


def _in_words(cells: list[Row]) -> str:
    """One length, batches in ascending order."""
    if len(cells) > 1 and all(row["low"] > 1 for row in cells):
        return f"faster at every batch size ({cells[0]['batch']} to {cells[-1]['batch']})"
    words = []
    if len(cells) > 1 and cells[-1]["low"] > 1:
        start = next(i for i in range(len(cells)) if all(row["low"] > 1 for row in cells[i:]))
        words.append(f"faster from batch {cells[start]['batch']} on")
        cells = cells[:start]
    kinds = {
        "faster": [row["batch"] for row in cells if row["low"] > 1],
        "not faster: slower": [row["batch"] for row in cells if row["high"] < 1],
        "no difference shown": [row["batch"] for row in cells if row["low"] <= 1 <= row["high"]],
    }
    words += [f"{kind} at batch {', '.join(map(str, batches))}" for kind, batches in kinds.items() if batches]
    return ", ".join(words)


def headline(record: Record) -> list[str]:
    """The encoder at batch 32 of 128 tokens with a third of its heads, next to what multiply-adds allow."""
    third = record["heads"] // 3
    rows = of(record, "speed", kept=third, batch=32, length=128)
    lines = []
    for row in rows:
        way = way_words(row["dtype"], row["attention"], row["compiled"])
        share = row["ratio"] / row["limit"]
        lines.append(f"- {way}: {ratio(row)} of a limit of {row['limit']:.2f}, a share of {share:.2f}.")
    intro = f"Batch 32 of 128 tokens, {record['heads'] - third} of {record['heads']} heads gone:"
    return ["", intro, "", *lines] if lines else []


def long_inputs(record: Record) -> list[str]:
    """The attention modules alone, with their projections, and the model, at long inputs."""
    body = []
    for row in of(record, "attention"):
        alone = row["alone"]
        ms = f"{1000 * alone['original_p50']:.3g} to {1000 * alone['pruned_p50']:.3g}"
        part = [ratio(alone), f"{row['attention_limit']:.2f}"]
        model = [ratio(row["model"]), f"{row['limit']:.2f}"]
        body.append([str(row["length"]), str(row["batch"]), str(row["kept"]), ms, *part, *model])
    head = ["tokens", "batch", "heads kept", "attention, ms", "its speed", "its limit", "model's speed", "its limit"]
    about = "In float32 with SDPA, in eager mode. *Attention* is the attention modules, their projections included."
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
            cells = [row["dtype"], str(row["prompt"]), str(row["batch"]), f"{a:,} to {b:,}", f"{a / b:g}"]
            for phase in ("prefill", "decode"):
                rates = (speeds[f"{which}_{phase}"] for which in ("original", "pruned"))
                cells += [" to ".join(f"{rate:,.0f}" for rate in rates), ratio(row[phase])]
            body.append(cells)
        if body:
            about = f"A Llama of {rows[0]['layers']} layers, width {rows[0]['hidden_size']}, with random weights and 8"
            lines += ["", f"## A decoder with grouped queries, on {'a CPU' if device == 'cpu' else 'a GPU'}", ""]
            lines += [f"{about} groups of 4 query heads; every second group is gone.", ""]
            head = ["dtype", "prompt", "batch", "bytes of the cache", "ratio"]
            head += ["prefill tokens/s", "speed", "decode tokens/s", "speed"]
            lines += table(head, body)
    return lines


# ------------------------------------------------------------------------------------------------ figure and README


def shown(record: Record) -> list[Row]:
    """The cell that the figure is about: batch 32 of 128 tokens in fp32 with SDPA in eager mode, or the nearest."""
    rows = of(record, "speed", compiled=False) or of(record, "speed")
    wanted = {"dtype": "float32", "attention": "sdpa", "length": 128, "batch": 32}
    for key, value in wanted.items():
        near = min(distinct(rows, key), key=lambda v: (v != value, str(v)) if isinstance(v, str) else abs(v - value))  # type: ignore[arg-type, return-value]
        rows = [row for row in rows if row[key] == near]
    return sorted(rows, key=lambda row: -row["kept"])


def readme(records: Path) -> str:
    """The block of the README: what the figure shows, and the first record's best cells in words."""
    found = drawable(tradeoffs(records))
    if not found:
        return "Speed against accuracy of encoders, by `benchmarks/tradeoff.py`: no record yet."
    words = []
    for record in found:
        rows, where = shown(record), record["hardware"]
        way = recovered(record) or distinct(of(record, "quality"), "way")[0]
        trained = "" if "finetune" in way else ", nothing trained"
        best = [word for row in rows if (word := _best(record, row, way))]
        words.append(
            f"- {title(record)} ({where.get('gpu', where['processor'])}, {where['threads']} threads),"
            f" {record['base']:.3f} with all {record['heads']} heads; by `{way}`{trained}, at batch"
            f" {rows[0]['batch']} of {rows[0]['length']} tokens: {'; '.join(best)}"
        )
    without = " ".join(studies.no_gpu(record["hardware"] for record in found)).strip()
    words += ["", f"All cells: [docs/{PAGE}](docs/{PAGE}). {without}".strip()]
    return "\n".join([f"![quality against speed](docs/{PICTURE})", "", *words])


def _best(record: Record, row: Row, way: str) -> str:
    """What is left at a budget, and how fast."""
    draws = [r["quality"] for r in of(record, "quality", kept=row["kept"], way=way)]
    return f"{row['kept']} heads {studies.spread(draws)} at {ratio(row).replace(' ', 'x ', 1)}" if draws else ""


def picture(records: list[Record], path: Path) -> None:
    """A panel a record: quality against measured speed, a line a way, a point a budget."""
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    figure = Figure(figsize=(4.6 * len(records), 4.2), layout="constrained")
    for panel, record in zip(figure.subplots(1, len(records), squeeze=False)[0], records, strict=True):
        rows = shown(record)
        for way in distinct(of(record, "quality"), "way"):
            points = []
            for row in rows:
                draws = [r["quality"] for r in of(record, "quality", way=way, kept=row["kept"])]
                if draws:
                    points.append((row["ratio"], statistics.fmean(draws), studies.deviation(draws)))
            if points:
                panel.errorbar(*zip(*points, strict=True), label=way, marker=".", linewidth=1, capsize=2)
        for row in rows:
            panel.axvline(row["ratio"], color="0.85", linewidth=0.8, zorder=0)
            panel.annotate(str(row["kept"]), (row["ratio"], 0), xycoords=("data", "axes fraction"), fontsize=7)
        panel.axhline(record["base"], color="0.6", linestyle="--", linewidth=1)
        panel.set_title(title(record), fontsize=9)
        panel.set_xlabel(
            f"speed at batch {rows[0]['batch']} of {rows[0]['length']} tokens; heads kept of {record['heads']}"
        )
        panel.grid(alpha=0.2)
        panel.legend(fontsize=6)
    studies.save_figure(figure, path)
