"""The stages of a run: score, compare, cut, recover, measure and save."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from headprune import recovery, scoring, selection
from headprune.bench.answers import Question
from headprune.bench.decoding import DecodingRow, compare_decoding
from headprune.bench.latency import compare_latency, shaped_batch
from headprune.bench.quality import Quality
from headprune.bench.size import sizes
from headprune.checkpoints.checkpoint import from_pretrained, save_pretrained
from headprune.core.changed import ChangedAnswers
from headprune.core.errors import UnsupportedModel
from headprune.core.heads import HeadCounts
from headprune.core.plan import PruningPlan
from headprune.core.record import QualityRow
from headprune.core.scores import HeadScores
from headprune.data.labels import names_by_number
from headprune.gating.context import gated
from headprune.model.cut import cut_
from headprune.model.processes import Processes
from headprune.model.running import device_of
from headprune.model.sites import bind
from headprune.recipes.schema import BenchSection, Recipe, RecoverStep
from headprune.recipes.validate import configured
from headprune.report.quality import RECOVERED_RANDOM
from headprune.report.verdict import at_chance
from headprune.run.auto import scorer_of
from headprune.run.changes import JudgedRows
from headprune.run.choosing import choose_heads
from headprune.run.gradual import prune_gradually_
from headprune.run.journal import MODEL, WORK
from headprune.run.judging import class_rows, compared
from headprune.run.progress import Progress
from headprune.run.proofs import generation_proof, reload_proof
from headprune.run.recovering import recover_once, seeded
from headprune.run.subject import Subject, quality_row
from headprune.scoring._api import score
from headprune.surgery.prune import prune_

#: The random baselines take seeds from here on, away from the run's own seed.
_RANDOM_SEEDS = 1000
#: Random plans that get the recoveries, too, at most: each takes as long as the plan's own.
REFITTED_DRAWS = 3
#: A model and its results on test rows; None where an earlier run measured it.
Judged: TypeAlias = tuple[nn.Module, Quality | None]


@dataclass(frozen=True)
class RunScores:
    """The scores that decide the plan, and those of the baselines it is compared with."""

    chosen: HeadScores
    magnitude: HeadScores | None
    random: tuple[HeadScores, ...]


def judge_base(subject: Subject, n_heads: HeadCounts) -> None:
    """Measure the uncut model, and warn if it is not shown to beat a constant answer."""
    quality = subject.report(subject.model, "base", n_heads)["test"]
    if not quality.classes:
        return
    names = names_by_number(getattr(subject.model, "config", None))
    row = quality_row(quality, "base", n_heads, "test")
    doubt = at_chance(row, class_rows(quality, quality, names))
    if doubt:
        must = "Check that labels and model belong together, or train the model first."
        subject.journal.warn([f"{doubt} {must}"])


# ------------------------------------------------------------------------------------------ score


def score_heads(
    subject: Subject, first: HeadScores | None = None, work: Path | None = None
) -> RunScores:
    """Score the heads on calibration rows, by the chosen scorer and by the baselines.

    Args:
        subject: The run's model, data and recipe.
        first: Scores of the chosen scorer that an earlier run made; they are not made again.
        work: A folder that keeps the result of every batch, so that scoring can resume.
    """
    wanted = subject.recipe.score

    # 1. The chosen scorer.
    if first is None:
        first = _score_and_report(subject, work)
    elif subject.launch is not None:
        subject.launch.call_off()

    # 2. The baselines. They read no data: one batch is enough to count what the units cost.
    weights = []
    if wanted.magnitude:
        weights.append(configured(scoring.registry, "magnitude", {}))
    seeds = [subject.recipe.seed + _RANDOM_SEEDS + i for i in range(wanted.random_draws)]
    draws = [configured(scoring.registry, "random", {"seed": seed}) for seed in seeds]
    baselines: tuple[HeadScores, ...] = ()
    if weights or draws:
        batch = _batches_to_score(subject)[:1]
        others = [*weights, *draws]
        baselines = score(subject.model, batch, others, sites=subject.sites, progress=False)

    # 3. Note everything; a scorer is not compared with itself.
    drawn = {"random": seeds} if seeds else {}
    subject.journal.note(scores=first, seeds=drawn, warnings=first.notes)
    magnitude, random = None, baselines[len(weights) :]
    if weights and wanted.scorer != "magnitude":
        magnitude = baselines[0]
    if wanted.scorer == "random":
        random = ()
    return RunScores(first, magnitude, random)


def _score_and_report(subject: Subject, work: Path | None) -> HeadScores:
    """Run the chosen scorer, together with the other processes if there are any."""
    journal, launch = subject.journal, subject.launch
    if launch is None:
        scores = score_calibration(subject, None, work)
    else:
        with launch.met(subject.model) as processes:
            scores = score_calibration(subject, processes, work)
        journal.note(hardware={"processes": launch.size})
    journal.tell(scores.summary)
    if scores.choice is not None:
        for line in str(scores.choice).split("\n"):
            journal.tell(line)
    return scores


def _batches_to_score(subject: Subject) -> list[Any]:
    """The calibration rows, of like length unless the scorer may stop before it has read all."""
    wanted = subject.recipe.score
    # If scoring stops early, the rows read so far must be a random part of all rows.
    batched = subject.data.of_like_length if wanted.stopping is None else subject.data.batches
    return batched("calibration", wanted.batch_size)


def score_calibration(
    subject: Subject, processes: Processes | None, work: Path | None = None
) -> HeadScores:
    """Score the calibration rows by the chosen scorer; several processes share the rows."""
    wanted = subject.recipe.score
    return score(
        subject.model,
        _batches_to_score(subject),
        scorer_of(subject),
        sites=subject.sites,
        until=wanted.stopping,
        processes=processes,
        folder=work if processes is None else None,  # the other processes do not know the folder
        progress=subject.journal.progress,
    )


# ---------------------------------------------------------------------------------------- compare


def compare_plans(subject: Subject, scores: RunScores, plan: PruningPlan) -> Quality:
    """Measure the plan and the baselines' plans at the same budget, with gates, unrecovered.

    Returns:
        Results of the plan on test rows.
    """
    journal, base = subject.journal, subject.base["test"]

    # 1. The plan itself, on test and validation rows.
    name = scores.chosen.scorer
    with gated(subject.model, plan, subject.sites):
        chosen = subject.report(subject.model, name, plan.mask.kept_counts)["test"]

    # 2. Magnitude, on test rows.
    if scores.magnitude is not None:
        magnitude = choose_heads(subject, scores.magnitude, baseline=True)
        quality, row = _judged_baseline(subject, magnitude, "magnitude")
        journal.note(
            quality=(row,), comparisons=compared(row.name, "base", "test", [base], [quality])
        )
        journal.tell(f"magnitude: test {row.metric} {row.value:.4f}")

    # 3. Random heads, several draws, on test rows.
    plans = _random_plans(subject, scores.random)
    journal.warn(_fewer_draws(len(scores.random), len(plans)))
    draws = [_judged_baseline(subject, plan, "random") for plan in plans]
    if draws:
        row = _mean([row for _, row in draws])
        values = tuple(row.value for _, row in draws)
        judged = [quality for quality, _ in draws]
        comparisons = (
            *compared(row.name, "base", "test", [base], judged),
            *compared(name, "random", "test", judged, [chosen]),
        )
        journal.note(quality=(row,), metrics={"random_draws": values}, comparisons=comparisons)
        spread = "" if row.spread is None else f" ± {row.spread:.4f}"
        journal.tell(f"random: test {row.metric} {row.value:.4f}{spread} ({row.draws} draws)")
    return chosen


def refits_random(recipe: Recipe, scores: RunScores) -> bool:
    """Whether random heads get the plan's recoveries, too; not a training, which takes too long."""
    return bool(scores.random) and recovers_quickly(recipe)


def expects_random(recipe: Recipe) -> bool:
    """Whether random heads will get the plan's recoveries, as far as the recipe can say."""
    wanted = recipe.score
    return bool(wanted.random_draws) and wanted.scorer != "random" and recovers_quickly(recipe)


def recovers_quickly(recipe: Recipe) -> bool:
    """Whether a run recovers, and without any training after the cut."""
    trains = any(recovery.registry.get(step.method).trains for step in recipe.recover)
    return bool(recipe.recover) and recipe.gradual is None and not trains


def compare_refitted(subject: Subject, scores: RunScores, final: Quality) -> None:
    """Cut and recover random plans as the chosen one, and compare the results on test rows."""
    journal = subject.journal
    name = _recovered_name(subject.recipe.recover)
    draws = []
    for plan in _random_plans(subject, scores.random[:REFITTED_DRAWS]):
        small = copy.deepcopy(subject.model)
        cut_(small, bind(small, subject.sites), plan.mask)
        try:
            for step in subject.recipe.recover:
                recover_once(subject, small, step)
        except (UnsupportedModel, torch.OutOfMemoryError) as error:
            # The run's own result is finished, and must not be lost for a comparison.
            journal.warn([f"Recovery of random heads failed; they are compared before it: {error}"])
            return
        quality = subject.judge(small, "test")
        row = quality_row(quality, f"{RECOVERED_RANDOM}{name}", plan.mask.kept_counts, "test")
        draws.append((quality, row))
        del small  # before the next copy is made
    row = _mean([row for _, row in draws])
    judged = [quality for quality, _ in draws]
    comparisons = (
        *compared(row.name, "base", "test", [subject.base["test"]], judged),
        *compared(name, "random", "test", judged, [final]),
    )
    journal.note(quality=(row,), comparisons=comparisons)
    journal.tell(f"{row.name}: test {row.metric} {row.value:.4f} ({row.draws} draws)")


def _random_plans(subject: Subject, draws: Sequence[HeadScores]) -> list[PruningPlan]:
    """The plans of random draws; only one where all of them keep the same.

    In a very small model a budget can be so narrow that no draw changes what is kept.
    """
    plans = [choose_heads(subject, random, baseline=True) for random in draws]
    are_alike = len({plan.mask for plan in plans}) == 1
    return plans[:1] if are_alike else plans


def _fewer_draws(drawn: int, counted: int) -> Iterator[str]:
    """Say that all random draws keep the same, where they do."""
    if counted < drawn:
        yield (
            f"All {drawn} random draws keep the same heads and neurons under this budget, so they"
            " count as one."
        )


def _judged_baseline(subject: Subject, plan: PruningPlan, name: str) -> tuple[Quality, QualityRow]:
    """Evaluate test rows with gates in place of the cut that a baseline would make."""
    with gated(subject.model, plan, subject.sites):
        quality = subject.judge(subject.model, "test")
    return quality, quality_row(quality, name, plan.mask.kept_counts, "test")


def _mean(rows: list[QualityRow]) -> QualityRow:
    """One row for several draws: means, and the standard deviation of the metric."""
    values = [row.value for row in rows]
    neurons = [row.kept_neurons for row in rows if row.kept_neurons is not None]
    return replace(
        rows[0],
        kept_neurons=round(statistics.fmean(neurons)) if neurons else None,
        kept_heads=round(statistics.fmean(row.kept_heads for row in rows)),
        value=statistics.fmean(values),
        loss=statistics.fmean(row.loss for row in rows),
        draws=len(rows),
        spread=statistics.stdev(values) if len(values) > 1 else None,
        # The interval of one draw is not that of their mean.
        low=None,
        high=None,
    )


def compare_answers(subject: Subject, final: Quality) -> ChangedAnswers:
    """Note the final model's results per class; return the test rows whose answer changed."""
    base, data = subject.base["test"], subject.data
    names = names_by_number(getattr(subject.model, "config", None))
    if base.classes:
        subject.journal.note(classes=class_rows(base, final, names))
    order = data.evaluated("test")
    rows = JudgedRows(
        numbers=[data.test_rows[i] + 1 for i in order],
        split=data.test_split,
        texts=[data.texts[i] for i in order] if data.texts else [],
        truths=[_truth(data.targets["test"][i]) for i in order] if data.targets else [],
        names=names,
    )
    changed = rows.changed(base, final)
    subject.journal.tell(changed.title)
    return changed


def _truth(target: str | Question) -> str:
    """The true answer to a question, or the true translation."""
    return target if isinstance(target, str) else " / ".join(dict.fromkeys(target.answers))


# -------------------------------------------------------------------------------------------- cut


def count_heads(subject: Subject, model: nn.Module) -> HeadCounts:
    """Count the heads and neurons that the subject's model, or its cut copy, has now."""
    return HeadCounts.present(bound.site for bound in bind(model, subject.sites))


def cut(subject: Subject, plan: PruningPlan) -> nn.Module:
    """Cut a copy of the model and prove the cut; the original is not changed."""
    journal = subject.journal
    # 1. Cut, and compare the cut model with the gated one.
    pruned = copy.deepcopy(subject.model)
    report = prune_(pruned, plan, example=subject.example, sites=subject.sites)
    proofs = (report.proof,) if report.proof else ()
    journal.note(proofs=proofs, warnings=report.warnings)
    journal.tell(str(report))
    # 2. A decoder has to generate the same as well.
    if subject.recipe.task == "causal_lm":
        examples = subject.data.examples["test"]
        proof = generation_proof(subject.model, plan, pruned, examples, subject.data.collate.pad)
        journal.note(proofs=(proof,))
        difference = f"{proof.max_difference:.1e}"
        journal.tell(f"generation with the KV cache: |gated - pruned| <= {difference}")
    return pruned


def cut_gradually(subject: Subject, scores: HeadScores, work: Path | None) -> Judged:
    """Cut and train a copy of the model in stages; the last plan counts.

    Args:
        subject: The run's model, data and recipe.
        scores: Scores of the uncut model; their scorer scores again at every stage.
        work: A folder for a checkpoint after every stage, to resume from.
    """
    recipe, data, journal = subject.recipe, subject.data, subject.journal
    assert recipe.gradual is not None
    pruned = copy.deepcopy(subject.model)
    # 1. Cut and train, stage by stage.
    method = seeded(recovery.registry, "finetune", recipe.gradual.settings, recipe.seed)
    report = prune_gradually_(
        pruned,
        data.loader("train", recipe.gradual.batch_size),
        recipe.select.budget,
        stages=recipe.gradual.stages,
        finetune=method,
        scorer=configured(scoring.registry, scores.scorer, scores.settings),
        selector=configured(selection.registry, recipe.select.selector, recipe.select.settings),
        must_keep=recipe.select.must_keep,
        must_remove=recipe.select.must_remove,
        calibration=data.of_like_length("calibration", recipe.score.batch_size),
        teacher=subject.model if method.needs_teacher else None,
        sites=subject.sites,
        example=subject.example,
        progress=journal.progress,
        folder=work,
        leave_checkpoint=work is not None,
    )
    # 2. Note every stage, and measure the last one.
    rows = []
    for stage in report.stages:
        kept = stage.plan.mask.kept_counts
        row: dict[str, Any] = {"kept": kept.heads}
        if kept.neurons is not None:
            row["kept_neurons"] = kept.neurons
        rows.append({**row, **stage.training.metrics})
    proofs = tuple(stage.proof for stage in report.stages if stage.proof)
    journal.note(plan=report.plan, proofs=proofs, metrics={"gradual": tuple(rows)})
    for line in str(report).split("\n"):
        journal.tell(line)
    judged = subject.report(pruned, "gradual", count_heads(subject, pruned), trained=True)
    return pruned, judged["test"]


# ---------------------------------------------------------------------------------------- recover


def recover(subject: Subject, pruned: nn.Module, progress: Progress) -> Judged:
    """Run every recovery of the recipe in turn, and measure the model after each.

    A recovery that an earlier run finished is not repeated: its model is loaded.
    """
    quality: Quality | None = None
    for i in range(len(subject.recipe.recover)):
        name = f"recover {i}"
        place = stage_folder(name)
        pruned, quality = progress.once(
            name,
            partial(_recover_step_, subject, pruned, i, progress.work(name), place),
            partial(load_cut_model, subject, place),
            (place,),
            named=False,
        )
    return pruned, quality


def _recover_step_(
    subject: Subject, pruned: nn.Module, i: int, work: Path | None, place: str
) -> Judged:
    """Run recovery number ``i``, measure the model, and save it for resuming."""
    steps, journal = subject.recipe.recover[: i + 1], subject.journal

    # 1. Recover.
    _, purpose, report = recover_once(subject, pruned, steps[i], work)
    facts = {
        "method": steps[i].method,
        "rows": purpose,
        "examples": len(subject.data.some(purpose, steps[i].examples).examples[purpose]),
        "seconds": round(report.seconds, 3),
        **report.metrics,
    }
    earlier = journal.record.metrics.get("recovery", {})
    journal.note(metrics={"recovery": {**earlier, f"{i}": facts}}, warnings=report.notes)
    for note in report.notes:
        journal.tell(f"note: {note}")

    # 2. Measure. The row's name lists all recoveries so far.
    trained = subject.recipe.gradual is not None
    for step in steps:
        trained = trained or recovery.registry.get(step.method).trains
    kept = count_heads(subject, pruned)
    judged = subject.report(pruned, _recovered_name(steps), kept, trained)

    # 3. Save.
    save_cut_model(subject, pruned, place)
    return pruned, judged["test"]


def _recovered_name(steps: Sequence[RecoverStep]) -> str:
    """The row's name in the accuracy table: all recoveries so far."""
    return f"recovered ({' + '.join(step.method for step in steps)})"


def stage_folder(stage: str) -> str:
    """Where the cut model is saved after a stage, relative to the run's folder."""
    return f"{WORK}/model-after-{stage.replace(' ', '-')}"


def save_cut_model(subject: Subject, pruned: nn.Module, place: str) -> None:
    """Save the cut model for a run that resumes after this stage."""
    assert subject.journal.folder is not None
    save_pretrained(pruned, subject.journal.folder / place, subject.sites)


def load_cut_model(subject: Subject, place: str) -> Judged:
    """Load the cut model that ``save_cut_model`` saved; its results are in the record alone."""
    assert subject.journal.folder is not None
    whole = subject.whole()
    sites = None if whole is None else subject.sites
    model = from_pretrained(subject.journal.folder / place, whole, sites)
    return model.to(device_of(subject.model)), None


# ------------------------------------------------------------------------------ measure and save


def bench(subject: Subject, pruned: nn.Module, length: int) -> None:
    """Count sizes, and time the models over the recipe's grid of batch sizes and lengths.

    Args:
        subject: The run's model, data and recipe.
        pruned: The cut model.
        length: Tokens per example where the recipe gives no lengths.
    """
    journal, wanted = subject.journal, subject.recipe.bench
    if wanted is None:
        journal.note(size=sizes(subject.model, pruned, subject.example, subject.sites))
        return
    # 1. Sizes, at the length of the speeds.
    lengths = wanted.lengths or [length]
    example = shaped_batch(subject.example, 1, max(lengths))
    journal.note(size=sizes(subject.model, pruned, example, subject.sites))
    # 2. Speed of one forward pass.
    # A speed that was asked for is measured already.
    timed = {(row.batch, row.length) for row in journal.record.speed}
    for of_length in lengths:
        batches = [batch for batch in wanted.batch_sizes if (batch, of_length) not in timed]
        if not batches:
            continue
        rows = compare_latency(
            subject.model,
            pruned,
            partial(shaped_batch, subject.example),
            batches,
            [of_length],
            seconds=wanted.seconds,
            seed=subject.recipe.seed,
        )
        journal.note(speed=rows)
        for row in rows:
            ratio = f"{row.ratio:.2f}x [{row.low:.2f}, {row.high:.2f}]"
            journal.tell(f"batch {row.batch} x {row.length}: {ratio} as fast as before")
    # 3. Speed of generation.
    if wanted.new_tokens is not None:
        _bench_decoding(subject, pruned, wanted, lengths)


def _bench_decoding(
    subject: Subject, pruned: nn.Module, wanted: BenchSection, lengths: list[int]
) -> None:
    """Measure tokens per second in prefill and decode, and the bytes of the KV cache."""
    assert wanted.new_tokens is not None
    rows = compare_decoding(
        subject.model,
        pruned,
        wanted.batch_sizes,
        lengths,
        wanted.new_tokens,
        seconds=wanted.seconds,
        seed=subject.recipe.seed,
    )
    facts: list[dict[str, Any]] = []
    for row in rows:
        facts.append({**asdict(row), "tokens_per_second": row.tokens_per_second()})
        subject.journal.tell(_decoding_line(row))
    subject.journal.note(metrics={"decoding": tuple(facts)})


def _decoding_line(row: DecodingRow) -> str:
    """Tokens per second and cache bytes, before and after the cut, on one line."""
    speed = row.tokens_per_second()
    phases = []
    for phase in ("prefill", "decode"):
        before, after = speed[f"original_{phase}"], speed[f"pruned_{phase}"]
        phases.append(f"{phase} {before:.0f} -> {after:.0f}")
    where = f"batch {row.decode.batch}, prompt {row.decode.length}"
    cache = f"cache {row.original_bytes:,} -> {row.pruned_bytes:,} bytes"
    return f"{where}: tokens/s in {', in '.join(phases)}; {cache}"


def save_model(subject: Subject, pruned: nn.Module, folder: Path) -> None:
    """Save the cut model with its tokenizer, and prove that it loads unchanged."""
    place = folder / MODEL
    tools, record = subject.preparation.tools, subject.journal.record
    save_pretrained(pruned, place, subject.sites, processor=tools, record=record)
    proof = reload_proof(pruned, place, subject.example, subject.whole(), subject.sites)
    subject.journal.note(proofs=(proof,))
    subject.journal.tell(f"{place.name}: saved, and loads back bit for bit")
