"""Writes everything measured that README and docs state, from the records in
``benchmarks/records``.

    make docs-figures              # or: python docs/figures.py

Whole pages are written by the benchmark whose records they show. In the README, and in pages that
also say other things, what was measured stands between ``<!-- make docs-figures: NAME -->`` and
``<!-- end of NAME -->``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import choice_cost
import choice_intervals
import compatibility
import concepts
import family_coverage
import findings
import gpu_page
import kv_groups
import learned_gates
import pipelines
import recipe_runs
import regret
import scale
import scorers
import selector_loss
import serving
import tradeoff_page
import translation
from pages import table, threads
from studies import RECORDS, ROOT

from headprune.core.files import write_atomic
from headprune.core.record import RunRecord

#: Records, and what writes the pages about them: ``(records, docs)``.
PAGES: dict[str, Callable[[Path, Path], object]] = {
    "scorers-*.json": scorers.draw,
    "learned-gates-*.json": learned_gates.write_page,
    "pipelines-*.json": pipelines.draw,
    "regret-*.json": regret.draw,
    "choice-intervals-*.json": choice_intervals.draw,
    "choice-cost-*.json": choice_cost.draw,
    "kv-groups-*.json": kv_groups.draw,
    "findings-*.json": findings.draw,
    "selector-loss-*.json": selector_loss.draw,
    "translation-*.json": translation.draw,
    "compatibility.json": compatibility.draw,
    "demo.json": recipe_runs.draw,
    "run-*.json": recipe_runs.draw,
    "peers-*.json": (
        lambda records, docs: importlib.import_module("page").write(records, docs)
    ),  # of benchmarks/peers
    "coverage.json": lambda records, docs: write_atomic(
        docs / "coverage.md",
        family_coverage.table(json.loads((records / "coverage.json").read_text())).encode(),
    ),
}
#: Pages that say other things, too, and have blocks as the README has.
WITH_BLOCKS = ("scale.md", "serving.md")
BLOCK = re.compile(
    r"(<!-- make docs-figures: ([\w-]+) -->\n).*?(\n *<!-- end of \2 -->)", re.DOTALL
)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes pages and blocks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where pages are written")
    parser.add_argument(
        "--readme", type=Path, default=ROOT / "README.md", help="whose blocks are filled"
    )
    args = parser.parse_args(argv)
    for pattern, write in PAGES.items():
        if list(args.records.glob(pattern)):
            write(args.records, args.docs)
    tradeoff_page.draw(args.records, args.docs)
    gpu_page.draw(args.records, args.docs)
    concepts.draw(args.records, args.docs)
    args.readme.write_text(
        filled(args.readme.read_text(encoding="utf-8"), args.records), encoding="utf-8"
    )
    for page in WITH_BLOCKS:
        write_atomic(
            args.docs / page,
            filled((ROOT / "docs" / page).read_text("utf-8"), args.records).encode(),
        )


def filled(text: str, records: Path) -> str:
    """The text with every block written anew.

    Raises:
        KeyError: a block that nobody writes.
    """
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]](records)}{found[3]}", text)


def trec(records: Path) -> str:
    """An encoder without half of its heads, by scorer."""
    record = json.loads((records / "scorers-trec.json").read_text())
    kept = str(record["heads"] // 2)
    draws: dict[str, list[float]] = {}
    for row in record["rows"]:
        if kept in row.get("accuracy", {}):
            draws.setdefault(row["scorer"], []).append(row["accuracy"][kept])
    mean = {name: f"{statistics.fmean(values):.3f}" for name, values in draws.items()}
    judged: dict[str, Any] = record["judged"]
    about = (
        f"accuracy on {judged['n']} test questions: {judged['accuracy']:.3f} before,"
        f" {mean['taylor']} by `taylor`,"
    )
    chance = (
        f"{mean['random']} by chance (mean of {len(draws['random'])} draws), {mean['magnitude']} by"
        " weight magnitude."
    )
    lines = [
        (
            f"A BERT-style encoder on TREC, {kept} of its {record['heads']} heads removed, nothing"
            " trained or refitted;"
        ),
        about,
        f"{chance} More: [scorers-accuracy](docs/scorers-accuracy.md).",
    ]
    return "\n".join(lines)


def demo(records: Path) -> str:
    """What ``make demo`` gave, from the record of that run."""
    record = RunRecord.load(records / "demo.json")
    rows = [row for row in record.quality if row.split == "test"]
    sizes = {row.name: row for row in record.size}
    speed, proof = (
        max(record.speed, key=lambda row: row.batch),
        max(p.max_difference for p in record.proofs),
    )
    less = 1 - sizes["parameters"].pruned / sizes["parameters"].original
    lines = [
        (
            f"Measured by `make demo` ({record.hardware['processor']}, {threads(record.hardware)}):"
            " half of the"
        ),
        (
            f"heads of a ViT on scikit-learn's digits removed, {rows[0].metric} on"
            f" {rows[0].n_examples} test images. The cut"
        ),
        (
            f"model is {100 * less:.0f} % smaller, runs {speed.ratio:.2f}x as fast at batch"
            f" {speed.batch} (95 % interval"
        ),
        (
            f"{speed.low:.2f} to {speed.high:.2f}) and gives the gated model's outputs up to"
            f" {proof:.1e}."
        ),
        "",
        *table(
            ["chosen by", "heads kept", rows[0].metric],
            [[row.name, str(row.kept_heads), f"{row.value:.3f}"] for row in rows],
        ),
    ]
    return "\n".join(lines)


#: What writes each block.
BLOCKS: dict[str, Callable[[Path], str]] = {
    "tradeoff": tradeoff_page.readme,
    "pipelines": pipelines.readme,
    "regret": regret.readme,
    "coverage": family_coverage.readme,
    "trec": trec,
    "demo": demo,
    "scale-paper": scale.paper,
    "scale-checked": scale.checked,
    "scale-processes": scale.shared,
    "scale-streaming": scale.streamed,
    "serving": serving.matrix,
    "serving-details": serving.details,
}


if __name__ == "__main__":
    main()
