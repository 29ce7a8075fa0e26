"""Which heads stay in a run: the recipe's selector and budget, with the measurements that these ask
for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from headprune import scoring, selection
from headprune.bench.latency import compare_latency, shaped_batch
from headprune.core.latency import LatencyTable
from headprune.core.plan import Budget, PruningPlan
from headprune.core.scores import HeadScores
from headprune.model.sites import bind
from headprune.recipes.validate import configured
from headprune.run.journal import LATENCY
from headprune.run.recovering import recoverer
from headprune.run.subject import Subject
from headprune.scoring._callables import loss_of, rescorer
from headprune.selection._api import select
from headprune.selection._base import Selector
from headprune.selection._task import check_possible
from headprune.selection.global_topk import GlobalTopk


def measure_table(subject: Subject) -> None:
    """Measures the latency table of a budget of speed, and refuses one that no choice of heads can
    meet."""
    table, folder = subject.latency, subject.journal.folder
    assert table is not None
    assert folder is not None
    table.save(folder / LATENCY)
    for line in (*str(table).split("\n")[:2], *table.notes):
        subject.journal.tell(line.strip())
    wanted = subject.recipe.select
    selector = configured(selection.registry, wanted.selector, wanted.settings)
    budgets = wanted.budgets or wanted.budget
    check_possible(subject.sites, selector, wanted.must_keep, wanted.must_remove, budgets, table)


def take_table(subject: Subject) -> None:
    """The latency table that an earlier run measured in this folder."""
    assert subject.journal.folder is not None
    vars(subject)["latency"] = LatencyTable.load(
        subject.journal.folder / LATENCY
    )  # in the place of the cached one


def choose_heads(
    subject: Subject,
    scores: HeadScores,
    baseline: bool = False,
    budget: Mapping[str, Budget] | None = None,
) -> PruningPlan:
    """The plan that the recipe's selector and budget make of scores.

    Args:
        subject: With the recipe.
        scores: Of any scorer.
        baseline: The scores are what the chosen ones are compared with. A selector that goes by
            more than scores would make up for bad ones, so ``global_topk`` takes its place for
            these.
        budget: Budgets in place of the recipe's.
    """
    wanted = subject.recipe.select
    selector: Selector = configured(selection.registry, wanted.selector, wanted.settings)
    if baseline and selector.needs:
        selector = GlobalTopk(min_heads=selector.min_heads, multiple_of=selector.multiple_of)
    return select(
        scores,
        budget or wanted.budgets or wanted.budget,
        selector,
        must_keep=wanted.must_keep,
        must_remove=wanted.must_remove,
        latency=subject.latency,
        **_asked(subject, selector, scores),
    )


def _asked(subject: Subject, selector: Selector, scores: HeadScores) -> Mapping[str, Any]:
    """What the selector asks of the model, on calibration rows."""
    if not selector.needs & {"loss", "rescore"}:
        return {}
    batches = subject.data.batches("calibration", subject.recipe.score.batch_size)
    options: dict[str, Any] = {"sites": subject.sites, "progress": False}
    options["after_cut"] = recoverer(subject, subject.recipe.select.recover)
    found: dict[str, Any] = {}
    if "loss" in selector.needs:
        found["loss"] = loss_of(subject.model, batches, **options)
    if "rescore" in selector.needs:
        scorer = configured(scoring.registry, scores.scorer, scores.settings)
        found["rescore"] = rescorer(subject.model, batches, scorer, **options)
    return found


def measure_speed(subject: Subject, pruned: nn.Module) -> None:
    """How fast the cut model is where the latency table was measured, beside what was asked for and
    predicted."""
    table = subject.latency
    if table is None:
        return
    predicted = table.whole / table.predict(
        {b.site.name: len(b.site.heads) for b in bind(pruned, subject.sites)}
    )
    row = compare_latency(
        subject.model,
        pruned,
        lambda batch, tokens: shaped_batch(subject.example, batch, tokens),
        [table.batch_size],
        [table.length],
        seconds=subject.recipe.select.latency.seconds,
        seed=subject.recipe.seed,
    )[0]
    wanted = subject.recipe.select
    asked = wanted.budget.amount if wanted.speedup is not None else None
    found = {
        "predicted": round(predicted, 4),
        "measured": round(row.ratio, 4),
        "low": row.low,
        "high": row.high,
    }
    at = {"batch_size": table.batch_size, "length": table.length, "rounds": row.rounds}
    subject.journal.note(metrics={"speedup": {"asked": asked, **found, **at}}, speed=(row,))
    text = f"speed at batch {table.batch_size} x {table.length}: predicted {predicted:.3f}x, "
    text += f"measured {row.ratio:.3f}x [{row.low:.3f}, {row.high:.3f}]"
    subject.journal.tell(text if asked is None else f"{text}, asked {asked:g}x")
    if asked is not None and row.high < asked:
        subject.journal.note(warnings=(f"{text}: slower than the {asked:g}x that was asked for.",))
