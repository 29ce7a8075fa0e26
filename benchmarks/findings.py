"""Three findings of the literature about heads, looked for on our models: what is cut, and what is
trained again.

    python benchmarks/findings.py --task trec --data path/to/trec --work runs/findings
    python benchmarks/findings.py --task digits --budgets 16 8 4 --work runs/findings
    python benchmarks/findings.py --figure      # docs/findings.md and .svg, from the records

A model is trained as its recipe says, and loses the heads that `taylor` finds least important, most
important, or heads drawn by chance: masked (Michel et al. 2019), and, for ``--budgets``, cut out of
the weights that the training began with and trained again as the whole was (Prasanna et al. 2020).
Whole models are trained as often, so that what a second training brings is not taken for what a
choice of heads brings. Learned gates (Voita et al. 2019) are measured by ``learned_gates.py``; the
page shows its records too.

A seed is another draw of calibration rows out of the training rows, and another order of batches.
Accuracy is that of test rows, which nothing is chosen on; every row of the record says which of
them were right, so that differences are paired. Rows are written as soon as they are there, and a
run that is started again goes on after the last one.

A verdict is that of an interval: what 95 % of the resamples (of draws, and of test rows within
them) say. Where they disagree it is undecided.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.data.datasets import Data, encode_rows, load_rows
from headprune.data.labels import number_labels
from headprune.data.models import build_model, prepare
from headprune.recipes.reading import locate
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import load_recipe
from headprune.run.surroundings import git_commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import learned_gates
import studies
from pages import publish
from scorers import encoder_recipe, tuned_
from studies import RECORDS, deviation, spread

PAGE, PICTURE = "findings.md", "findings.svg"
TITLES = {"trec": "MiniLM on TREC", "digits": "a small ViT on digits"}
CHOICES = ("important", "chance", "unimportant")
#: Shares of the heads that are masked, for the curve.
SHARES = tuple(tenth / 10 for tenth in range(1, 10))
#: Loss of accuracy that nobody would notice, and one that is still "nearly as good".
UNNOTICED, NEARLY = 0.01, 0.03
#: Heads that went at least, in theirs, before anybody noticed.
MICHEL = 0.2
#: Resamples behind an interval.
DRAWS = 2000


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = studies.parser(__doc__, "findings", TITLES, [36, 24, 14])
    args = parser.parse_args(argv)
    if not args.figure and (
        args.task is None or args.work is None or (args.task == "trec" and args.data is None)
    ):
        parser.error("--task, --work and, for TREC, --data must be given, or --figure")
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or writes the page; returns the path that was
    written."""
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
        print(*list(row.values())[:5], flush=True)
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
    """The record without rows; or the one that lies at ``out``, if it is of the same model, budgets
    and rows."""
    base = evaluate(model, rows)
    same: dict[str, Any] = {
        "benchmark": "findings",
        "task": args.task,
        "weights": studies.weights_of(model),
        "budgets": args.budgets,
        "calibration": args.calibration,
        "heads": sum(len(site.heads) for site in hp.find_sites(model)),
        "judged": {
            "rows": "test",
            "n": base.n_examples,
            "accuracy": base.value,
            "right": bits(base.amounts),
        },
    }
    return studies.begun(out, same, torch.device("cpu"), git_commit=git_commit())


def missing(
    args: argparse.Namespace, recipe: Recipe, record: dict[str, Any], model: nn.Module, untrained: Any, data: Data,
    rows: list[Any],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """What the record lacks: ``masked`` or ``trained`` accuracy of a choice of heads, one draw
    after the other."""
    done = {(row["way"], row["choice"], row["kept"], row["seed"]) for row in record["rows"]}
    heads, layers = record["heads"], len(hp.find_sites(model))
    curve = {heads - round(share * heads) for share in SHARES}
    curve = sorted(
        {*args.budgets, *(kept for kept in curve if kept >= layers)}, reverse=True
    )  # a head a layer stays
    for seed in range(args.seeds):
        wanted = [("trained", "all", heads)]
        wanted += [("masked", choice, kept) for choice in CHOICES for kept in curve]
        wanted += [("trained", choice, kept) for kept in args.budgets for choice in CHOICES]
        wanted = [one for one in wanted if (*one, seed) not in done]
        if not wanted:
            continue
        mine = data.redrawn(args.calibration, seed)
        scores = hp.score(model, mine.batches("calibration", 32), "taylor", progress=False)
        for way, choice, kept in wanted:
            plan = chosen(scores, choice, kept, seed, model)
            if way == "masked":
                with hp.gated(model, plan):
                    found = evaluate(model, rows)
            else:
                again = untrained()
                hp.prune_(again, plan)
                found = evaluate(tuned_(again, mine, recipe, seed), rows)
            row = {
                "way": way,
                "choice": choice,
                "kept": kept,
                "seed": seed,
                "accuracy": found.value,
            }
            yield {**row, **studies.stamp(), "right": bits(found.amounts)}


def chosen(
    scores: hp.HeadScores, choice: str, kept: int, seed: int, model: nn.Module
) -> hp.PruningPlan:
    """The plan that keeps so many heads: the best, the worst or any."""
    if choice == "chance":
        scores = hp.score(model, None, hp.scoring.Random(seed=seed))
    if choice == "unimportant":
        scores = replace(
            scores, values=tuple(tuple(-v for v in row) for row in scores.values), samples=None
        )
    return replace(hp.select(scores, hp.Budget(keep_heads=kept), "global_topk"), model=None)


def alone(model: nn.Module, rows: list[Any]) -> dict[str, int]:
    """How many heads change the loss, each removed alone: by more than an interval that holds for
    all of them at once with 95 %."""
    scores = hp.score(model, rows, "leave_one_out", progress=False)
    units = list(scores.units())
    wide = statistics.NormalDist().inv_cdf(1 - 0.025 / len(units))
    raises, lowers = (
        sum(sign * u.value > wide * (u.standard_error or 0.0) for u in units) for sign in (1, -1)
    )
    return {"heads": len(units), "raises": raises, "lowers": lowers}


def bits(amounts: Sequence[float]) -> str:
    """Which examples were right, a digit each."""
    return "".join(str(int(amount)) for amount in amounts)


# ----------------------------------------------------------------------------------------------
# page and figure


def draw(records: Path, docs: Path) -> Path:
    """Writes the page and its figure from every record there is."""
    found = studies.records_in(records, "findings")
    picture(found, docs / PICTURE)
    gates = (
        studies.records_in(records, "learned-gates")
        if list(records.glob("learned-gates-*.json"))
        else []
    )
    text = page(found, gates)
    return publish(docs / PAGE, lead(text), text)


def lead(text: str) -> str:
    """What was found, and for whom, from the verdicts of the page."""
    verdicts = Counter(re.findall(r"\*\*(Reproduced|Contradicted|Undecided)\.\*\*", text))
    words = ", ".join(f"{count} {word.lower()}" for word, count in sorted(verdicts.items()))
    return (
        "For those who have read that most heads are superfluous (Michel et al. 2019), that any heads will"
        " do after training (Prasanna et al. 2020), or that learned gates find the few that matter"
        " (Voita et al. 2019): the three findings, tried again on small models and small tasks."
        f" Verdicts: {words}."
    )


class Share(NamedTuple):
    """A difference of accuracies: its mean over draws, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def points(self) -> str:
        """In points."""
        mean, low, high = (100 * v for v in (self.mean, self.low, self.high))
        return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def verdict(holds: Sequence[bool], fails: Sequence[bool]) -> str:
    """Of a finding with several parts: it holds if all do for sure, and fails if one does for
    sure."""
    return f"**{'Reproduced' if all(holds) else 'Contradicted' if any(fails) else 'Undecided'}.**"


def answers(
    record: dict[str, Any], way: str, choice: str, kept: int
) -> dict[int, NDArray[np.float64]]:
    """Which examples were right, by seed."""
    rows = (r for r in record["rows"] if (r["way"], r["choice"], r["kept"]) == (way, choice, kept))
    return {r["seed"]: _digits(r["right"]) for r in rows}


def accuracies(record: dict[str, Any], way: str, choice: str, kept: int) -> list[float]:
    """One a seed."""
    return [float(right.mean()) for right in answers(record, way, choice, kept).values()]


def _digits(text: str) -> NDArray[np.float64]:
    return np.frombuffer(text.encode(), np.uint8).astype(np.float64) - ord("0")


def difference(pairs: Sequence[tuple[dict[int, Any], dict[int, Any]]]) -> Share:
    """Mean of ``a - b`` over pairs and over the draws that both have; resamples are of draws, and
    of examples."""
    seeds = sorted(set.intersection(*(set(d) for pair in pairs for d in pair)))
    gains = np.array([[a[seed] - b[seed] for seed in seeds] for a, b in pairs]).mean(
        0
    )  # [draws, examples]
    chance = np.random.default_rng(0)
    again = [
        gains[
            np.ix_(
                chance.integers(0, len(gains), len(gains)),
                chance.integers(0, gains.shape[1], gains.shape[1]),
            )
        ]
        for _ in range(DRAWS)
    ]
    low, high = np.percentile([g.mean() for g in again], (2.5, 97.5))
    return Share(float(gains.mean()), float(low), float(high))


def whole(record: dict[str, Any], like: dict[int, Any]) -> dict[int, NDArray[np.float64]]:
    """The answers of the whole model, for every draw of another."""
    return dict.fromkeys(like, _digits(record["judged"]["right"]))


def counts(record: dict[str, Any]) -> list[int]:
    """Heads kept on the curve, most first."""
    return sorted({row["kept"] for row in record["rows"] if row["way"] == "masked"}, reverse=True)


def losses(record: dict[str, Any], choice: str) -> dict[int, Share]:
    """Accuracy that masking loses, by heads kept, most first."""
    found = {kept: answers(record, "masked", choice, kept) for kept in counts(record)}
    return {kept: difference([(whole(record, right), right)]) for kept, right in found.items()}


def unnoticed(lost: dict[int, Share], heads: int, certain: bool) -> float:
    """The largest share of the heads that goes, with all smaller ones, and loses at most UNNOTICED:
    ``certain``, by the upper end of the interval, or at least possibly, by the lower one."""
    share = 0.0
    for kept, of_kept in lost.items():
        if (of_kept.high if certain else of_kept.low) > UNNOTICED:
            break
        share = 1 - kept / heads
    return share


def page(records: list[dict[str, Any]], gates: list[dict[str, Any]]) -> str:
    """Markdown; every number and every verdict is computed from the records."""
    lines = [
        "# Three findings of the literature, on our models",
        "",
        (
            "Written by `python benchmarks/findings.py --figure` from the records in"
            " `benchmarks/records`; do not edit."
        ),
        (
            "Accuracy on rows that nothing was chosen on, mean ± standard deviation over draws; in"
            " brackets are 95 %"
        ),
        (
            "intervals over draws and test rows, and a verdict is what the whole interval says. Our"
            " models are small, and"
        ),
        (
            "so are the tasks: a finding that holds here need not hold for yours; check with"
            " `headprune sweep`."
        ),
    ]
    for record in records:
        judged = record["judged"]
        lines += [
            "",
            (
                f"The model of `{record['task']}`: {TITLES[record['task']]}, {record['heads']}"
                f" heads, accuracy {judged['accuracy']:.3f} on {judged['n']} test rows."
            ),
        ]
    lines += ["", "## Many heads go unnoticed (Michel et al. 2019)", "", *michel(records)]
    lines += [
        "",
        "## Trained again, any heads will do (Prasanna et al. 2020)",
        "",
        *prasanna(records),
        *again(gates),
    ]
    if gates:
        lines += [
            "",
            "## Few heads do the work, and gates that learn find them (Voita et al. 2019)",
            "",
            *voita(gates),
        ]
    return "\n".join(lines) + "\n"


def michel(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        (
            "Theirs: 20 % (translation) to 40 % (BERT) of the heads are removed, least important"
            " first, with no noticeable loss, and"
        ),
        (
            "8 of 96 encoder heads change the score significantly when taken alone. Masked, nothing"
            " trained:"
        ),
        "",
        f"![accuracy by share of heads removed]({PICTURE})",
        "",
    ]
    for record in records:
        single, lost = record["alone"], losses(record, "important")
        certain, possible = (unnoticed(lost, record["heads"], each) for each in (True, False))
        chance = unnoticed(losses(record, "chance"), record["heads"], False)
        lines += [
            f"- `{record['task']}`: {100 * certain:.0f} % of the heads can be removed, least important"
            f" first, at a loss of at most {100 * UNNOTICED:g} point (95 % interval); beyond"
            f" {100 * possible:.0f} % the loss is larger. Random heads lose more beyond"
            f" {100 * chance:.0f} %. Alone, {single['raises']} of {single['heads']} heads raise the"
            f" loss when removed, {single['lowers']} lower it (95 % for all of them at once)."
            f" {verdict([certain >= MICHEL], [possible < MICHEL])}"
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
        every = ("trained", "all", record["heads"])
        for kept in record["budgets"]:
            found = [
                spread(accuracies(record, way, c, kept))
                for way in ("masked", "trained")
                for c in CHOICES
            ]
            cells = [*found, spread(accuracies(record, *every))]
            lines.append(f"| {record['task']} | {kept} | {' | '.join(cells)} |")
        masked, trained = (
            difference(
                [
                    (answers(record, way, "important", kept), answers(record, way, "chance", kept))
                    for kept in record["budgets"]
                ]
            )
            for way in ("masked", "trained")
        )
        short = difference(
            [
                (answers(record, *every), answers(record, "trained", "chance", kept))
                for kept in record["budgets"]
            ]
        )
        half = masked.mean / 2
        holds = [masked.low > 0, trained.high < half, short.high <= NEARLY]
        fails = [masked.high <= 0, trained.low > half, short.low > NEARLY]
        verdicts.append(
            f"- `{record['task']}`, mean over budgets: important heads are {masked.points()} points"
            f" from random ones when masked and {trained.points()} when trained again; random ones,"
            f" trained, lose {short.points()} points of the whole (nearly as good: at most"
            f" {100 * NEARLY:g}). {verdict(holds, fails)}"
        )
    return [*lines, "", *verdicts]


def again(gates: list[dict[str, Any]]) -> list[str]:
    """The same shape where a fine-tuned encoder is trained on, from the records of learned
    gates."""
    lines = []
    for record in gates:
        steps, full = (
            record["training"]["steps"],
            _methods(record).get((learned_gates.WHOLE, record["heads"]), []),
        )
        lines += [
            "",
            f"A fine-tuned encoder, `{record['task']}`, trained on for {steps} steps after the cut,"
            f" {record['judged']['n']} {record['judged']['rows']} rows;"
            f" whole, before: {record['judged']['accuracy']:.3f}"
            + (
                f"; whole, trained on: {spread([row['accuracy'] for row in full])}."
                if full
                else "."
            ),
            "",
            f"| heads by | kept of {record['heads']} | masked | trained on |",
            "| --- | ---: | ---: | ---: |",
        ]
        for (method, kept), rows in _methods(record).items():
            if method in learned_gates.ONE_SHOT:
                both = (spread([row[key] for row in rows]) for key in ("untrained", "accuracy"))
                lines.append(f"| `{method}` | {kept} | {' | '.join(both)} |")
    return lines


def _methods(record: dict[str, Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault((row["method"], row["kept"]), []).append(row)
    return found


def voita(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        (
            "Theirs: gates that learn to close leave 10 of 48 encoder heads of a translator, 0.15"
            " BLEU below it. Ours have"
        ),
        (
            "as many training steps as heads cut by a score and trained afterwards"
            f" ([{learned_gates.PAGE}]({learned_gates.PAGE})), and are compared with the whole"
            " model after as many; intervals are over draws."
        ),
        "",
    ]
    for record in records:
        methods = _methods(record)
        full = {
            row["seed"]: row["accuracy"]
            for row in methods.get((learned_gates.WHOLE, record["heads"]), [])
        }
        for (method, kept), rows in methods.items():
            pairs = [(full[row["seed"]], row["accuracy"]) for row in rows if row["seed"] in full]
            if method == learned_gates.WHOLE or len(pairs) < 2:
                continue
            lost = over_draws([a - b for a, b in pairs])
            said = ""
            if method in learned_gates.LEARNED:
                said = " " + verdict([lost.high <= UNNOTICED], [lost.low > UNNOTICED])
            lines.append(
                f"- `{record['task']}`, {kept} of {record['heads']} heads by `{method}`:"
                f" {lost.points()} points lost of the whole model's {spread(list(full.values()))}"
                f" on {record['judged']['rows']} rows.{said}"
            )
    return lines


def over_draws(values: Sequence[float]) -> Share:
    """Mean and Student's 95 % interval of a few draws."""
    return Share(*studies.by_student(values))


def picture(records: list[dict[str, Any]], path: Path) -> None:
    """A panel a task: accuracy of the masked model against the share of heads removed, a line a
    choice."""
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    figure = Figure(figsize=(4.6 * len(records), 3.6), layout="constrained")
    for panel, record in zip(
        figure.subplots(1, len(records), squeeze=False)[0], records, strict=True
    ):
        for choice, style in zip(CHOICES, ("-o", "--s", ":^"), strict=True):
            points = [
                (100 * (1 - k / record["heads"]), accuracies(record, "masked", choice, k))
                for k in counts(record)
            ]
            means, errors = ([f(v) for _, v in points] for f in (statistics.fmean, deviation))
            panel.errorbar(
                [x for x, _ in points],
                means,
                errors,
                fmt=style,
                label=choice,
                markersize=4,
                capsize=2,
            )
        panel.axhline(record["judged"]["accuracy"], color="0.6", linestyle="--", linewidth=1)
        panel.set_title(TITLES[record["task"]], fontsize=10)
        panel.set_xlabel("heads removed, %")
        panel.set_ylabel("accuracy on test rows")
        panel.grid(alpha=0.3)
        panel.legend(title="heads kept", fontsize=8, title_fontsize=8)
    studies.save_figure(figure, path)


if __name__ == "__main__":
    main()
