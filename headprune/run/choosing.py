"""The choice of heads in a run, with what selector and budget must measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from headprune import scoring
from headprune.bench.latency import compare_latency, shaped_batch
from headprune.bench.latency_tables import cut_copy
from headprune.choice.refitted import refitted_loss_of
from headprune.core.errors import InfeasibleBudget, reason_of
from headprune.core.ladders import PRICE_SETTINGS
from headprune.core.latency import SAVINGS_FACTOR, LatencyTable
from headprune.core.plan import Budget, PruningPlan
from headprune.core.record import SpeedRow
from headprune.core.scores import HeadScores
from headprune.model.sites import bind
from headprune.recipes.validate import configured
from headprune.run.journal import LATENCY
from headprune.run.recovering import recoverer
from headprune.run.subject import Subject, selector_of
from headprune.scoring._callables import loss_of, rescorer
from headprune.selection._api import select
from headprune.selection._base import Selector
from headprune.selection._task import check_possible
from headprune.selection.global_topk import GlobalTopk
from headprune.selection.knapsack import Knapsack

#: Seconds of measurement below which the latency table is not corrected.
_LEAST_SECONDS = 5.0
#: A table is corrected where a cut's speed differs from the prediction by more than this fraction.
_TOLERATED = 0.03
#: Savings are scaled at most so many times up or down.
_MOST_CORRECTED = 1.5
#: Cut copies that are timed at most before the cut.
MOST_COPIES = 3


def measure_table(subject: Subject) -> None:
    """Measure the latency table, and refuse a speedup that no choice of heads can reach."""
    table, folder = subject.latency, subject.journal.folder
    assert table is not None
    assert folder is not None
    table.save(folder / LATENCY)
    for line in (*str(table).split("\n")[:2], *table.notes):
        subject.journal.tell(line.strip())
    wanted = subject.recipe.select
    selector = selector_of(subject.recipe, subject.sites)
    budgets = wanted.budgets or wanted.budget
    check_possible(subject.sites, selector, wanted.must_keep, wanted.must_remove, budgets, table)


def load_table(subject: Subject) -> None:
    """Load the latency table that an earlier run measured in this folder."""
    assert subject.journal.folder is not None
    use_table(subject, LatencyTable.load(subject.journal.folder / LATENCY))


def use_table(subject: Subject, table: LatencyTable) -> None:
    """Take this latency table from now on."""
    vars(subject)["latency"] = table  # fills the cached property, which would measure again


def choose_by_measured_speed(subject: Subject, scores: HeadScores) -> PruningPlan:
    """Choose heads, time a cut copy, and choose again while its speed differs from the prediction.

    Sites cut together may save more or less than the latency table adds up to. Then all savings in
    the table are scaled by measured over predicted savings. Baselines use the scaled table, too.
    """
    plan = choose_heads(subject, scores)
    measured = subject.latency
    if measured is None or subject.recipe.select.latency.seconds < _LEAST_SECONDS:
        return plan
    table, factor = measured, 1.0  # those by which the plan was chosen
    for _ in range(MOST_COPIES):
        correction = _correction(subject, table, plan)
        if correction is None:
            break
        scaled = _within(factor * correction)
        if scaled == factor:  # the same table gives the same plan
            break
        text = f"The latency table's savings are scaled by {scaled:.2f}"
        subject.journal.tell(f"{text}, and the choice is made again.")
        # From the table as it was measured: scaled entries are cut off at 0.
        corrected = measured.with_savings(scaled)
        use_table(subject, corrected)
        before = plan
        try:
            plan = choose_heads(subject, scores)
        except InfeasibleBudget as error:
            use_table(subject, table)
            subject.journal.warn([f"The cut model may be slower than asked. {error}"])
            break
        table, factor = corrected, scaled
        if plan.mask == before.mask:
            break
    # The last choice is not timed here; `measure_speed` warns if the cut model is too slow.
    if factor != 1.0:
        # A run that goes on reads the factor from its record.
        subject.journal.note(metrics={SAVINGS_FACTOR: factor})
    return plan


def _within(factor: float) -> float:
    """The factor, or the nearest one by which savings may be scaled."""
    return round(min(max(factor, 1 / _MOST_CORRECTED), _MOST_CORRECTED), 4)


def _correction(subject: Subject, table: LatencyTable, plan: PruningPlan) -> float | None:
    """How many times as much a plan saves as the latency table predicts.

    None where the prediction is about right and the plan fast enough, or where the model cannot be
    copied.
    """
    journal = subject.journal
    # 1. Measure the plan.
    bound = bind(subject.model, subject.sites)
    keep = {b.site.name: plan.mask.kept(b.site.name) for b in bound}
    try:
        cut = cut_copy(subject.model, bound, keep, subject.model)
    except (RuntimeError, TypeError) as error:  # a model that cannot be copied
        journal.tell(f"The plan's speed is not measured before the cut: {reason_of(error)}")
        return None
    row = _compared_speed(subject, table, cut)
    # 2. Compare it with the prediction.
    predicted = table.speedup(plan.mask)
    if predicted <= 1 or _is_right(row, predicted, _asked(subject)):
        return None
    journal.tell(
        f"The plan was predicted to be {predicted:.2f} times as fast, and was measured to be"
        f" {row.ratio:.2f} times as fast."
    )
    # Fractions of the whole model's time that the cut saves.
    saved, predicted_saving = 1 - 1 / row.ratio, 1 - 1 / predicted
    return saved / predicted_saving


def _is_right(row: SpeedRow, predicted: float, asked: float | None) -> bool:
    """Whether a measured speed is about the predicted one, and may be as fast as was asked."""
    is_near = abs(row.ratio / predicted - 1) <= _TOLERATED or row.low <= predicted <= row.high
    return is_near and (asked is None or row.high >= asked)


def _asked(subject: Subject) -> float | None:
    """The speed that the whole model's budget asks for; None for other budgets."""
    wanted = subject.recipe.select
    return wanted.budget.amount if wanted.speedup is not None else None


def _compared_speed(subject: Subject, table: LatencyTable, cut: nn.Module) -> SpeedRow:
    """Time a cut model beside the whole one, on inputs of the table's shapes."""
    # Without a length, an encoder and its decoder have lengths of their own; the table names the
    # longer one.
    length = subject.recipe.select.latency.length

    def inputs(batch: int, _: int) -> dict[str, Any]:
        return shaped_batch(subject.example, batch, length)

    rows = compare_latency(
        subject.model,
        cut,
        inputs,
        [table.batch_size],
        [table.length],
        seconds=subject.recipe.select.latency.seconds,
        seed=subject.recipe.seed,
    )
    return rows[0]


def choose_heads(
    subject: Subject,
    scores: HeadScores,
    baseline: bool = False,
    budget: Mapping[str, Budget] | None = None,
) -> PruningPlan:
    """Make a plan from scores, by the recipe's selector and budget.

    Sums of scores do not say what a whole sub-layer is worth. So without measured prices each layer
    keeps a head or a neuron, where the budget allows.

    Args:
        subject: The run's model, data and recipe.
        scores: Scores of any scorer.
        baseline: Whether the scores are a baseline's, or those of a candidate of ``auto``. A
            selector that uses more than scores would make up for bad ones, so ``knapsack``
            replaces ``repriced``, and ``global_topk`` replaces any other such selector.
        budget: Budgets by site pattern, in place of the recipe's.
    """
    wanted = subject.recipe.select
    selector = selector_of(subject.recipe, scores.sites)
    if baseline and selector.needs:
        by_scores = Knapsack if isinstance(selector, Knapsack) else GlobalTopk
        selector = by_scores(min_heads=selector.min_heads, multiple_of=selector.multiple_of)
    chosen = partial(
        select,
        scores,
        budget or wanted.budgets or wanted.budget,
        must_keep=wanted.must_keep,
        must_remove=wanted.must_remove,
        latency=subject.latency,
        **_callables(subject, selector, scores),
    )
    is_default = wanted.settings.get("min_heads") is None
    if selector.min_heads == 0 and is_default and scores.ladders is None:
        try:
            return chosen(selector=replace(selector, min_heads=1))
        except InfeasibleBudget:
            pass
    return chosen(selector=selector)


def _callables(subject: Subject, selector: Selector, scores: HeadScores) -> Mapping[str, Any]:
    """The functions by which a selector measures losses or new scores, on calibration rows."""
    callables: dict[str, Any] = {}
    if not selector.needs & {"loss", "rescore"}:
        return callables
    batches = subject.data.of_like_length("calibration", subject.recipe.score.batch_size)
    recover = recoverer(subject, subject.recipe.select.recover)
    options: dict[str, Any] = {"sites": subject.sites, "progress": False}
    if "loss" in selector.needs and scores.ladders is not None and recover is None:
        # The settings by which the levels were priced; where `auto` chose, those of its choice.
        settings = scores.settings
        options |= {name: settings[name] for name in PRICE_SETTINGS if name in settings}
        return {"loss": refitted_loss_of(subject.model, batches, **options)}
    options["after_cut"] = recover
    if "loss" in selector.needs:
        callables["loss"] = loss_of(subject.model, batches, **options)
    if "rescore" in selector.needs:
        scorer = configured(scoring.registry, scores.scorer, scores.settings)
        callables["rescore"] = rescorer(subject.model, batches, scorer, **options)
    return callables


def measure_speed(subject: Subject, pruned: nn.Module) -> None:
    """Compare the cut model's speed with what was asked for and what the table predicted.

    Does nothing for a run without a latency table.
    """
    table = subject.latency
    if table is None:
        return

    # 1. Predict from the table, and measure at the batch size and length of the table.
    present = {bound.site.name: len(bound.site.heads) for bound in bind(pruned, subject.sites)}
    predicted = table.speedup(present)
    row = _compared_speed(subject, table, pruned)

    # 2. Note the figures.
    asked = _asked(subject)
    facts = {
        "asked": asked,
        "predicted": round(predicted, 4),
        "measured": round(row.ratio, 4),
        "low": row.low,
        "high": row.high,
        "batch_size": table.batch_size,
        "length": table.length,
        "rounds": row.rounds,
    }
    subject.journal.note(metrics={"speedup": facts}, speed=(row,))

    # 3. Print them, and warn where even the upper end of the interval is too slow.
    text = f"speed at batch {table.batch_size} x {table.length}: predicted {predicted:.3f}x, "
    text += f"measured {row.ratio:.3f}x [{row.low:.3f}, {row.high:.3f}]"
    if asked is None:
        subject.journal.tell(text)
        return
    subject.journal.tell(f"{text}, asked {asked:g}x")
    if row.high < asked:
        warning = f"{text}: slower than the {asked:g}x of the budget."
        subject.journal.warn([warning])
