"""The stages after the model is there: score, select, compare, cut, recover, bench, keep."""

from __future__ import annotations

import copy
import statistics
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from headprune import recovery, scoring, selection
from headprune.bench.decoding import compare_decoding
from headprune.bench.latency import compare_latency, shaped_batch
from headprune.bench.size import sizes
from headprune.checkpoints.checkpoint import from_pretrained, save_pretrained
from headprune.core.plan import PruningPlan
from headprune.core.record import QualityRow
from headprune.core.scores import HeadScores
from headprune.gating.context import gated
from headprune.model.processes import Processes
from headprune.model.running import device_of
from headprune.model.sites import bind
from headprune.recipes.schema import BenchSection
from headprune.recipes.validate import configured
from headprune.run.auto import AutoOfRun, scorer_of
from headprune.run.choosing import choose_heads
from headprune.run.gradual import prune_gradually_
from headprune.run.journal import MODEL, WORK
from headprune.run.progress import Progress
from headprune.run.proofs import generation_proof, reload_proof
from headprune.run.recovering import recover_once, seeded
from headprune.run.subject import Subject
from headprune.scoring._api import score
from headprune.surgery.prune import prune_

_RANDOM_SEEDS = 1000  # draws begin here, away from the run's own seed


@dataclass(frozen=True)
class Scored:
    """The chosen scorer's scores, and those of what it is compared with."""

    chosen: HeadScores
    magnitude: HeadScores | None
    random: tuple[HeadScores, ...]


def score_heads(
    subject: Subject, first: HeadScores | None = None, work: Path | None = None
) -> Scored:
    """Scores on calibration rows, by the chosen scorer, unless it has given ``first`` before, and
    by the baselines.

    What batches gave is kept in ``work``, and gone on with from there.
    """
    wanted = subject.recipe.score
    seeds = [subject.recipe.seed + _RANDOM_SEEDS + i for i in range(wanted.random_draws)]
    weights = [configured(scoring.registry, "magnitude", {})] if wanted.magnitude else []
    draws = [configured(scoring.registry, "random", {"seed": seed}) for seed in seeds]
    batches = subject.data.batches("calibration", wanted.batch_size)
    if first is None:
        if wanted.scorer == "auto":
            subject.journal.tell(_announced(subject))
        with (
            nullcontext()
            if subject.launch is None
            else subject.launch.met(subject.model) as processes
        ):
            first = chosen_scores(subject, processes, work)
        if subject.launch is not None:
            subject.journal.note(hardware={"processes": subject.launch.size})
        subject.journal.tell(first.title)
        if first.choice is not None:
            for line in str(first.choice).split("\n"):
                subject.journal.tell(line)
    elif subject.launch is not None:
        subject.launch.call_off()
    # The others read no data: one batch tells them what the units cost.
    others = [*weights, *draws]
    rest = (
        score(subject.model, batches[:1], others, sites=subject.sites, progress=False)
        if others
        else ()
    )
    subject.journal.note(
        scores=first, seeds={"random": seeds} if seeds else {}, warnings=first.notes
    )
    magnitude = rest[0] if weights and wanted.scorer != "magnitude" else None
    return Scored(first, magnitude, () if wanted.scorer == "random" else rest[len(weights) :])


def _announced(subject: Subject) -> str:
    """What ``auto`` is about to do."""
    auto = scorer_of(subject)
    assert isinstance(auto, AutoOfRun)
    rows = len(subject.data.examples["calibration"])
    return f"auto: {len(auto.candidates)} scorers, then {auto.said}, on {rows:,} rows"


def chosen_scores(
    subject: Subject, processes: Processes | None, work: Path | None = None
) -> HeadScores:
    """The chosen scorer's scores on calibration rows, which all processes of the run share, if
    there are several."""
    wanted = subject.recipe.score
    return score(
        subject.model,
        subject.data.batches("calibration", wanted.batch_size),
        scorer_of(subject),
        sites=subject.sites,
        until=wanted.stopping,
        processes=processes,
        folder=work if processes is None else None,  # the others do not know the folder
        progress=subject.journal.progress,
    )


def compare_plans(subject: Subject, scored: Scored, plan: PruningPlan) -> None:
    """Accuracy of the plan and of the baselines' plans at the same budget, heads gated, nothing
    recovered."""
    name = scored.chosen.scorer
    with gated(subject.model, plan, subject.sites):
        subject.report(subject.model, name, plan.mask.n_kept)
    if scored.magnitude is not None:
        rows = [_gated_row(subject, scored.magnitude)]
        subject.journal.note(quality=tuple(rows))
        subject.journal.tell(f"magnitude: test {rows[0].metric} {rows[0].value:.4f}")
    draws = [_gated_row(subject, scores) for scores in scored.random]
    if draws:
        row = _mean(draws)
        values = tuple(draw.value for draw in draws)
        subject.journal.note(quality=(row,), metrics={"random_draws": values})
        spread = "" if row.spread is None else f" ± {row.spread:.4f}"
        subject.journal.tell(
            f"random: test {row.metric} {row.value:.4f}{spread} ({row.draws} draws)"
        )


def _gated_row(subject: Subject, scores: HeadScores) -> QualityRow:
    plan = choose_heads(subject, scores, baseline=True)
    with gated(subject.model, plan, subject.sites):
        return subject.measure(subject.model, scores.scorer, plan.mask.n_kept, "test")


def _mean(rows: list[QualityRow]) -> QualityRow:
    """One row for several draws."""
    values = [row.value for row in rows]
    return replace(
        rows[0],
        kept_heads=round(statistics.fmean(row.kept_heads for row in rows)),
        value=statistics.fmean(values),
        loss=statistics.fmean(row.loss for row in rows),
        draws=len(rows),
        spread=statistics.stdev(values) if len(values) > 1 else None,
    )


def count_heads(subject: Subject, model: nn.Module) -> int:
    """Heads that are present in what is left of the subject's model."""
    return sum(len(b.site.heads) for b in bind(model, subject.sites))


def cut(subject: Subject, plan: PruningPlan) -> nn.Module:
    """A copy of the model, really cut and proven; the original stays as the teacher."""
    pruned = copy.deepcopy(subject.model)
    done = prune_(pruned, plan, example=subject.example, sites=subject.sites)
    subject.journal.note(proofs=(done.proof,) if done.proof else (), warnings=done.warnings)
    subject.journal.tell(str(done))
    if subject.recipe.task == "causal_lm":
        examples = subject.data.examples["test"]
        proof = generation_proof(subject.model, plan, pruned, examples, subject.data.collate.pad)
        subject.journal.note(proofs=(proof,))
        subject.journal.tell(
            f"generation with the KV cache: |gated - pruned| <= {proof.max_difference:.1e}"
        )
    return pruned


def cut_gradually(subject: Subject, scores: HeadScores, work: Path | None) -> nn.Module:
    """A copy of the model that lost its heads in stages while it was trained; the run's plan is
    then what stays.

    Args:
        subject: With the recipe.
        scores: Of the uncut model, whose scorer is asked again at every stage.
        work: Where it leaves what it has after every stage, and goes on from.
    """
    recipe = subject.recipe
    assert recipe.gradual is not None
    pruned = copy.deepcopy(subject.model)
    method = seeded(recovery.registry, "finetune", recipe.gradual.settings, recipe.seed)
    done = prune_gradually_(
        pruned,
        subject.data.loader("train", recipe.gradual.batch_size),
        recipe.select.budget,
        stages=recipe.gradual.stages,
        finetune=method,
        scorer=configured(scoring.registry, scores.scorer, scores.settings),
        selector=configured(selection.registry, recipe.select.selector, recipe.select.settings),
        must_keep=recipe.select.must_keep,
        must_remove=recipe.select.must_remove,
        calibration=subject.data.batches("calibration", recipe.score.batch_size),
        teacher=subject.model if method.needs_teacher else None,
        sites=subject.sites,
        example=subject.example,
        progress=subject.journal.progress,
        folder=work,
        leave_checkpoint=work is not None,
    )
    proofs = tuple(stage.proof for stage in done.stages if stage.proof)
    rows = tuple(
        {"kept": stage.plan.mask.n_kept, **stage.training.metrics} for stage in done.stages
    )
    subject.journal.note(plan=done.plan, proofs=proofs, metrics={"gradual": rows})
    for line in str(done).split("\n"):
        subject.journal.tell(line)
    subject.report(pruned, "gradual", count_heads(subject, pruned), trained=True)
    return pruned


def recover(subject: Subject, pruned: nn.Module, progress: Progress) -> nn.Module:
    """Every recovery of the recipe in turn, and the accuracy after each; those of an earlier run
    are not repeated."""
    for i in range(len(subject.recipe.recover)):
        name = f"recover {i}"
        place = kept_place(name)
        pruned = progress.once(
            name,
            partial(_recovered_, subject, pruned, i, progress.work(name), place),
            partial(reopened, subject, place),
            (place,),
            named=False,
        )
    return pruned


def _recovered_(
    subject: Subject, pruned: nn.Module, i: int, work: Path | None, place: str
) -> nn.Module:
    steps, journal = subject.recipe.recover[: i + 1], subject.journal
    _, purpose, done = recover_once(subject, pruned, steps[i], work)
    report = {
        "method": steps[i].method,
        "rows": purpose,
        "seconds": round(done.seconds, 3),
        **done.metrics,
    }
    before = journal.record.metrics.get("recovery", {})
    journal.note(metrics={"recovery": {**before, f"{i}": report}}, warnings=done.notes)
    trains = [recovery.registry.get(step.method).trains for step in steps]
    names, trained = (
        " + ".join(step.method for step in steps),
        subject.recipe.gradual is not None or any(trains),
    )
    subject.report(pruned, f"recovered ({names})", count_heads(subject, pruned), trained)
    put_by(subject, pruned, place)
    return pruned


def kept_place(stage: str) -> str:
    """Where the cut model lies after a stage, from the run's folder on."""
    return f"{WORK}/model-after-{stage.replace(' ', '-')}"


def put_by(subject: Subject, pruned: nn.Module, place: str) -> None:
    """Saves the cut model for a run that has to go on from here."""
    assert subject.journal.folder is not None
    save_pretrained(pruned, subject.journal.folder / place, subject.sites)


def reopened(subject: Subject, place: str) -> nn.Module:
    """The cut model as it was put by."""
    assert subject.journal.folder is not None
    whole = subject.whole()
    model = from_pretrained(
        subject.journal.folder / place, whole, None if whole is None else subject.sites
    )
    return model.to(device_of(subject.model))


def bench(subject: Subject, pruned: nn.Module, length: int) -> None:
    """Sizes, and speed over the recipe's grid."""
    subject.journal.note(size=sizes(subject.model, pruned, subject.example, subject.sites))
    wanted = subject.recipe.bench
    if wanted is None:
        return
    lengths = wanted.lengths or [length]
    rows = compare_latency(
        subject.model,
        pruned,
        lambda batch, tokens: shaped_batch(subject.example, batch, tokens),
        wanted.batch_sizes,
        lengths,
        seconds=wanted.seconds,
        seed=subject.recipe.seed,
    )
    subject.journal.note(speed=rows)
    for row in rows:
        interval = f"[{row.low:.2f}, {row.high:.2f}]"
        subject.journal.tell(
            f"batch {row.batch} x {row.length}: {row.ratio:.2f}x {interval} as fast as before"
        )
    if wanted.new_tokens is not None:
        _bench_decoding(subject, pruned, wanted, lengths)


def _bench_decoding(
    subject: Subject, pruned: nn.Module, wanted: BenchSection, lengths: list[int]
) -> None:
    """Tokens a second in prefill and decode, and the cache's bytes."""
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
    subject.journal.note(
        metrics={
            "decoding": tuple(
                {**asdict(row), "tokens_per_second": row.tokens_per_second()} for row in rows
            )
        }
    )
    for row in rows:
        speed, at = row.tokens_per_second(), f"batch {row.decode.batch}, prompt {row.decode.length}"
        phases = (
            f"{p} {speed[f'original_{p}']:.0f} -> {speed[f'pruned_{p}']:.0f}"
            for p in ("prefill", "decode")
        )
        held = f"cache {row.original_bytes:,} -> {row.pruned_bytes:,} bytes"
        subject.journal.tell(f"{at}: tokens/s in {', in '.join(phases)}; {held}")


def keep(subject: Subject, pruned: nn.Module, folder: Path) -> None:
    """Saves the cut model and what prepares its inputs, loads it again and proves that it is the
    same."""
    save_pretrained(pruned, folder / MODEL, subject.sites, processor=subject.preparation.tools)
    proof = reload_proof(pruned, folder / MODEL, subject.example, subject.whole(), subject.sites)
    subject.journal.note(proofs=(proof,))
    subject.journal.tell(f"{folder / MODEL}: loads back bit for bit")
