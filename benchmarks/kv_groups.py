"""Perplexity of a small Llama that loses key/value groups: before, after the cut, refitted, and
trained some steps.

    python benchmarks/kv_groups.py --model path/to/stories260k
    python benchmarks/kv_groups.py --figure      # docs/kv-groups.md, from the record

The model's folder holds ``stories.jsonl``, tokenised text; the recipe ``llama-stories`` says how it
is read and split. Every seed is another draw of calibration rows for scores and least squares, and
another order of training rows. Perplexity is measured on the test rows, which neither sees; nothing
is chosen on them. The dense model gets the same training, so that what training alone brings is not
taken for recovery.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.data.datasets import Data, encode_rows, load_rows
from headprune.data.labels import number_labels
from headprune.data.models import build_model, prepare
from headprune.recipes.reading import locate
from headprune.recipes.validate import load_recipe
from headprune.run.surroundings import git_commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from pages import machine, publish
from studies import RECORDS, ROOT, spread

PAGE = "kv-groups.md"
NAME = "kv-groups-stories"
#: What is measured of a cut model, in this order.
WAYS = ("cut", "lstsq", "lstsq+ff", "trained", "lstsq+ff, trained")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder with the model and its stories.jsonl")
    parser.add_argument(
        "--keep", type=float, nargs="+", default=[0.75, 0.5], help="shares of the KV groups"
    )
    parser.add_argument("--scorers", nargs="+", default=["surgeon", "taylor", "random"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--out", type=Path, default=RECORDS / f"{NAME}.json")
    parser.add_argument("--figure", action="store_true", help="only write the page from the record")
    parser.add_argument(
        "--records", type=Path, default=RECORDS, help="with --figure: where the record is"
    )
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="with --figure: where to write"
    )
    args = parser.parse_args(argv)
    if not args.figure and args.model is None:
        parser.error("--model must be given, or --figure")
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or writes the page; returns the path that was
    written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    recipe = load_recipe(locate("llama-stories"), [f"model.path={args.model}", "device=cpu"])
    raw = number_labels(recipe, load_rows(recipe))
    data = encode_rows(recipe, raw, prepare(recipe))
    model = build_model(recipe, raw.labels).eval()
    record = begin(args, model, data)
    for seed in range(args.seeds):
        have = {(r["scorer"], r["keep"], r["way"]) for r in record["rows"] if r["seed"] == seed}
        for row in rows(args, model, data, seed, have):
            record["rows"].append(row)
            studies.keep(record, args.out)
            print(row["scorer"], row["keep"], row["way"], seed, row["perplexity"], flush=True)
    print(args.out)
    return Path(args.out)


def begin(args: argparse.Namespace, model: nn.Module, data: Data) -> dict[str, Any]:
    """The record without rows; or the one that lies at ``--out``, if it is of the same model and
    training."""
    same: dict[str, Any] = {
        "benchmark": "kv_groups",
        "model": args.model.name,
        "weights": studies.weights_of(model),
        "training": {"steps": args.steps, "rate": args.rate, "rows": len(data.examples["train"])},
        "groups": sum(len(site.units) for site in hp.find_sites(model)),
        "judged": len(data.examples["test"]),
        "base": perplexity(model, data),
    }
    return studies.begun(args.out, same, torch.device("cpu"), git_commit=git_commit())


def rows(
    args: argparse.Namespace,
    model: nn.Module,
    data: Data,
    seed: int,
    have: set[tuple[str, float, str]],
) -> Iterator[dict[str, Any]]:
    """What is missing of one draw."""
    batches = drawn(data, seed)

    def row(scorer: str, keep: float, way: str, small: nn.Module) -> dict[str, Any]:
        groups = [len(site.units) for site in hp.find_sites(small)]
        found = {
            "scorer": scorer,
            "keep": keep,
            "way": way,
            "seed": seed,
            "perplexity": perplexity(small, data),
        }
        return {**found, "groups": groups, **studies.stamp()}

    if ("dense", 1.0, "trained") not in have:
        yield row("dense", 1.0, "trained", trained(copy.deepcopy(model), data, args, seed))
    for name in args.scorers:
        if all((name, keep, way) in have for keep in args.keep for way in WAYS):
            continue
        how = hp.scoring.Random(seed=seed) if name == "random" else name
        scores = hp.score(model, batches, how, progress=False)
        for keep in args.keep:
            plan = hp.select(scores, hp.Budget(keep_kv=keep))
            for way in WAYS:
                if (name, keep, way) in have:
                    continue
                small = copy.deepcopy(model)
                hp.prune_(small, plan)
                if way.startswith("lstsq"):
                    lstsq = hp.recovery.Lstsq(ridge=0.3, feed_forward="ff" in way)
                    hp.recover_(small, batches, lstsq, model)
                if way.endswith("trained"):
                    trained(small, data, args, seed)
                yield row(name, keep, way, small)


def drawn(data: Data, seed: int) -> list[Any]:
    """Half of the calibration rows, another half for every seed."""
    some = data.examples["calibration"]
    chosen = random.Random(seed).sample(some, len(some) // 2)
    return [data.collate(chosen[i : i + 16]) for i in range(0, len(chosen), 16)]


def trained(model: nn.Module, data: Data, args: argparse.Namespace, seed: int) -> nn.Module:
    """Some steps on training rows, in an order of the seed's; the model itself."""
    data = data.redrawn(1, seed)
    tune = hp.recovery.Finetune(
        steps=args.steps, learning_rate=args.rate, warmup_ratio=0.1, seed=seed
    )
    hp.recover_(model, data.loader("train", 16), tune)
    return model


def perplexity(model: nn.Module, data: Data) -> float:
    return round(evaluate(model, data.evaluation("test", 16)).value, 4)


def draw(records: Path, docs: Path) -> Path:
    """Writes the page from the record."""
    (record, *_) = studies.records_in(records, "kv-groups")
    return publish(docs / PAGE, lead(record), page(record))


def lead(record: dict[str, Any]) -> str:
    """What was found, and for whom."""
    words = []
    for keep in sorted({r["keep"] for r in record["rows"] if r["scorer"] != "dense"}, reverse=True):
        for way in ("cut", "trained"):
            means = by_scorer(record, keep, way)
            chance = f" (random groups: {means['random']:.2f})" if "random" in means else ""
            words.append(f"{keep:.0%} kept, {way}: {min(means.values()):.2f}{chance}")
    return (
        "For those who cut a small language model with grouped queries, so that its cache shrinks:"
        f" it has few heads to spare. Perplexity of {record['base']:.2f} becomes, by the best"
        f" scorer, {'; '.join(words)}. Lower is better."
    )


def by_scorer(record: dict[str, Any], keep: float, way: str) -> dict[str, float]:
    """The mean perplexity that each scorer gave."""
    found: dict[str, list[float]] = {}
    for r in record["rows"]:
        if (r["keep"], r["way"]) == (keep, way) and r["scorer"] != "dense":
            found.setdefault(r["scorer"], []).append(r["perplexity"])
    return {name: statistics.fmean(values) for name, values in found.items()}


def page(record: dict[str, Any]) -> str:
    """Markdown; every number is computed from the record."""
    training = record["training"]
    dense = [r["perplexity"] for r in record["rows"] if r["scorer"] == "dense"]
    lines = [
        "# Key/value groups of a small Llama",
        "",
        (
            "Written by `python benchmarks/kv_groups.py --figure` from `benchmarks/records`; do not"
            " edit."
        ),
        "",
        machine(record),
        "",
        (
            f"Perplexity of `{record['model']}`, {record['groups']} key/value groups, on"
            f" {record['judged']} test stories;"
        ),
        (
            "mean ± standard deviation over draws (half of the calibration rows each, another order"
            " of training rows);"
        ),
        (
            "lower is better. The stories are of the text that the model was trained on: numbers"
            " are for comparison among"
        ),
        "each other.",
        "",
        f"The whole model: {record['base']:.3f}; after {training['steps']} more training steps on",
        f"{training['rows']} stories: {spread(dense)}.",
        "",
        "| scorer | groups kept | " + " | ".join(WAYS) + " |",
        "| --- | ---: |" + " ---: |" * len(WAYS),
    ]
    for scorer in dict.fromkeys(r["scorer"] for r in record["rows"] if r["scorer"] != "dense"):
        for keep in sorted(
            {r["keep"] for r in record["rows"] if r["scorer"] == scorer}, reverse=True
        ):
            some = [r for r in record["rows"] if (r["scorer"], r["keep"]) == (scorer, keep)]
            cells = [[r["perplexity"] for r in some if r["way"] == way] for way in WAYS]
            lines.append(
                f"| {scorer} | {keep:.0%} | "
                + " | ".join(spread(c) if c else "-" for c in cells)
                + " |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
