"""Three findings of the literature about heads, looked for on our models: what is cut, and what is trained again.

    python benchmarks/findings.py --task trec --data path/to/trec --work runs/findings
    python benchmarks/findings.py --task digits --budgets 16 8 4 --work runs/findings
    python benchmarks/findings.py --figure      # docs/findings.md and .svg, from the records

A model is trained as its recipe says, and loses the heads that `taylor` finds least important, most important, or
heads drawn by chance: masked (Michel et al. 2019), and, for ``--budgets``, cut out of the weights that the training
began with and trained again as the whole was (Prasanna et al. 2020). Whole models are trained as often, so that what a
second training brings is not taken for what a choice of heads brings. Learned gates (Voita et al. 2019) are measured by
``learned_gates.py``; the page shows its records too.

A seed is another draw of calibration rows out of the training rows, and another order of batches. Accuracy is that of
test rows, which nothing is chosen on. A row of the record is written as soon as it is there, and a run that is started
again goes on after the last one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.core.files import write_atomic
from headprune.run.data import Data, encode_rows, load_rows
from headprune.run.labels import number_labels
from headprune.run.models import build_model, prepare
from headprune.run.reading import locate
from headprune.run.recipe import Recipe
from headprune.run.surroundings import git_commit
from headprune.run.validate import load_recipe

sys.path.insert(0, str(Path(__file__).resolve().parent))
import learned_gates
import studies
from scorers import encoder_recipe, tuned_
from studies import RECORDS, now, spread

PAGE, PICTURE = "findings.md", "findings.svg"
TITLES = {"trec": "MiniLM on TREC", "digits": "a small ViT on digits"}
CHOICES = ("important", "chance", "unimportant")
#: Shares of the heads that are masked, for the curve.
SHARES = tuple(tenth / 10 for tenth in range(1, 10))
#: Points of accuracy that nobody would notice.
UNNOTICED = 0.01


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = studies.parser(__doc__, "findings", TITLES, [36, 24, 14])
    args = parser.parse_args(argv)
    if not args.figure and (args.task is None or args.work is None or (args.task == "trec" and args.data is None)):
        parser.error("--task, --work and, for TREC, --data must be given, or --figure")
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or writes the page; returns the path that was written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    recipe = recipe_of(args)
    raw = number_labels(recipe, load_rows(recipe))
    data = encode_rows(recipe, raw, prepare(recipe))

    def untrained() -> nn.Module:
        return build_model(recipe, raw.labels)

    model = tuned_(untrained(), data, recipe)
    rows = data.evaluation("test", 128)
    out: Path = args.out or RECORDS / f"findings-{args.task}.json"
    record = begin(args, model, rows, out)
    for row in missing(args, recipe, record, model, untrained, data, rows):
        record["rows"].append(row)
        studies.keep(record, out)
        print(*row.values(), flush=True)
    if "alone" not in record:
        record["alone"] = alone(model, rows)
        studies.keep(record, out)
    print(out)
    return out


def recipe_of(args: argparse.Namespace) -> Recipe:
    """What says how the task's model is made and trained."""
    if args.task == "trec":
        return encoder_recipe("text", args.model, args.data, 1)
    return load_recipe(locate("digits-vit"), ["device=cpu"])


def begin(args: argparse.Namespace, model: nn.Module, rows: list[Any], out: Path) -> dict[str, Any]:
    """The record without rows; or the one that lies at ``out``, if it is of the same model, budgets and rows."""
    base, mark = evaluate(model, rows), hp.score(model, None, "random").model
    assert mark is not None
    same: dict[str, Any] = {
        "benchmark": "findings",
        "task": args.task,
        "weights": mark.weights,
        "budgets": args.budgets,
        "calibration": args.calibration,
        "heads": sum(len(site.heads) for site in hp.find_sites(model)),
        "judged": {"rows": "test", "n": base.n_examples, "accuracy": base.value},
    }
    return studies.begun(out, same, torch.device("cpu"), git_commit=git_commit())


def missing(
    args: argparse.Namespace, recipe: Recipe, record: dict[str, Any], model: nn.Module, untrained: Any, data: Data,
    rows: list[Any],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """What the record lacks: ``masked`` or ``trained`` accuracy of a choice of heads, one draw after the other."""
    done = {(row["way"], row["choice"], row["kept"], row["seed"]) for row in record["rows"]}
    heads, layers = record["heads"], len(hp.find_sites(model))
    curve = {heads - round(share * heads) for share in SHARES}
    curve = sorted({*args.budgets, *(kept for kept in curve if kept >= layers)}, reverse=True)  # a head a layer stays
    for seed in range(args.seeds):
        mine = data.redrawn(args.calibration, seed)
        scores = hp.score(model, mine.batches("calibration", 32), "taylor", progress=False)
        wanted = [("trained", "all", heads)]
        wanted += [("masked", choice, kept) for choice in CHOICES for kept in curve]
        wanted += [("trained", choice, kept) for kept in args.budgets for choice in CHOICES]
        for way, choice, kept in wanted:
            if (way, choice, kept, seed) in done:
                continue
            plan = chosen(scores, choice, kept, seed, model)
            if way == "masked":
                with hp.gated(model, plan):
                    accuracy = evaluate(model, rows).value
            else:
                again = untrained()
                hp.prune_(again, plan)
                accuracy = evaluate(tuned_(again, mine, recipe, seed), rows).value
            yield {
                "way": way, "choice": choice, "kept": kept, "seed": seed, "accuracy": accuracy, "created": now()
            }  # fmt: skip


def chosen(scores: hp.HeadScores, choice: str, kept: int, seed: int, model: nn.Module) -> hp.PruningPlan:
    """The plan that keeps so many heads: the best, the worst or any."""
    if choice == "chance":
        scores = hp.score(model, None, hp.scoring.Random(seed=seed))
    if choice == "unimportant":
        scores = replace(scores, values=tuple(tuple(-v for v in row) for row in scores.values), samples=None)
    return replace(hp.select(scores, hp.Budget(keep_heads=kept), "global_topk"), model=None)


def alone(model: nn.Module, rows: list[Any]) -> dict[str, int]:
    """How many heads change the loss, each removed alone, by more than its 95 % interval."""
    scores = hp.score(model, rows, "leave_one_out", progress=False)
    assert scores.standard_errors is not None
    pairs = [
        (value, error)
        for values, errors in zip(scores.values, scores.standard_errors, strict=True)
        for value, error in zip(values, errors, strict=True)
    ]
    raises, lowers = (sum(sign * v > 1.96 * e for v, e in pairs) for sign in (1, -1))
    return {"heads": len(pairs), "raises": raises, "lowers": lowers}


# ---------------------------------------------------------------------------------------------- page and figure


def draw(records: Path, docs: Path) -> Path:
    """Writes the page and its figure from every record there is."""
    found = studies.records_in(records, "findings")
    picture(found, docs / PICTURE)
    gates = studies.records_in(records, "learned-gates") if list(records.glob("learned-gates-*.json")) else []
    return write_atomic(docs / PAGE, page(found, gates).encode())


def values(record: dict[str, Any], way: str, choice: str, kept: int) -> list[float]:
    """Accuracies, one a seed."""
    return [r["accuracy"] for r in record["rows"] if (r["way"], r["choice"], r["kept"]) == (way, choice, kept)]


def mean(record: dict[str, Any], way: str, choice: str, kept: int) -> float:
    return statistics.fmean(values(record, way, choice, kept))


def counts(record: dict[str, Any]) -> list[int]:
    """Heads kept on the curve, most first."""
    return sorted({row["kept"] for row in record["rows"] if row["way"] == "masked"}, reverse=True)


def unnoticed(record: dict[str, Any], choice: str) -> int:
    """The most heads that go, with all smaller cuts, while the mean accuracy falls by no more than UNNOTICED."""
    gone = 0
    for kept in counts(record):
        if record["judged"]["accuracy"] - mean(record, "masked", choice, kept) > UNNOTICED:
            break
        gone = record["heads"] - kept
    return gone


def page(records: list[dict[str, Any]], gates: list[dict[str, Any]]) -> str:
    """Markdown; every number and every verdict is computed from the records."""
    lines = [
        "# Three findings of the literature, on our models",
        "",
        "Written by `python benchmarks/findings.py --figure` from the records in `benchmarks/records`; do not edit.",
        "Accuracy on test rows that nothing was chosen on, mean ± standard deviation over draws. Our models are small,",
        "and so are the tasks: a finding that holds here need not hold for yours, and `headprune sweep` will tell.",
    ]
    for record in records:
        judged = record["judged"]
        lines += [
            "",
            f"The model of `{record['task']}`: {TITLES[record['task']]}, {record['heads']} heads, accuracy"
            f" {judged['accuracy']:.3f} on {judged['n']} test rows.",
        ]
    lines += ["", "## Many heads go unnoticed (Michel et al. 2019)", "", *michel(records)]
    lines += ["", "## Trained again, any heads will do (Prasanna et al. 2020)", "", *prasanna(records)]
    if gates:
        lines += ["", "## Few heads do the work, and gates that learn find them (Voita et al. 2019)", "", *voita(gates)]
    return "\n".join(lines) + "\n"


def michel(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Theirs: 20 % (translation) to 40 % (BERT) of the heads go, least important first, before anybody notices, and",
        "8 of 96 encoder heads change the score significantly when taken alone. Masked, nothing trained:",
        "",
        f"![accuracy by share of heads gone]({PICTURE})",
        "",
    ]
    for record in records:
        heads, single = record["heads"], record["alone"]
        most, chance = (unnoticed(record, choice) / heads for choice in ("important", "chance"))
        lines += [
            f"- `{record['task']}`: {100 * most:.0f} % of the heads go before {100 * UNNOTICED:g} point is lost, least"
            f" important first; {100 * chance:.0f} % by chance. Alone, {single['raises']} of {single['heads']} heads"
            f" raise the loss when taken by more than its 95 % interval, {single['lowers']} lower it."
            f" **{'Reproduced' if most >= 0.2 else 'Contradicted'}**"
            f"{'' if most >= 0.2 else ', less than 20 %'}"
            + ("." if most > chance else ", but importance brings no more than chance.")
        ]
    return lines


def prasanna(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Theirs: random heads are far worse than important ones when masked (on SST-2, 28 % kept, 73.9 against 85.5),",
        "and nearly as good when trained again (90.1 against 91.6, of 92.6). Ours are cut out of the weights that",
        "training began with, and trained as the whole was:",
        "",
        "| task | kept | masked: " + " | masked: ".join(CHOICES) + " | trained: " + " | trained: ".join(CHOICES)
        + " | trained: all |",
        "| --- | ---: |" + " ---: |" * 7,
    ]  # fmt: skip
    verdicts = []
    for record in records:
        whole = values(record, "trained", "all", record["heads"])
        for kept in record["budgets"]:
            found = [spread(values(record, way, c, kept)) for way in ("masked", "trained") for c in CHOICES]
            lines.append(f"| {record['task']} | {kept} | {' | '.join(found)} | {spread(whole)} |")
        gaps = {
            way: statistics.fmean(
                mean(record, way, "important", kept) - mean(record, way, "chance", kept) for kept in record["budgets"]
            )
            for way in ("masked", "trained")
        }
        short = statistics.fmean(whole) - statistics.fmean(
            mean(record, "trained", "chance", kept) for kept in record["budgets"]
        )
        holds = gaps["masked"] > 0 and abs(gaps["trained"]) < gaps["masked"] / 2
        verdicts.append(
            f"- `{record['task']}`: important heads are {100 * gaps['masked']:+.1f} points from random ones when masked"
            f" and {100 * gaps['trained']:+.1f} when trained again (mean over budgets); random ones, trained, end"
            f" {100 * short:.1f} points below the whole. **{'Reproduced' if holds else 'Contradicted'}.**"
        )
    return [*lines, "", *verdicts]


def voita(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Theirs: gates that learn to close leave 10 of 48 encoder heads of a translator, 0.15 BLEU below it. Ours have",
        f"as many training steps as heads cut by a score and trained afterwards ([{learned_gates.PAGE}]"
        f"({learned_gates.PAGE})):",
        "",
    ]
    for record in records:
        for kept in record["budgets"]:
            best = {}
            for ways in (learned_gates.LEARNED, learned_gates.ONE_SHOT):
                by = {
                    way: [r["accuracy"] for r in record["rows"] if (r["method"], r["kept"]) == (way, kept)]
                    for way in ways
                }
                best[ways] = max((statistics.fmean(v), way) for way, v in by.items() if v)
            (learned, gate), (scored, score) = best.values()
            before = record["judged"]["accuracy"]
            verdict = "Reproduced" if before - learned <= UNNOTICED else "Contradicted at this budget"
            lines.append(
                f"- `{record['task']}`, {kept} of {record['heads']} heads kept: `{gate}` ends at {learned:.3f}, and the"
                f" model that both began with had {before:.3f}. **{verdict}.** `{score}` at equal steps: {scored:.3f}."
            )
    return lines


def picture(records: list[dict[str, Any]], path: Path) -> None:
    """A panel a task: accuracy of the masked model against the share of heads gone, a line a choice."""
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    figure = Figure(figsize=(4.6 * len(records), 3.6), layout="constrained")
    for panel, record in zip(figure.subplots(1, len(records), squeeze=False)[0], records, strict=True):
        for choice, style in zip(CHOICES, ("-o", "--s", ":^"), strict=True):
            points = [(100 * (1 - k / record["heads"]), values(record, "masked", choice, k)) for k in counts(record)]
            means, errors = ([f(v) for _, v in points] for f in (statistics.fmean, _deviation))
            panel.errorbar([x for x, _ in points], means, errors, fmt=style, label=choice, markersize=4, capsize=2)
        panel.axhline(record["judged"]["accuracy"], color="0.6", linestyle="--", linewidth=1)
        panel.set_title(TITLES[record["task"]], fontsize=10)
        panel.set_xlabel("heads gone, %")
        panel.set_ylabel("accuracy on test rows")
        panel.grid(alpha=0.3)
        panel.legend(title="heads that stay", fontsize=8, title_fontsize=8)
    studies.save_figure(figure, path)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
