"""Accuracy of an encoder whose heads were chosen by every scorer, at several budgets, without any
retraining.

    python benchmarks/scorers.py --task sst2 --data path/to/sst2 --work runs/scorers
    python benchmarks/scorers.py --task trec --data path/to/trec --work runs/scorers
    python benchmarks/scorers.py --figure            # docs/scorers-accuracy.md and .svg, from the
    records

Fine-tunes MiniLM (or ``--model``) for one epoch, scores its heads on training rows, gates all but
the best, and measures accuracy on rows that neither training nor scoring has seen. Every seed is
another draw of calibration rows. Nothing is chosen on the judged rows: SST-2 is judged on its
validation rows, which one epoch of training does not look at, TREC on its test rows.

A row of the record is one scorer with one draw and the seconds of its scoring; each is written as
soon as it is there, and a run that is started again goes on after the last one. Both tasks take
about 40 minutes on 2 CPU cores, without the learned gates, whose 200 steps of 32 examples a draw
come on top.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.core.errors import HeadPruneError
from headprune.data.datasets import Data, encode_rows, load_rows
from headprune.data.labels import number_labels
from headprune.data.models import build_model, prepare, resolve_device
from headprune.recipes.reading import locate
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import load_recipe

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from determinism import reproducible
from pages import publish
from studies import RECORDS, spread

PAGE, PICTURE = "scorers-accuracy.md", "scorers-accuracy.svg"
#: Task: its text column, and the rows that judge.
TASKS = {"sst2": ("sentence", "validation"), "trec": ("text", "test")}
TITLES = {"sst2": "SST-2", "trec": "TREC"}
#: Scorers that cost many passes, and on how many of the calibration rows they are run.
FEW = {
    "add_one_in": 64,
    "attattr": 32,
    "integrated_gradients": 128,
    "leave_one_out": 128,
    "shapley": 32,
}
#: Scorers without data: the draws of ``random`` are its seeds, ``magnitude`` has one row.
DRAWS = {"random": 10, "magnitude": 1}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = studies.parser(__doc__, "scorers", TASKS, [54, 36, 24, 14])
    studies.add_device(parser)
    parser.add_argument("--epochs", type=float, default=1.0)
    names = sorted(
        hp.scoring.registry.names(), key=lambda name: name in FEW
    )  # the cheap ones first
    parser.add_argument("--scorers", nargs="+", default=names, help="default: all registered")
    parser.add_argument(
        "--few", type=float, default=1.0, help="factor on the rows of scorers that cost many passes"
    )
    return studies.parsed(parser, argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or draws; returns the path that was written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    model, data, rows = prepared(args)
    out: Path = args.out or RECORDS / f"scorers-{args.task}.json"
    record = begin(args, model, data, rows, out)
    known: dict[Any, float] = {}  # plans that come up again
    for name in args.scorers:
        for seed in range(DRAWS.get(name, args.seeds)):
            if any(
                (row["scorer"], row["seed"]) == (name, seed) and "accuracy" in row
                for row in record["rows"]
            ):
                continue
            row = measured(model, data, rows, name, seed, args, known)
            record["rows"] = [
                r for r in record["rows"] if (r["scorer"], r["seed"]) != (name, seed)
            ] + [row]
            studies.keep(record, out)
            print(
                f"{name:22} {seed:2} {row['seconds']:7.1f} s "
                f" {row.get('accuracy', row.get('refused'))}",
                flush=True,
            )
    print(out)
    return out


def prepared(args: argparse.Namespace) -> tuple[nn.Module, Data, list[Any]]:
    """The fine-tuned model, its data, and the batches that judge."""
    column, judged = TASKS[args.task]
    model, data = fine_tuned(
        encoder_recipe(column, args.model, args.data, args.epochs, args.device), args.work
    )
    return model, data, data.evaluation(judged, 128)


def encoder_recipe(
    column: str, model: str, data: Path, epochs: float, device: str = "cpu"
) -> Recipe:
    """The recipe of fine-tuning an encoder on a column of text; in fp32, also where the weights
    travelled in fp16."""
    settings = [
        f"data.text={column}",
        f"model.path={model}",
        f"data.path={data}",
        "model.dtype=float32",
    ]
    return load_recipe(
        locate("trec-minilm"), [*settings, f"device={device}", f"train.epochs={epochs}"]
    )


def fine_tuned(recipe: Recipe, work: Path) -> tuple[nn.Module, Data]:
    """The model after training, from the folder where an equal run left it, or as it comes where its
    recipe trains nothing; and the data."""
    raw = number_labels(recipe, load_rows(recipe))
    data = encode_rows(recipe, raw, prepare(recipe))
    model, train = build_model(recipe, raw.labels), recipe.train
    device = resolve_device(recipe.device)
    if train is None:
        return model.to(device).eval(), data
    mark = hp.score(model, None, "random").model  # the same weights before training
    given = [train.model_dump(), recipe.seed, repr(mark), data.examples["train"]]
    text = json.dumps(
        given, sort_keys=True, default=lambda rows: rows.tolist()
    )  # of images: tensors
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = work / f"fine-tuned-{digest}"
    if not folder.is_dir():
        with reproducible(
            device
        ):  # so that the next machine trains the same weights, and goes on with the record
            tuned_(model.to(device), data, recipe)
        unfinished = work / f".unfinished-{digest}"
        shutil.rmtree(unfinished, ignore_errors=True)
        hp.save_pretrained(model, unfinished)
        unfinished.rename(folder)
    return hp.from_pretrained(folder).to(device).eval(), data


def tuned_(model: nn.Module, data: Data, recipe: Recipe, seed: int | None = None) -> nn.Module:
    """The same model, trained as the recipe says, with its seed or another."""
    train = recipe.train
    assert train is not None
    settings = train.model_dump(exclude={"batch_size"})
    tune = hp.recovery.Finetune(**settings, seed=recipe.seed if seed is None else seed)
    hp.recover_(model, data.loader("train", train.batch_size), tune)
    return model.eval()


def begin(
    args: argparse.Namespace,
    model: nn.Module,
    data: Data,
    rows: list[Any],
    out: Path,
    benchmark: str = "scorers",
) -> dict[str, Any]:
    """The record without rows; or the one that lies at ``out``, if it is of the same model, budgets
    and rows."""
    base = evaluate(model, rows)
    same: dict[str, Any] = {
        "benchmark": benchmark,
        "task": args.task,
        "model": args.model,
        "epochs": args.epochs,
        "weights": studies.weights_of(model),
        "budgets": args.budgets,
        "heads": sum(len(site.heads) for site in hp.find_sites(model)),
        "judged": {"rows": TASKS[args.task][1], "n": base.n_examples, "accuracy": base.value},
        "training_rows": len(data.examples["train"]),
    }
    return studies.begun(out, same, next(model.parameters()).device)


def measured(
    model: nn.Module,
    data: Data,
    rows: list[Any],
    name: str,
    seed: int,
    args: argparse.Namespace,
    known: dict[Any, Any],
) -> dict[str, Any]:
    """One scorer with one draw: accuracy by heads kept, or why the scorer refuses this model."""
    count = min(
        args.calibration, max(2, round(args.few * FEW[name])) if name in FEW else args.calibration
    )
    scorer, start = configured(name, seed), perf_counter()
    row: dict[str, Any] = {"scorer": name, "seed": seed, "settings": dict(scorer.settings)}
    try:
        scores = hp.score(model, drawn(data, args.calibration, count, seed), scorer, progress=False)
        row |= {
            "examples": scores.n_examples,
            "seconds": perf_counter() - start,
            "notes": list(scores.notes),
        }
        row["accuracy"] = {}
        for kept in args.budgets:
            plan = hp.select(scores, hp.Budget(keep_heads=kept), "global_topk")
            if plan.mask not in known:
                with hp.gated(model, plan):
                    known[plan.mask] = evaluate(model, rows).value
            row["accuracy"][str(kept)] = known[plan.mask]
    except HeadPruneError as error:
        row |= {"seconds": perf_counter() - start, "refused": str(error)}
    return {**row, **studies.stamp()}


def configured(name: str, seed: int) -> Any:
    """A scorer with the settings of this benchmark."""
    settings: dict[str, dict[str, Any]] = {
        "attribution_patching": {"base": "mean"},  # with base zero it is signed taylor
        "hard_concrete": {"seed": seed},
        "random": {"seed": seed},
        "subset_topk": {"seed": seed},
        "shapley": {"seed": seed, "orders": 4},
    }
    return hp.scoring.registry.get(name)(**settings.get(name, {}))


def drawn(data: Data, calibration: int, count: int, seed: int, by_length: bool = True) -> list[Any]:
    """Batches of the first ``count`` of a draw of training rows; examples of like length together,
    or as drawn."""
    train = data.examples["train"]
    order = random.Random(seed).sample(range(len(train)), min(calibration, len(train)))
    some = [train[i] for i in order[:count]]
    if by_length:
        some.sort(key=lambda example: len(example["input_ids"]))
    return [data.collate(some[i : i + 32]) for i in range(0, len(some), 32)]


# ----------------------------------------------------------------------------------------------
# page and figure


def draw(records: Path, docs: Path) -> Path:
    """Writes the page with the tables and the figure, from every record there is."""
    found = studies.records_in(records, "scorers")
    picture([(record, table(record)) for record in found], docs / PICTURE)
    return publish(docs / PAGE, lead(found), page(found))


def lead(records: list[dict[str, Any]]) -> str:
    """What was found, and for whom."""
    words = []
    for record in records:
        names = list(table(record))
        best = ", ".join(f"`{name}`" for name in names[:3])
        chance = ""
        if "random" in names:
            chance = f", random heads are number {names.index('random') + 1}"
        task = TITLES[record["task"]].partition(",")[0]
        words.append(f"{task}: {best}{chance} of {len(names)}")
    return (
        "For those who name a scorer in place of [`auto`](how-to.md#which-scorer): which one keeps"
        " the right heads of a fine-tuned encoder, if nothing is refitted or trained after the cut?"
        f" The best three, by their mean over all sizes. {'; '.join(words)}."
    )


def table(record: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Accuracies by scorer and budget, one a draw; the best scorer, by its mean over budgets,
    first."""
    cells: dict[str, dict[str, list[float]]] = {}
    for row in record["rows"]:
        for kept, accuracy in row.get("accuracy", {}).items():
            cells.setdefault(row["scorer"], {}).setdefault(kept, []).append(accuracy)
    return dict(
        sorted(
            cells.items(),
            key=lambda item: -statistics.fmean(map(statistics.fmean, item[1].values())),
        )
    )


def page(records: list[dict[str, Any]]) -> str:
    """Markdown; every number is computed from the records."""
    lines = [
        "# Which scorer keeps the right heads",
        "",
        (
            "Written by `python benchmarks/scorers.py --figure` from the records in"
            " `benchmarks/records`; do not edit."
        ),
        "",
        (
            "Accuracy with nothing trained or refitted after the cut, mean ± standard deviation"
            " over draws of calibration"
        ),
        (
            "rows. The heads with the highest scores of the whole model are kept (`global_topk`)."
            " Scorers of many passes read"
        ),
        (
            "fewer examples; their settings are in the records. Differences below the standard"
            " error of the judged rows"
        ),
        (
            "say little. A refit makes up for much of a bad choice: [with it](pipelines.md) random"
            " heads do far better."
        ),
        "",
        f"![accuracy by scorer and heads kept]({PICTURE})",
    ]
    for record in records:
        judged = record["judged"]
        error = (judged["accuracy"] * (1 - judged["accuracy"]) / judged["n"]) ** 0.5
        lines += [
            "",
            f"## {TITLES[record['task']]}",
            "",
            (
                f"{record['epochs']:g} epoch of fine-tuning on {record['training_rows']} rows;"
                f" judged on {judged['n']} {judged['rows']} rows; accuracy of the whole model, with"
                f" {record['heads']} heads, {judged['accuracy']:.3f} ± {error:.3f} (standard error"
                " of that many rows)."
            ),
            "",
            "| scorer | examples | draws | "
            + " | ".join(f"{kept} kept" for kept in record["budgets"])
            + " |",
            "| --- | ---: | ---: |" + " ---: |" * len(record["budgets"]),
        ]
        for name, cells in table(record).items():
            rows = [row for row in record["rows"] if row["scorer"] == name and "accuracy" in row]
            values = " | ".join(spread(cells[str(kept)]) for kept in record["budgets"])
            lines.append(f"| `{name}` | {rows[0]['examples'] or '-'} | {len(rows)} | {values} |")
        refused = {row["scorer"]: row["refused"] for row in record["rows"] if "refused" in row}
        lines += (
            ["", *(f"`{name}` refused: {words}" for name, words in refused.items())]
            if refused
            else []
        )
    return "\n".join(lines) + "\n"


def picture(
    tables: list[tuple[dict[str, Any], dict[str, dict[str, list[float]]]]], path: Path
) -> None:
    """A row of panels a task, a panel a budget, a line a scorer: its draws and their mean, beside
    the whole model."""
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    widest = max(len(record["budgets"]) for record, _ in tables)
    heights = [1.2 + 0.22 * len(cells) for _, cells in tables]
    figure = Figure(figsize=(2.2 + 2.2 * widest, sum(heights)), layout="constrained")
    grid = figure.subplots(len(tables), widest, squeeze=False, height_ratios=heights)
    for (record, cells), panels in zip(tables, grid, strict=True):
        for panel, kept in zip(panels, record["budgets"], strict=False):
            panel.axvline(record["judged"]["accuracy"], color="0.6", linestyle="--", linewidth=1)
            lines = [by_budget[str(kept)] for by_budget in cells.values()]
            draws = [(value, y) for y, values in enumerate(lines) for value in values]
            means = list(map(statistics.fmean, lines))
            panel.plot(*zip(*draws, strict=True), ".", color="#9ecae1")
            panel.plot(
                means, range(len(means)), "|", color="#08306b", markersize=9, markeredgewidth=2
            )
            panel.set_title(
                f"{TITLES[record['task']]}, {kept} of {record['heads']} heads", fontsize=9
            )
            panel.set_ylim(len(cells) - 0.5, -0.5)
            panel.set_yticks(
                range(len(cells)),
                list(cells) if panel is panels[0] else [""] * len(cells),
                fontsize=8,
            )
            panel.tick_params(axis="x", labelsize=8)
            panel.grid(alpha=0.3)
        for panel in panels[len(record["budgets"]) :]:
            panel.set_visible(False)
    figure.supxlabel(
        "accuracy without retraining: draws (dots), mean (bar), whole model (dashed)", fontsize=9
    )
    studies.save_figure(figure, path)


if __name__ == "__main__":
    main()
