"""Twenty model classes that no layout was written for: is each cut exactly, or refused in words,
and none wrongly?

    python benchmarks/family_coverage.py          # the draw; writes docs/coverage.md and its record
    python benchmarks/family_coverage.py --all    # every model type of Transformers; prints, and
    writes nothing python benchmarks/family_coverage.py --only bert,clip

A class is drawn from the base models of Transformers whose model type no registered layout names as
a family, and is built with random weights from its own default configuration, every size of it
shrunk. What cannot be built or run this way is redrawn and listed. Every site, of a registered
layout or of one that ``hp.propose_layouts`` found, then has to pass ``headprune.detect.prove``:
|gated - pruned| in fp64 for each head alone and for ragged masks, gradients included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import multiprocessing
import os
import platform
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from pages import shaped  # noqa: E402
from shrunk import built  # noqa: E402  (a script's neighbour)


def examine(model_type: str) -> dict[str, Any]:
    """What headprune makes of one model type: exact, refused, no softmax attention, not built, or
    wrong."""
    import torch

    import headprune as hp
    from headprune.core.errors import HeadPruneError, InvalidValue, UnsupportedModel
    from headprune.detect.prove import Scratch, largest_difference, prove
    from headprune.detect.trace import attention_cores
    from headprune.model.sites import Sites

    torch.set_num_threads(1)
    row: dict[str, Any] = {
        "model_type": model_type,
        "class": None,
        "sites": 0,
        "unreached": 0,
        "layouts": [],
        "difference": None,
    }
    try:
        model, batch = built(model_type)
    except Exception as error:
        return {**row, "status": "not built", "reason": str(error)}
    row["class"] = type(model).__name__
    try:
        scratch = Scratch(model, batch)
    except HeadPruneError as error:
        return {**row, "status": "refused", "reason": f"does not run in fp64: {error}"}
    seen = attention_cores(scratch)
    if not seen:
        return {**row, "status": "no softmax attention", "reason": "no softmax attention"}
    proposed = hp.propose_layouts(model, batch)
    refused = list(map(str, proposed.refused))
    try:
        sites = hp.find_sites(scratch.model, layouts=proposed)
    except HeadPruneError as error:
        return {**row, "status": "refused", "reason": "; ".join(refused) or str(error)}
    reached = []
    for site in sites:  # a tower that the batch does not run has nothing to be proven by
        with hp.gated(scratch.model, {site.name: torch.zeros(len(site.heads))}, sites):
            try:
                reached += [site] if largest_difference(scratch.run(), scratch.full) > 0 else []
            except HeadPruneError as error:
                return {**row, "status": "wrong", "reason": f"{site.name} ({site.layout}): {error}"}
    row["unreached"] = len(sites) - len(reached)
    sites = Sites(reached, sites.layouts.values())
    row |= {"sites": len(sites), "layouts": sorted({s.layout for s in sites})}
    if not sites:
        return {
            **row,
            "status": "refused",
            "reason": "; ".join(refused) or "no effect on the example",
        }
    try:
        row["difference"] = prove(scratch, sites)
    except InvalidValue as error:
        return {**row, "status": "wrong", "reason": str(error)}
    except UnsupportedModel as error:  # the layout fits, and the cut itself refuses
        name = (
            "shared tensors"
            if any(w in str(error) for w in ("shared", "alone"))
            else "projections that are no matrices"
        )
        return {**row, "status": "refused", "reason": f"{name}: {error}"}
    except Exception as error:
        name = type(error).__name__
        return {**row, "status": "wrong", "reason": f"{name}: {str(error).partition(chr(10))[0]}"}
    return {**row, "status": "refused" if refused else "exact", "reason": "; ".join(refused)}


def _child(model_type: str, pipe: Any) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        pipe.send(examine(model_type))
    except BaseException as error:
        pipe.send(
            {
                "model_type": model_type,
                "status": "failed",
                "reason": f"{type(error).__name__}: {error}"[:300],
            }
        )


def examine_apart(model_type: str, seconds: float) -> dict[str, Any]:
    """``examine`` in a process of its own, which may crash or take too long."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            return dict(ours.recv())
        return {
            "model_type": model_type,
            "status": "not built",
            "reason": f"took more than {seconds:.0f} s",
        }
    except EOFError:
        return {"model_type": model_type, "status": "not built", "reason": "the process died"}
    finally:
        process.kill()
        process.join()


def model_types() -> list[str]:
    """Every model type of Transformers that has a base model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def known_types() -> set[str]:
    """The model types that registered layouts name as families."""
    import transformers

    from headprune.layouts import registry

    known = set()
    for layout in map(registry.get, registry):
        for family, tiny in layout.families:
            kind = getattr(transformers, str(getattr(tiny, "model", "")), None)
            known |= {family.replace("-", "_"), family}
            if kind is not None:
                known.add(kind.config_class.model_type)
    return known


def draw(count: int, seed: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """``count`` classes with attention, those without one, and those that could not be built."""
    known, order = known_types(), model_types()
    random.Random(seed).shuffle(
        order
    )  # before the known ones go: a new family takes out one class and moves no other
    found: dict[str, list[dict[str, Any]]] = {"rows": [], "without_attention": [], "redrawn": []}
    for model_type in (t for t in order if t not in known):
        if len(found["rows"]) == count:
            break
        row = examine_apart(model_type, seconds)
        kind = {
            "not built": "redrawn",
            "failed": "redrawn",
            "no softmax attention": "without_attention",
        }
        found[kind.get(row["status"], "rows")].append(row)
        print(_line(row), flush=True)
    return found


def _line(row: dict[str, Any]) -> str:
    worst = "" if row.get("difference") is None else f"{row['difference']:.1e}"
    layouts = ",".join(row.get("layouts") or [])
    return (
        f"{row['model_type']:<28} {row['status']:<20} {row.get('sites', 0):>3} {worst:<8} {layouts}"
        f" {row['reason']}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every model type; writes nothing")
    parser.add_argument("--only", default="", help="these model types; writes nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit a class")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "records" / "coverage.json"
    )
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "coverage.md")
    given = parser.parse_args(arguments)
    import torch

    from headprune.layouts import registry

    # Imported before the first fork, so that no child has to.
    for module in (
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "headprune.detect.propose",
    ):
        importlib.import_module(module)
    for name in registry:
        registry.get(name)
    torch.set_num_threads(1)
    if given.all or given.only:
        rows = []
        for model_type in given.only.split(",") if given.only else model_types():
            rows.append(examine_apart(model_type, given.seconds))
            print(_line(rows[-1]), flush=True)
        print(dict(Counter(r["status"] for r in rows)))
        return
    began = time.time()
    found = draw(given.count, given.seed, given.seconds)
    record = {
        "seed": given.seed,
        "versions": versions(),
        "seconds": round(time.time() - began),
        **found,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    given.table.write_text(table(record))


def versions() -> dict[str, str]:
    import torch
    import transformers

    import headprune

    found = {m.__name__: m.__version__ for m in (headprune, torch, transformers)}
    return {**found, "python": platform.python_version()}


def table(record: dict[str, Any]) -> str:
    """docs/coverage.md."""
    rows, without = record["rows"], record["without_attention"]
    exact = [r for r in rows if r["status"] == "exact"]
    wrong = [r for r in rows if r["status"] == "wrong"]
    lines = [_cells(r) for r in rows]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    apart = ", ".join(f"{r['model_type']} ({r['class']})" for r in without) or "none"
    redrawn = "\n".join(f"- {r['model_type']}: {r['reason']}" for r in record["redrawn"]) or "None."
    n_refused = len(rows) - len(exact) - len(wrong)
    lead = (
        "For those who have a model that no [layout](layouts.md) names. Of"
        f" {len(rows)} such classes of Transformers, drawn by chance, **{len(exact)} are cut"
        f" exactly, {n_refused} are refused with the reason, {len(wrong)} are wrong.** For one of"
        " your own see [your own attention](custom-models.md)."
    )
    text = f"""<!-- Written by `python benchmarks/family_coverage.py`; do not edit. -->
# Coverage: model classes that no layout was written for

{len(rows)} classes with attention, drawn from the model types of Transformers that no [layout](layouts.md) names (seed
{record["seed"]}), each with random weights from its default configuration with every size shrunk. Exact means
that every softmax attention which the batch runs is a site, of a registered layout or of one that
`hp.propose_layouts` found (`detected_...`), and that |gated - pruned| in fp64, of outputs and gradients, stays below
1e-10 of the largest output for each head alone, for ragged masks and with two units kept. A refused class may have
sites too: then only some of its attentions are refused. The properties are those of [this list](refusals.md). *Not run*
counts sites that a layout takes but this batch does not run, such as a vision tower without an image: nothing is
claimed of them.

| model type | class | sites | not run | layouts | result | difference | reason |
| --- | --- | ---: | ---: | --- | --- | ---: | --- |
{chr(10).join(lines)}

Drawn too, but without softmax attention: {apart}.

Drawn again, because the shrunk default configuration could not be built or run by this script:

{redrawn}

Made with {versions}, in {record["seconds"]} s.
"""
    return shaped(lead, text)


def readme(records: Path) -> str:
    """What the README says of it."""
    rows = json.loads((records / "coverage.json").read_text())["rows"]
    counts = Counter(row["status"] for row in rows)
    exact, wrong = counts["exact"], counts["wrong"]
    return (
        f"Of [{len(rows)} random classes that no layout targets](docs/coverage.md), {exact} are cut"
        f" exactly, {len(rows) - exact - wrong} refused with the\nreason, and"
        f" {wrong or 'none'} cut wrongly."
    )


def _cells(row: dict[str, Any]) -> str:
    worst = "" if row["difference"] is None else f"{row['difference']:.1e}"
    reason = row["reason"].replace("|", "/").replace("\n", " ")
    layouts = ", ".join(row["layouts"])
    counts = str(row["sites"]), str(row["unreached"])
    cells = (row["model_type"], row["class"], *counts, layouts, row["status"], worst, reason)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
