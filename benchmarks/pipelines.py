"""Quality of an encoder after scorer, selector and recovery, for every combination that is worth a
look.

    python benchmarks/pipelines.py --task sst2 --data path/to/sst2 --work runs/pipelines
    python benchmarks/pipelines.py --task trec --data path/to/trec --work runs/pipelines
    python benchmarks/pipelines.py --task stsb --data path/to/stsb --work runs/pipelines
    python benchmarks/pipelines.py --task sst2 ... --shares 0.6 0.42 0.25    # heads and neurons
    python benchmarks/pipelines.py --figure        # docs/pipelines.md and .svg, from the records

SST-2 and TREC are fine-tuned first; STS-B takes the sentence encoder as it is, and its quality is
Spearman's correlation of cosines with the grades. Every seed is another draw of calibration rows
out of the training rows; scores, searches and least squares see those alone. Nothing is trained
after the cut. Validation rows are there to choose a pipeline by, test rows only to report; the
record has both. With ``--shares``, heads and neurons share one budget of multiply-adds, in a record
of its own.

A row of the record is one pipeline with one draw and one budget, written as soon as it is there,
and a run that is started again goes on after the last one. What each row answered for every example
lies in ``--work``, for the paired comparisons of ``--references`` with ``--against``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

import headprune as hp
from headprune.core.files import atomic_path
from headprune.recipes.presets import PRESETS
from headprune.recipes.validate import configured as validated
from headprune.run.surroundings import git_commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from encoder_tasks import TITLES, Task, encoder_task
from pages import publish
from studies import RECORDS, deviation, now, spread

PAGE, PICTURE = "pipelines.md", "pipelines.svg"
#: What the authors' pipelines are compared with: the defaults of ``score``, ``select`` and
#: ``recover_``, and what the docs advise where few heads may stay.
REFERENCES = ("taylor/lstsq", "taylor-min0/lstsq+ff", "surgeon-min0/lstsq+ff")
REFERENCE_OF_SHARES = ("ladder/lstsq+ff",)
#: What a page begins with.
IN_SHORT = {
    "surgeon/lstsq+ff": "`surgeon` and a refit",
    "random-min0/lstsq+ff": "random heads and the same refit",
    "random/none": "random heads alone",
}
#: The same of heads and neurons, and the share of the multiply-adds that they keep there.
IN_SHORT_OF_SHARES = {
    "ladder/lstsq+ff": "`ladder`",
    "surgeon/lstsq+ff": "`surgeon`",
    "random/lstsq+ff": "random",
}
OF_LEAD = 0.42
#: What any choice of heads has to beat: with the refit, and without.
RANDOM = ("random-min0/lstsq+ff", "random/none")
#: What the figure shows.
PICTURED = (
    "taylor/none",
    *REFERENCES,
    "surgeon/lstsq+ff",
    *(f"{name}/{name}" for name in PRESETS),
    *RANDOM,
)
#: A search by measured loss looks at about this many of the 16 calibration batches, and measures so
#: many plans.
SEARCHED, MEASURED = 4, 160
#: Bootstrap resamples of examples behind an interval.
DRAWS = 2000


def recoveries(ridge: float | None = 0.3) -> dict[str, list[Any]]:
    """What is done after the cut, by a short name. All records of heads have this ridge."""

    def lstsq(**settings: Any) -> Any:
        return hp.recovery.Lstsq(precision="float32", ridge=ridge, **settings)

    return {
        "none": [],
        "mean_fold": [hp.recovery.MeanFold()],
        "head_rescale": [hp.recovery.HeadRescale()],
        "lstsq": [lstsq()],
        "lstsq+ff": [lstsq(feed_forward=True)],
        **{
            name: [configured(hp.recovery.registry, **step) for step in preset.recover]
            for name, preset in PRESETS.items()
        },
    }


def configured(registry: Any, settings: Any, **named: str) -> Any:
    """A part of a preset: ``{"scorer": name, "settings": {...}}``."""
    return validated(registry, *named.values(), dict(settings))


def scorer(name: str, seed: int) -> Any:
    """A scorer by the name that it has here."""
    if name in PRESETS:
        return configured(hp.scoring.registry, **PRESETS[name].score)
    return hp.scoring.Random(seed=seed) if name == "random" else hp.scoring.registry.get(name)()


#: Scorer, selector, and the recoveries that follow it; presets are their own.
PIPELINES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "surgeon": ("surgeon", "global_topk", ("none", "lstsq", "lstsq+ff")),
    "surgeon-min0": ("surgeon", "global_topk, min_heads=0", ("none", "lstsq", "lstsq+ff")),
    "taylor": ("taylor", "global_topk", ("none", "mean_fold", "head_rescale", "lstsq", "lstsq+ff")),
    "taylor-min0": ("taylor", "global_topk, min_heads=0", ("none", "lstsq", "lstsq+ff")),
    "fisher": ("fisher", "global_topk", ("none", "lstsq+ff")),
    "fisher-min0": ("fisher", "global_topk, min_heads=0", ("none", "lstsq+ff")),
    "obs": ("obs", "global_topk", ("none", "lstsq+ff")),
    "random": ("random", "global_topk", ("none", "lstsq+ff")),
    "random-min0": ("random", "global_topk, min_heads=0", ("none", "lstsq+ff")),
    "quadratic": ("fisher", "quadratic", ("none", "lstsq+ff")),
    "quadratic-min0": ("fisher", "quadratic, min_heads=0", ("none", "lstsq+ff")),
    "search": ("taylor", "local_search", ("none", "lstsq+ff")),
    "iterative": ("taylor", "iterative", ("none", "lstsq+ff")),
    "iterative-refit": ("taylor", "iterative-refit", ("lstsq+ff",)),
    **{name: (name, name, (name,)) for name in PRESETS},
}
#: The same for heads and neurons under one budget.
OF_SHARES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "ladder": ("ladder", "repriced", ("none", "lstsq+ff")),
    "ladder-once": ("ladder", "knapsack", ("lstsq+ff",)),
    "surgeon": ("surgeon", "global_topk", ("none", "lstsq+ff")),
    "surgeon-knapsack": ("surgeon", "knapsack", ("lstsq+ff",)),
    "fisher": ("fisher", "global_topk", ("lstsq+ff",)),
    "fisher-knapsack": ("fisher", "knapsack", ("lstsq+ff",)),
    "obs": ("obs", "global_topk", ("lstsq+ff",)),
    "fluctuation": ("fluctuation", "global_topk", ("lstsq+ff",)),
    "taylor": ("taylor", "global_topk", ("lstsq+ff",)),
    "wanda": ("wanda", "global_topk", ("lstsq+ff",)),
    "magnitude": ("magnitude", "global_topk", ("lstsq+ff",)),
    "random": ("random", "global_topk", ("none", "lstsq+ff")),
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = studies.parser(__doc__, "pipelines", TITLES, [36, 24, 14, 8])
    parser.add_argument("--pipelines", nargs="+", choices=sorted({*PIPELINES, *OF_SHARES}))
    parser.add_argument(
        "--shares", type=float, nargs="+", help="of the multiply-adds, for heads and neurons"
    )
    parser.add_argument(
        "--recoveries", nargs="+", choices=sorted(recoveries()), default=sorted(recoveries())
    )
    parser.add_argument(
        "--epochs", type=float, help="of fine-tuning; default 2 for SST-2, 1 for TREC"
    )
    parser.add_argument(
        "--judged", type=int, help="judge by the first so many rows only, to try the script"
    )
    parser.add_argument("--references", nargs="+", help="what is compared with --against")
    parser.add_argument("--against", nargs="+", help="the others")
    args = studies.parsed(parser, argv)
    args.budgets = args.shares or args.budgets
    args.offered = OF_SHARES if args.shares else PIPELINES
    args.pipelines = args.pipelines or list(args.offered)
    if unknown := set(args.pipelines) - args.offered.keys():
        parser.error(f"--pipelines: {', '.join(sorted(unknown))} is not for this kind of budget")
    presets = [f"{name}/{name}" for name in PRESETS]
    refitted = [f"{name}/lstsq+ff" for name in OF_SHARES if name != "ladder"]
    args.references = args.references or (REFERENCE_OF_SHARES if args.shares else REFERENCES)
    args.against = args.against or (refitted if args.shares else presets)
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or draws; returns the path that was written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    task = encoder_task(
        args.task, args.data, args.model, args.work, args.calibration, args.epochs, args.judged
    )
    suffix = "-shares" if args.shares else ""
    out: Path = args.out or RECORDS / f"pipelines-{args.task}{suffix}.json"
    record = begin(args, task, out)
    store = (
        args.work
        / f"answers-{args.task}{suffix}-{record['weights'][:12]}-{args.calibration}-{record['judged']['test']}"
    )
    for seed in range(args.seeds):
        batches = task.calibration(seed)
        for row, answers in rows(args, task, seed, batches, record["rows"], store):
            record["rows"].append(row)
            keep_answers(store, row, answers)
            studies.keep(record, out)
            print(
                title(row),
                f"kept {row['kept']} seed {seed}",
                row["validation"],
                row["test"],
                flush=True,
            )
    record["compared"] = compared(args, task, record["rows"], store)
    studies.keep(record, out)
    print(out)
    return out


def title(row: dict[str, Any]) -> str:
    return f"{row['pipeline']}/{row['recovery']}"


def rows(
    args: argparse.Namespace,
    task: Task,
    seed: int,
    batches: list[Any],
    done: list[dict[str, Any]],
    store: Path,
) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """What is missing of one draw, with its answers; a cut model is judged after every recovery of
    its pipeline."""
    have = {(title(r), r["kept"]) for r in done if r["seed"] == seed}
    sites = hp.find_sites(task.model, feed_forward=bool(args.shares))
    scored: dict[str, hp.HeadScores] = {}
    for name in args.pipelines:
        by, selector, after = args.offered[name]
        for kept in args.budgets:
            missing = [
                r for r in after if r in args.recoveries and (f"{name}/{r}", kept) not in have
            ]
            if not missing:
                continue
            if by not in scored:
                # The authors' mini-batches are drawn: of sentences of like length they would be
                # something else.
                seen = task.calibration(seed, by_length=False) if by in PRESETS else batches
                scored[by] = task.score(seen, scorer(by, seed), sites)
            start = perf_counter()
            if args.shares:
                plan = select_of_both(task, scored[by], kept, selector, batches, sites)
            else:
                plan = select(task, scored[by], kept, selector, batches)
            choosing = perf_counter() - start
            units = {row.site: list(row.kept) for row in plan.mask.rows}
            heads = {site.name: units[site.name] for site in sites if not site.is_feed_forward}
            neurons = {site.name: len(units[site.name]) for site in sites if site.is_feed_forward}
            for recovery in missing:
                row = {"pipeline": name, "recovery": recovery, "kept": kept, "seed": seed}
                same = next(
                    (
                        r
                        for r in done
                        if not neurons  # a row has their numbers alone
                        and (r["recovery"], r["seed"], r["heads"]) == (recovery, seed, heads)
                    ),
                    None,
                )
                if (
                    same is not None and (store / answers_name(same)).is_file()
                ):  # the same model, judged already
                    with np.load(store / answers_name(same)) as file:
                        yield {**same, **row, "as": title(same), "created": now()}, dict(file)
                    continue
                start = perf_counter()
                steps = recoveries(None)[recovery] if args.shares else recoveries()[recovery]
                model = recovered(task, plan, steps, batches, sites)
                seconds = {
                    "select": round(choosing, 2),
                    "recover": round(perf_counter() - start, 2),
                }
                answers = {split: task.answers(model, split) for split in task.judged}
                row |= {split: round(task.quality(a, split), 5) for split, a in answers.items()}
                row |= {"seconds": seconds, "heads": heads, **studies.stamp()}
                if neurons:
                    row["neurons"] = neurons
                yield row, answers


def select(
    task: Task, scores: hp.HeadScores, kept: int, selector: str, batches: list[Any]
) -> hp.PruningPlan:
    """The plan, with what its selector asks of the model, on the calibration rows."""
    budget = hp.Budget(keep_heads=kept)
    selector, _, rule = selector.partition(", ")
    if rule:  # a layer may lose its last head
        return hp.select(scores, budget, hp.selection.registry.get(selector)(min_heads=0))
    if selector in PRESETS:
        return hp.select(
            scores, budget, configured(hp.selection.registry, **PRESETS[selector].select)
        )
    if selector == "local_search":
        few = batches[:: len(batches) // SEARCHED or 1]
        rise = hp.scoring.loss_of(task.model, few, loss=task.loss, progress=False)
        return hp.select(scores, budget, hp.selection.LocalSearch(max_losses=MEASURED), loss=rise)
    more = {}
    if selector.startswith("iterative"):
        lstsq = hp.recovery.Lstsq(ridge=0.3)
        refit = (
            (lambda small: task.recover_(small, batches, lstsq))
            if selector.endswith("refit")
            else None
        )
        more["rescore"] = hp.scoring.rescorer(
            task.model, batches, scores.scorer, loss=task.loss, after_cut=refit, progress=False
        )
        selector = "iterative"
    return hp.select(scores, budget, selector, **more)


def select_of_both(
    task: Task,
    scores: hp.HeadScores,
    share: float,
    selector: str,
    batches: list[Any],
    sites: list[hp.AttentionSite],
) -> hp.PruningPlan:
    """The plan for heads and neurons that keep a share of the multiply-adds."""
    more = {}
    if selector == "repriced":
        more["loss"] = hp.scoring.refitted_loss_of(
            task.model, batches, loss=task.loss, sites=sites, progress=False
        )
    return hp.select(scores, hp.Budget(keep_macs=share), selector, **more)


def recovered(
    task: Task,
    plan: hp.PruningPlan,
    steps: list[Any],
    batches: list[Any],
    sites: list[hp.AttentionSite],
) -> nn.Module:
    """A copy that is cut and recovered."""
    model = copy.deepcopy(task.model)
    hp.prune_(model, plan, sites=sites)
    for method in steps:
        task.recover_(model, batches, method)
    return model


# ----------------------------------------------------------------------------------------------
# record


def begin(args: argparse.Namespace, task: Task, out: Path) -> dict[str, Any]:
    """The record without rows; or the one that lies at ``out``, if it is of the same model and
    rows."""
    answers = {split: task.answers(task.model, split) for split in task.judged}
    same: dict[str, Any] = {
        "benchmark": "pipelines",
        "task": args.task,
        "model": args.model,
        "weights": studies.weights_of(task.model),
        "calibration": args.calibration,
        "heads": sum(len(site.heads) for site in hp.find_sites(task.model)),
        **({"of": "multiply-adds"} if args.shares else {}),
        "judged": {split: len(found) for split, found in answers.items()},
        "base": {split: round(task.quality(found, split), 5) for split, found in answers.items()},
    }
    return studies.begun(out, same, torch.device("cpu"), git_commit=git_commit())


def answers_name(row: dict[str, Any]) -> str:
    return f"{title(row).replace('/', '.')}-{row['kept']}-{row['seed']}.npz"


def keep_answers(store: Path, row: dict[str, Any], answers: dict[str, np.ndarray]) -> None:
    store.mkdir(parents=True, exist_ok=True)
    with atomic_path(store / answers_name(row)) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **answers)


def compared(
    args: argparse.Namespace, task: Task, found: list[dict[str, Any]], store: Path
) -> list[dict[str, Any]]:
    """The others against each reference: difference of means over draws, with a paired bootstrap
    over examples."""
    by: dict[tuple[str, int], dict[int, dict[str, np.ndarray]]] = {}
    for row in found:
        if (
            title(row) in (*args.references, *args.against)
            and (store / answers_name(row)).is_file()
        ):
            with np.load(store / answers_name(row)) as kept:
                answers = dict(kept)
            for split, found_now in answers.items():
                if round(task.quality(found_now, split), 5) != row[split]:
                    raise SystemExit(
                        f"{store / answers_name(row)} holds other answers than those of the record."
                    )
            by.setdefault((title(row), row["kept"]), {})[row["seed"]] = answers
    result = []
    for reference in args.references:
        for (name, kept), draws in by.items():
            ours = by.get((reference, kept), {})
            seeds = sorted(draws.keys() & ours.keys())
            if name not in args.against or not seeds:
                continue
            line: dict[str, Any] = {
                "pipeline": name,
                "reference": reference,
                "kept": kept,
                "draws": len(seeds),
            }
            for split in task.judged:
                line[split] = interval(
                    task, split, [(draws[s][split], ours[s][split]) for s in seeds]
                )
            result.append(line)
    return result


def interval(
    task: Task, split: str, pairs: list[tuple[np.ndarray, np.ndarray]]
) -> dict[str, float]:
    """``difference`` of the metric, mean over draws, and its 95 % bootstrap interval over
    examples."""

    def difference(some: np.ndarray | None) -> float:
        return statistics.fmean(
            task.quality(a, split, some) - task.quality(b, split, some) for a, b in pairs
        )

    chance = np.random.default_rng(0)
    n = len(pairs[0][0])
    again = [difference(chance.integers(0, n, n)) for _ in range(DRAWS)]
    low, high = np.percentile(again, (2.5, 97.5))
    return {
        "difference": round(difference(None), 5),
        "low": round(float(low), 5),
        "high": round(float(high), 5),
    }


# ----------------------------------------------------------------------------------------------
# page and figure


def draw(records: Path, docs: Path) -> Path:
    """Writes the page with the tables and the figure, from every record there is."""
    found = studies.records_in(records, "pipelines")
    of_heads, _ = divided(found)
    if of_heads:
        picture(of_heads, docs / PICTURE)
    return publish(docs / PAGE, lead(found), page(found))


def of_shares(record: dict[str, Any]) -> bool:
    """Whether heads and neurons share one budget."""
    return "of" in record


def divided(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records of heads, and those of heads and neurons."""
    heads = [record for record in records if not of_shares(record)]
    return heads, [record for record in records if of_shares(record)]


def lead(records: list[dict[str, Any]]) -> str:
    """What was found, and for whom: on test rows."""
    words = ["For those who name scorer, selector and recovery themselves; nothing is trained."]
    heads, both = divided(records)
    if heads:
        words += ["A third of the heads kept:"]
        words += [in_short(record, IN_SHORT, record["heads"] // 3) for record in heads]
    if both:
        draws = {1: "one draw", 2: "up to two draws"}.get(_draws(both), "up to three draws")
        kept = f"{OF_LEAD:.0%} of the multiply-adds kept"
        words += [f"Heads and neurons, {kept}, all refitted, {draws}:"]
        words += [in_short(record, IN_SHORT_OF_SHARES, OF_LEAD) for record in both]
    return " ".join(words)


def _draws(records: list[dict[str, Any]]) -> int:
    """How many draws of calibration rows the records have in all."""
    return len({row["seed"] for record in records for row in record["rows"]})


def in_short(record: dict[str, Any], titles: dict[str, str], kept: float) -> str:
    """A sentence about one budget."""
    found = cells(record, "test")
    shown = [
        f"{title} {spread(found[name][kept])}"
        for name, title in titles.items()
        if kept in found.get(name, {})
    ]
    whole = f"{TITLES[record['task']]} {record['base']['test']:.3f} whole"
    return ", ".join([whole, *shown]) + "."


def cells(record: dict[str, Any], split: str) -> dict[str, dict[int, list[float]]]:
    """The metric by pipeline and budget, one number a draw; in the order of the pipelines."""
    table: dict[str, dict[int, list[float]]] = {}
    offered = OF_SHARES if of_shares(record) else PIPELINES
    names = [f"{name}/{r}" for name, (_, _, after) in offered.items() for r in after]
    for row in sorted(record["rows"], key=lambda row: (names.index(title(row)), row["seed"])):
        table.setdefault(title(row), {}).setdefault(row["kept"], []).append(row[split])
    return table


def page(records: list[dict[str, Any]]) -> str:
    """Markdown; every number is computed from the records."""
    heads, both = divided(records)
    ran = {row["pipeline"] for record in heads for row in record["rows"]}
    lines = [
        "# Scorer, selector and recovery together",
        "",
        (
            "Written by `python benchmarks/pipelines.py --figure` from the records in"
            " `benchmarks/records`; do not edit."
        ),
        "",
        (
            "Quality of an encoder without any training after the cut, mean ± standard deviation"
            " over draws of calibration"
        ),
        (
            "rows out of the training rows. `lstsq` is the default of `recover_`, here with"
            " `ridge=0.3`, and `surgeon` the advice for"
        ),
        (
            "classifiers, by their validation rows here; its ridge was chosen by validation rows,"
            " too, in tries without"
        ),
        "a record. `surgeon` is the default of `score`, too; that of a run is `auto`. See",
        "docs/regret.md. Test rows are only reported.",
        "",
        *(
            f"- `{name}`: scorer `{by}`, selector `{how}`"
            for name, (by, how, _) in PIPELINES.items()
            if name in ran
        ),
        "",
        (
            "With `min_heads=0` a layer may lose its last head; the default keeps one. Where eight"
            " of 72 heads are kept, most"
        ),
        (
            "are kept only by that rule: the sentence encoder, a mean over tokens, does better"
            " without it, but a"
        ),
        (
            "classifier that reads its first token can be cut off from all others by a last layer"
            " without heads."
        ),
        "",
        (
            "Compare choices of heads by rows with the same refit (what follows the slash). A refit"
            " makes up for much of a"
        ),
        "bad choice: what a scorer is worth is its distance from random heads with the same refit,",
        (
            "`random-min0/lstsq+ff`, not from `random/none`. The authors' pipelines have recoveries"
            " of their own."
        ),
        "",
        f"![quality by pipeline and heads kept]({PICTURE})",
    ]
    for record in heads:
        lines += tables(record, TITLES[record["task"]], f"All {record['heads']} heads")
    if both:
        lines += about_shares(both)
    for record in both:
        title = f"Heads and neurons, {TITLES[record['task']]}"
        lines += tables(record, title, "The whole model")
    return "\n".join(lines) + "\n"


def about_shares(records: list[dict[str, Any]]) -> list[str]:
    """How heads and neurons were chosen together."""
    draws = (
        "All rows are of one draw."
        if _draws(records) == 1
        else "Rows with a deviation are means of several draws, others are of one."
    )
    return [
        "",
        "## Heads and neurons together",
        "",
        "Heads and neurons share one budget of multiply-adds. `lstsq+ff` refits all projections on"
        " the calibration rows, each with a ridge by held-out error. Compare scorers by rows with"
        " that refit. Not every score means the same for a head and a bundle of neurons: the last"
        f" column shows what each keeps (first draw). {draws}",
        "",
        *(
            f"- `{name}`: scorer `{by}`, selector `{how}`"
            for name, (by, how, _) in OF_SHARES.items()
        ),
    ]


def tables(record: dict[str, Any], title: str, whole: str) -> list[str]:
    """The tables of one record, one per split."""
    lines = []
    budgets = sorted({row["kept"] for row in record["rows"]}, reverse=True)
    columns = [f"{amount(record, kept)} kept" for kept in budgets]
    if of_shares(record):
        columns.append(f"heads and neurons at {OF_LEAD:.0%}")
    for split, count in record["judged"].items():
        lines += [
            "",
            f"## {title}: {count} {split} rows",
            "",
            f"{whole}: {record['base'][split]:.3f}. {record['calibration']} calibration rows.",
            "",
            "| pipeline | " + " | ".join(columns) + " |",
            "| --- |" + " ---: |" * len(columns),
        ]
        for name, by_budget in cells(record, split).items():
            values = [spread(by_budget[kept]) if kept in by_budget else "-" for kept in budgets]
            if of_shares(record):
                values.append(units_kept(record, name))
            lines.append(f"| {name} | {' | '.join(values)} |")
    return lines + differences(record)


def units_kept(record: dict[str, Any], name: str) -> str:
    """How many heads and neurons a pipeline keeps in its first draw."""
    for row in record["rows"]:
        if (title(row), row["kept"]) == (name, OF_LEAD):
            heads = sum(map(len, row["heads"].values()))
            return f"{heads}, {sum(row['neurons'].values()):,}"
    return "-"


def amount(record: dict[str, Any], kept: float) -> str:
    """A budget as words have it."""
    return f"{kept:.0%}" if of_shares(record) else f"{kept}"


def differences(record: dict[str, Any]) -> list[str]:
    """The authors' pipelines against ours; of heads and neurons, the others against `ladder`."""
    some = record.get("compared", [])
    lines = []
    what = "Each against `ladder`" if of_shares(record) else "The authors' pipelines against ours"
    if some:
        several = _draws([record]) > 1
        lines = [
            "",
            (
                f"{what}{': mean over the same draws,' if several else ', in one draw,'} with the"
                " 95 % interval of a paired"
            ),
            (
                "bootstrap over examples. It says nothing about other draws of calibration rows"
                f"{'; the spread above does' if several else ''}."
            ),
            "",
            "| difference | kept | validation | test |",
            "| --- | ---: | ---: | ---: |",
        ]
    for line in some:
        words = [
            f"{w['difference']:+.3f} [{w['low']:+.3f}, {w['high']:+.3f}]"
            for w in (line["validation"], line["test"])
        ]
        lines.append(
            f"| {line['pipeline']} - {line['reference']} | {amount(record, line['kept'])} |"
            f" {words[0]} | {words[1]} |"
        )
    return lines


def picture(records: list[dict[str, Any]], path: Path) -> None:
    """A panel a task: quality on test rows against heads kept; the pipelines of ``PICTURED``, each
    with one look."""
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    figure = Figure(figsize=(4.6 * len(records), 4.6), layout="constrained")
    panels = figure.subplots(1, len(records), squeeze=False)[0]
    for panel, record in zip(panels, records, strict=True):
        found = cells(record, "test")
        for number, name in enumerate(PICTURED):
            by_budget = found.get(name, {})
            budgets = sorted(by_budget)
            means = [statistics.fmean(by_budget[kept]) for kept in budgets]
            errors = [deviation(by_budget[kept]) for kept in budgets]
            look = {
                "color": f"C{number}",
                "linestyle": ("-", "--", ":")[number % 3],
                "marker": "osd^v<>"[number % 7],
            }
            panel.errorbar(
                budgets, means, errors, label=name, markersize=4, linewidth=1.2, capsize=2, **look
            )
        panel.axhline(record["base"]["test"], color="0.6", linestyle="--", linewidth=1)
        panel.set_title(f"{TITLES[record['task']]} on test rows", fontsize=9)
        panel.set_xlabel(f"heads kept of {record['heads']}")
        panel.grid(alpha=0.3)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    studies.save_figure(figure, path)


if __name__ == "__main__":
    main()
