"""What shipped recipes gave when they were run from end to end: docs/recipe-runs.md, from the
records of those runs.

    headprune run char-gpt --set data.path=path/to/shakespeare.txt --set data.revision=null --out
    runs/char-gpt python benchmarks/recipe_runs.py --keep runs/char-gpt    # the record, as
    run-NAME.json, on a GPU run-NAME-cuda.json python benchmarks/recipe_runs.py
    # the page

The record of ``make demo`` is ``demo.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headprune.core.codec import FrozenDict
from headprune.core.record import QualityRow, RunRecord
from headprune.recipes.reading import shipped_recipes
from headprune.recipes.validate import load_recipe
from headprune.report.decoding import decoding_lines
from headprune.report.formats import fixed

sys.path.insert(0, str(Path(__file__).resolve().parent))
from pages import interval, plain, publish, ran_on, table
from studies import RECORDS, ROOT, no_gpu

PAGE = "recipe-runs.md"


def main(argv: Sequence[str] | None = None) -> Path:
    """Writes the page and returns its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--keep", type=Path, metavar="RUN", help="keep this run's record, and draw the page"
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where to write")
    args = parser.parse_args(argv)
    if args.keep is not None:
        keep(RunRecord.load(args.keep / "record.json"), args.records)
    return draw(args.records, args.docs)


def keep(record: RunRecord, records: Path) -> Path:
    """Saves it without folders: where the run and its data lay is nobody's business."""
    data, source = (
        {**part, "path": Path(part["path"]).name}
        for part in (record.recipe["data"], record.rows["source"])
    )
    kept = replace(
        record,
        recipe=FrozenDict({**record.recipe, "out": None, "data": data}),
        rows=FrozenDict({**record.rows, "source": source}),
    )
    return kept.save(
        records / f"run-{record.name}{'-cuda' if 'gpu' in record.hardware else ''}.json"
    )


def draw(records: Path, docs: Path) -> Path:
    """Writes the page from every record of a run."""
    paths = [
        path
        for path in (records / "demo.json", *sorted(records.glob("run-*.json")))
        if path.is_file()
    ]
    found = [RunRecord.load(path) for path in paths]
    return publish(docs / PAGE, lead(found), page(found))


def lead(records: Sequence[RunRecord]) -> str:
    """What was found, and for whom: the whole model and the last cut one."""
    words = []
    for record in records:
        rows = [row for row in record.quality if row.split == "test"]
        first, last = rows[0], rows[-1]
        words.append(
            f"`{record.name}`: {first.kept_heads} to {last.kept_heads} heads,"
            f" {first.metric} {first.value:.3f} to {last.value:.3f}"
        )
    return (
        "For those who want to know what a shipped recipe gives before running it: quality on test"
        f" rows, sizes and speed. {'; '.join(words)}."
    )


def page(records: Sequence[RunRecord]) -> str:
    """Markdown; every number is of a record."""
    lines = [
        "# Recipes, run from end to end",
        "",
        (
            "Written by `make docs-figures` from the records in `benchmarks/records`; do not edit."
            " One run each, quality"
        ),
        (
            "on test rows; *random* is the mean ± standard deviation over draws of heads. A speed"
            " is the time of the whole"
        ),
        "model over the time of the cut one, in turn in one process, with its 95 % interval.",
    ]
    for record in records:
        lines += [
            "",
            f"## {record.name}",
            "",
            f"{record.recipe['description']} {surroundings(record)}",
            "",
        ]
        lines += [*quality(record), "", *sizes(record), *speed(record), *decoding(record)]
    return "\n".join([*lines, *no_gpu(record.hardware for record in records)]) + "\n"


def surroundings(record: RunRecord) -> str:
    """Where it ran, when, and what was proven; not how long it took, for other work may have run
    beside it."""
    where, apart = ran_on(record.hardware), max(proof.max_difference for proof in record.proofs)
    text = (
        f"{where}, {record.created[:10]}. The cut model gives the gated model's outputs up to"
        f" {apart:.1e}."
    )
    if record.name in shipped_recipes():
        then = record.recipe["score"]["scorer"]
        today = load_recipe(record.name).score.scorer
        if today != then:
            text += f" The recipe named the scorer `{then}` then; today it takes `{today}`."
    return text


def quality(record: RunRecord) -> list[str]:
    rows = [row for row in record.quality if row.split == "test"]
    body = [
        [row.name, str(row.kept_heads), _value(row), "yes" if row.trained else ""] for row in rows
    ]
    return table(
        ["", "heads", f"{rows[0].metric} ({rows[0].n_examples:,} rows)", "trained after the cut"],
        body,
    )


def _value(row: QualityRow) -> str:
    return fixed(row.value, 4) + ("" if row.spread is None else f" ± {fixed(row.spread, 4)}")


def sizes(record: RunRecord) -> list[str]:
    words = [f"{row.name} {row.original:,.0f} to {row.pruned:,.0f}" for row in record.size]
    return [f"Before and after: {'; '.join(words)}."]


def speed(record: RunRecord) -> list[str]:
    body = []
    for row in record.speed:
        times = [plain(1e3 * seconds) for seconds in (row.original_p50, row.pruned_p50)]
        body.append(
            [str(row.batch), str(row.length), *times, interval(row.ratio, row.low, row.high)]
        )
    return (
        ["", *table(["batch", "length", "whole, ms", "cut, ms", "speed"], body, left=0)]
        if body
        else []
    )


def decoding(record: RunRecord) -> list[str]:
    body = []
    for row in decoding_lines(record):
        rates = [" to ".join(pair) for pair in (row.prefill, row.decode)]
        body.append(
            [row.batch, row.prompt, *rates, f"{row.ratio} ({row.interval})", " to ".join(row.cache)]
        )
    head = [
        "batch",
        "prompt",
        "prefill tokens/s",
        "decode tokens/s",
        "decode speed",
        "bytes of the cache",
    ]
    return ["", *table(head, body, left=0)] if body else []


if __name__ == "__main__":
    main()
