"""Which model families each checkpoint format can hold, found by saving a cut model of each and
loading it again.

    python benchmarks/formats.py            # rewrites the table in docs/checkpoints.md
    python benchmarks/formats.py --new      # tries only families that are not in it yet

A uniform plan keeps the same number of heads in every layer, other heads in each; an uneven one
keeps another number in each, and a last one takes every head of a layer. What is written is loaded
by Transformers and compared, tensor by tensor and in outputs, so that "yes" is a thing that was
done.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import transformers
from torch import nn

import headprune as hp
from headprune.core.errors import HeadPruneError, VerificationFailed
from headprune.core.heads import AttentionSite, HeadMask
from headprune.layouts import registry

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- formats: begin -->", "<!-- formats: end -->"
HEADER = (
    "| family (heads cut) | uniform plan: `transformers` | uneven plan: `remote-code` | layer without heads:"
    " `remote-code` |"
)


def row(layout: str, family: str) -> tuple[str, str, str]:
    """``yes`` or ``no`` a plan and format, in the order of the table."""
    cells = []
    for plan, form in (
        (uniform, "transformers"),
        (uneven, "remote-code"),
        (one_empty, "remote-code"),
    ):
        model, batch = registry.get(layout).tiny(0, family)
        cells.append("yes" if holds(model.eval(), batch, plan, form) else "no")
    return cells[0], cells[1], cells[2]


def holds(model: nn.Module, batch: Any, plan: Any, form: Any) -> bool:
    """Whether a model, cut by a plan, comes back from a format without this package."""
    sites = hp.find_sites(model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            hp.prune_(model, plan(sites), sites=sites)
            hp.save_pretrained(model, folder, format=form, example=batch)
        except VerificationFailed:
            raise  # a format that breaks a promise is a mistake, not a "no"
        except HeadPruneError:
            return False
    return True


def uniform(sites: tuple[AttentionSite, ...]) -> HeadMask:
    """The same number of units in every layer, and not the same units."""
    fewest = min(len(s.units) for s in sites)
    return _keep(
        sites,
        [[(i + j) % len(s.units) for j in range(max(1, fewest // 2))] for i, s in enumerate(sites)],
    )


def uneven(sites: tuple[AttentionSite, ...]) -> HeadMask:
    """One unit fewer in every second layer."""
    return _keep(
        sites,
        [range(i % 2 if len(s.units) > 1 else 0, len(s.units)) for i, s in enumerate(sites, 1)],
    )


def one_empty(sites: tuple[AttentionSite, ...]) -> HeadMask:
    """No unit in the second layer, or in the only one."""
    empty = min(1, len(sites) - 1)
    return _keep(sites, [range(0 if i == empty else len(s.units)) for i, s in enumerate(sites)])


def _keep(sites: tuple[AttentionSite, ...], units: list[Any]) -> HeadMask:
    kept = {s.name: [h for i in us for h in s.units[i]] for s, us in zip(sites, units, strict=True)}
    return HeadMask.from_keep(kept, {s.name: s.n_query_heads for s in sites})


def table(known: str = "") -> str:
    """The table for every registered family, as Markdown; rows that stand in ``known`` are taken
    from there."""
    rows = {
        line.split("|")[1].strip(): line for line in known.splitlines() if line.startswith("| ")
    }
    families = [
        (layout, family)
        for layout in registry.names()
        for family, _ in registry.get(layout).families
    ]
    lines = [f"Transformers {transformers.__version__}.", "", HEADER, "| --- " * 4 + "|"]
    for layout, family in sorted(families, key=lambda pair: pair[1]):
        if family not in rows:
            rows[family] = f"| {family} | {' | '.join(row(layout, family))} |"
            print(rows[family], file=sys.stderr, flush=True)
        lines.append(rows[family])
    return "\n".join(lines)


def documented() -> str:
    """The table that stands in the docs."""
    return DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print", action="store_true", help="only print the table")
    parser.add_argument(
        "--new", action="store_true", help="only try families that the table does not have yet"
    )
    options = parser.parse_args()
    made = table(documented() if options.new else "")
    if options.print:
        print(made)
        return
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
