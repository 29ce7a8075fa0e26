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
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
import headline
import kv_groups
import learned_gates
import one_budget
import pipelines
import recipe_runs
import regret
import scale
import scorers
import selector_loss
import serving
import tradeoff_page
import translation
from studies import RECORDS, ROOT

from headprune.core.files import write_atomic

#: Records, and what writes the pages about them: ``(records, docs)``.
PAGES: dict[str, Callable[[Path, Path], object]] = {
    "scorers-*.json": scorers.draw,
    "learned-gates-*.json": learned_gates.write_page,
    "pipelines-*.json": pipelines.draw,
    "regret-*.json": regret.draw,
    "one-budget-*.json": one_budget.draw,
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
WITH_BLOCKS = ("how-to.md", "scale.md", "serving.md")
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
    headline.draw(args.records, args.docs)
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


#: What writes each block.
BLOCKS: dict[str, Callable[[Path], str]] = {
    "headline": headline.readme,
    "limits": headline.limits,
    "coverage": family_coverage.readme,
    "scale-paper": scale.paper,
    "scale-checked": scale.checked,
    "scale-processes": scale.shared,
    "scale-streaming": scale.streamed,
    "auto-cost": choice_cost.how_to,
    "serving": serving.matrix,
    "serving-details": serving.details,
    "serving-families": serving.families_page,
}


if __name__ == "__main__":
    main()
