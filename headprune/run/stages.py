"""The stages after the model is there: score, select, compare, cut, recover, bench, keep."""

from __future__ import annotations

import copy
import statistics
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from headprune import recovery, scoring, selection
from headprune.bench.decoding import compare_decoding
from headprune.bench.latency import compare_latency, shaped_batch
from headprune.bench.size import sizes
from headprune.core.plan import PruningPlan
from headprune.core.record import QualityRow
from headprune.core.scores import HeadScores
from headprune.gating.context import gated
from headprune.model.sites import bind
from headprune.run.choosing import choose_heads
from headprune.run.gradual import prune_gradually_
from headprune.run.journal import MODEL, PLAN
from headprune.run.proofs import generation_proof, reload_proof
from headprune.run.recipe import BenchSection
from headprune.run.recovering import recover_once, seeded
from headprune.run.subject import Subject
from headprune.run.validate import configured
from headprune.scoring._api import score
from headprune.surgery.checkpoint import save_pretrained
from headprune.surgery.prune import prune_

_RANDOM_SEEDS = 1000  # draws begin here, away from the run's own seed


@dataclass(frozen=True)
class Scored:
    """The chosen scorer's scores, and those of what it is compared with."""

    chosen: HeadScores
    magnitude: HeadScores | None
    random: tuple[HeadScores, ...]


def score_heads(subject: Subject) -> Scored:
    """Scores on calibration rows, by the chosen scorer and by the baselines."""
    wanted = subject.recipe.score
    seeds = [subject.recipe.seed + _RANDOM_SEEDS + i for i in range(wanted.random_draws)]
    weights = [configured(scoring.registry, "magnitude", {})] if wanted.magnitude else []
    draws = [configured(scoring.registry, "random", {"seed": seed}) for seed in seeds]
    batches = subject.data.batches("calibration", wanted.batch_size)
    first = chosen_scores(subject)
    # The others read no data: one batch tells them what the units cost.
    others = [*weights, *draws]
    rest = score(subject.model, batches[:1], others, sites=subject.sites, progress=False) if others else ()
    subject.journal.note(scores=first, seeds={"random": seeds} if seeds else {}, warnings=first.notes)
    subject.journal.tell(first.title)
    magnitude = rest[0] if weights and wanted.scorer != "magnitude" else None
    return Scored(first, magnitude, () if wanted.scorer == "random" else rest[len(weights) :])


def chosen_scores(subject: Subject) -> HeadScores:
    """The chosen scorer's scores on calibration rows, which all processes of the run share, if there are several."""
    wanted, launch = subject.recipe.score, subject.launch
    chosen = seeded(scoring.registry, wanted.scorer, wanted.settings, subject.recipe.seed)
    batches = subject.data.batches("calibration", wanted.batch_size)
    if launch is not None:
        subject.journal.note(hardware={"processes": launch.size})
    with nullcontext() if launch is None else launch.met(subject.model) as processes:
        return score(
            subject.model,
            batches,
            chosen,
            sites=subject.sites,
            until=wanted.stopping,
            processes=processes,
            progress=subject.journal.progress,
        )


def compare_plans(subject: Subject, scored: Scored, plan: PruningPlan) -> None:
    """Accuracy of the plan and of the baselines' plans at the same budget, heads gated, nothing recovered."""
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
        subject.journal.tell(f"random: test {row.metric} {row.value:.4f}{spread} ({row.draws} draws)")


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
        subject.journal.tell(f"generation with the KV cache: |gated - pruned| <= {proof.max_difference:.1e}")
    return pruned


def cut_gradually(subject: Subject, folder: Path) -> nn.Module:
    """A copy of the model that lost its heads in stages while it was trained; the run's plan is then what stays."""
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
        scorer=seeded(scoring.registry, recipe.score.scorer, recipe.score.settings, recipe.seed),
        selector=configured(selection.registry, recipe.select.selector, recipe.select.settings),
        must_keep=recipe.select.must_keep,
        must_remove=recipe.select.must_remove,
        calibration=subject.data.batches("calibration", recipe.score.batch_size),
        teacher=subject.model if method.needs_teacher else None,
        sites=subject.sites,
        example=subject.example,
        progress=subject.journal.progress,
    )
    done.plan.save(folder / PLAN)
    proofs = tuple(stage.proof for stage in done.stages if stage.proof)
    rows = tuple({"kept": stage.plan.mask.n_kept, **stage.training.metrics} for stage in done.stages)
    subject.journal.note(plan=done.plan, proofs=proofs, metrics={"gradual": rows})
    for line in str(done).split("\n"):
        subject.journal.tell(line)
    subject.report(pruned, "gradual", count_heads(subject, pruned), trained=True)
    return pruned


def recover(subject: Subject, pruned: nn.Module) -> None:
    """Every recovery of the recipe in turn, and the accuracy after each."""
    names: list[str] = []
    reports: dict[str, Any] = {}
    trained = subject.recipe.gradual is not None
    kept = count_heads(subject, pruned)
    for i, step in enumerate(subject.recipe.recover):
        method, purpose, done = recover_once(subject, pruned, step)
        names.append(step.method)
        trained = trained or method.trains
        reports[f"{i}"] = {"method": step.method, "rows": purpose, "seconds": round(done.seconds, 3), **done.metrics}
        subject.journal.note(metrics={"recovery": reports}, warnings=done.notes)
        subject.report(pruned, f"recovered ({' + '.join(names)})", kept, trained)


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
        subject.journal.tell(f"batch {row.batch} x {row.length}: {row.ratio:.2f}x {interval} as fast as before")
    if wanted.new_tokens is not None:
        _bench_decoding(subject, pruned, wanted, lengths)


def _bench_decoding(subject: Subject, pruned: nn.Module, wanted: BenchSection, lengths: list[int]) -> None:
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
        metrics={"decoding": tuple({**asdict(row), "tokens_per_second": row.tokens_per_second()} for row in rows)}
    )
    for row in rows:
        speed, at = row.tokens_per_second(), f"batch {row.decode.batch}, prompt {row.decode.length}"
        phases = (f"{p} {speed[f'original_{p}']:.0f} -> {speed[f'pruned_{p}']:.0f}" for p in ("prefill", "decode"))
        held = f"cache {row.original_bytes:,} -> {row.pruned_bytes:,} bytes"
        subject.journal.tell(f"{at}: tokens/s in {', in '.join(phases)}; {held}")


def keep(subject: Subject, pruned: nn.Module, folder: Path) -> None:
    """Saves the cut model and what prepares its inputs, loads it again and proves that it is the same."""
    save_pretrained(pruned, folder / MODEL, subject.sites)
    subject.preparation.save(folder / MODEL)
    proof = reload_proof(pruned, folder / MODEL, subject.example, subject.whole(), subject.sites)
    subject.journal.note(proofs=(proof,))
    subject.journal.tell(f"{folder / MODEL}: loads back bit for bit")
