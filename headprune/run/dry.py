"""``headprune run --dry-run``: what a recipe would work on, and about how long and how much memory
it would take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headprune import recovery
from headprune.core.codec import FrozenDict, Value
from headprune.core.heads import AttentionSite
from headprune.model.losses import default_loss
from headprune.model.running import device_of, to_device, undisturbed
from headprune.model.sites import Sites
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import configured
from headprune.run.auto import AutoOfRun, scorer_of
from headprune.run.journal import Journal, to_stderr
from headprune.run.runner import resolved
from headprune.run.subject import EVALUATION_BATCH, Subject, prepare_subject, quiet
from headprune.scoring._api import score
from headprune.scoring._base import Scorer
from headprune.scoring._constant import ConstantWork
from headprune.scoring._learned import LearnedScorer


@dataclass(frozen=True)
class Estimate:
    """A stage, about how long it takes, and what that was worked out from; None where nothing
    was."""

    stage: str
    seconds: float | None
    basis: str


@dataclass(frozen=True)
class DryRun(Value):
    """What ``dry_run`` found.

    Args:
        name: The recipe's.
        model: Its class.
        device: Where it would run.
        parameters: Of the whole model.
        rows: Rows by purpose.
        sites: The attention modules that can lose heads.
        budget: What may stay, in words.
        stages: Estimates from one or two batches of each kind.
        memory: Bytes by what they are for.
    """

    name: str
    model: str
    device: str
    parameters: int
    rows: FrozenDict
    sites: tuple[AttentionSite, ...]
    budget: str
    stages: tuple[Estimate, ...]
    memory: FrozenDict

    @property
    def seconds(self) -> float:
        """Of all stages that could be estimated."""
        return sum(stage.seconds or 0.0 for stage in self.stages)

    def __str__(self) -> str:
        heads = sum(len(site.heads) for site in self.sites)
        units = sum(len(site.units) for site in self.sites)
        rows = ", ".join(f"{name} {count:,}" for name, count in self.rows.items())
        lines = [
            f"{self.name}: {self.model}, {self.parameters:,} parameters on {self.device}",
            f"rows: {rows}",
            (
                f"{heads} heads in {units} units that go together, at {len(self.sites)} sites;"
                f" {self.budget}"
            ),
            *(f"  {site}" for site in self.sites),
            f"about {duration(self.seconds)}:",
        ]
        for stage in self.stages:
            about = "not estimated" if stage.seconds is None else duration(stage.seconds)
            lines.append(f"  {stage.stage:<10} {about:>14}  {stage.basis}")
        lines.append(f"memory, at least {size(sum(self.memory.values()))}:")
        lines += [f"  {size(count):>10}  {what}" for what, count in self.memory.items()]
        return "\n".join([*lines, "nothing was trained, cut or written"])


def dry_run(
    recipe: str | Path | Recipe,
    settings: Iterable[str] = (),
    *,
    say: Callable[[str], None] = to_stderr,
) -> DryRun:
    """Goes as far as data and model, and times one batch of what a run would do with them; writes
    nothing.

    Args:
        recipe: A path, the name of a shipped recipe, or a Recipe.
        settings: ``dotted.key=value`` overrides.
        say: Takes lines of progress.

    Raises:
        HeadPruneError: what a run would refuse.
    """
    chosen = resolved(recipe, settings, None)
    quiet()
    subject = prepare_subject(
        chosen, Journal(chosen.name, chosen.model_dump(), None, say), train=False
    )
    say("[estimate]")
    step = _Step(subject)
    budgets = {"": chosen.select.budget} if not chosen.select.sites else chosen.select.budgets
    return DryRun(
        chosen.name,
        type(subject.model).__name__,
        str(device_of(subject.model)),
        sum(p.numel() for p in subject.model.parameters()),
        FrozenDict({name: len(rows) for name, rows in subject.data.examples.items()}),
        tuple(subject.sites),
        ", ".join(f"{key}: {budget}" if key else str(budget) for key, budget in budgets.items()),
        tuple(_stages(subject, step)),
        FrozenDict(_memory(subject, step)),
    )


def duration(seconds: float) -> str:
    """A length of time as people say it.

    >>> duration(7.4), duration(312), duration(8000)
    ('7 s', '5 min', '2.2 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Bytes as people say them.

    >>> size(900), size(88_000_000), size(3.2e9)
    ('900 bytes', '88 MB', '3.2 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


class _Step:
    """One training batch: how long forward and backward take, and what is kept between the two."""

    def __init__(self, subject: Subject) -> None:
        trained = subject.recipe.train
        self.rows = trained.batch_size if trained else subject.recipe.score.batch_size
        batch = subject.data.collate(subject.data.examples["train"][: self.rows])
        self.rows = min(self.rows, len(subject.data.examples["train"]))
        self.kept_bytes = 0
        with undisturbed(subject.model, frozen=False):
            self._pass(subject.model, batch)
            start = perf_counter()
            self._pass(subject.model, batch)
            self.seconds = perf_counter() - start

    def _pass(self, model: nn.Module, batch: Any) -> None:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        wanted = [p for p in model.parameters() if p.requires_grad]
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            loss = default_loss(model, to_device(batch, device_of(model))).mean()
        torch.autograd.grad(
            loss, wanted, allow_unused=True
        )  # what would be trained keeps its .grad as it is
        self.kept_bytes = sum(count for place, count in kept.items() if place not in weights)

    def of(self, rows: int) -> float:
        """Seconds of so many rows."""
        return self.seconds * rows / self.rows


def _stages(subject: Subject, step: _Step) -> Iterable[Estimate]:
    recipe, counts = (
        subject.recipe,
        {name: len(rows) for name, rows in subject.data.examples.items()},
    )
    per_step = f"a batch of {step.rows} takes {1e3 * step.seconds:.0f} ms there and back"
    if recipe.train is not None:
        epochs = recipe.train.epochs
        yield Estimate(
            "train", step.of(round(epochs * counts["train"])), f"{epochs} epochs; {per_step}"
        )
    yield from _scoring(subject, step)
    yield _evaluations(subject)
    for wanted in recipe.recover:
        method: Any = configured(recovery.registry, wanted.method, wanted.settings)
        name = f"recover ({wanted.method})"
        if method.trains and getattr(method, "epochs", None):
            rows = counts[wanted.rows or "train"]
            yield Estimate(
                name, step.of(round(method.epochs * rows)), f"{method.epochs} epochs; {per_step}"
            )
        else:
            yield Estimate(name, None, f"on {counts[wanted.rows or 'calibration']:,} rows")
    if recipe.select.timed:
        yield Estimate("latency", 2 * recipe.select.latency.seconds, "as long as the recipe says")
    if recipe.bench is not None:
        cells = len(recipe.bench.batch_sizes) * len(recipe.bench.lengths or [0])
        cells *= 1 if recipe.bench.new_tokens is None else 3
        yield Estimate(
            "bench", cells * recipe.bench.seconds, f"{cells} cells, {recipe.bench.seconds:g} s each"
        )


def _scoring(subject: Subject, step: _Step) -> Iterable[Estimate]:
    """From the scorer itself on one batch and on two; learned gates are as long as their steps.

    Work that does not grow with the data is measured apart, as small a part of it as there is.
    """
    scorer = scorer_of(subject)
    if isinstance(scorer, AutoOfRun):
        yield from _choosing(subject, step, scorer)
    else:
        seconds, words = _one_scorer(subject, step, scorer)
        basis = words if isinstance(scorer, LearnedScorer) else f"{_named(subject)}{words}"
        yield Estimate("score", seconds, basis)


def _named(subject: Subject) -> str:
    """The recipe's scorer, what it scores, and how much of it is timed."""
    wanted, rows = subject.recipe.score, len(subject.data.examples["calibration"])
    count = len(subject.data.batches("calibration", wanted.batch_size))
    measured = "" if count < 3 else ", 2 of which were timed"
    until = ", at most" if wanted.until else ""
    return f"{wanted.scorer} on {rows:,} rows in {count} batches{measured}{until}"


def _one_scorer(subject: Subject, step: _Step, scorer: Scorer) -> tuple[float, str]:
    """Seconds of one scorer, and in words what they rest on beside its batches."""
    if isinstance(scorer, LearnedScorer):
        return step.of(scorer.steps * scorer.block), f"{scorer.steps} steps of {scorer.block} rows"
    batches = subject.data.batches("calibration", subject.recipe.score.batch_size)
    constant, words = 0.0, ""
    passes = scorer
    if isinstance(scorer, ConstantWork):
        constant, words = _constant(subject, scorer)
        passes = scorer.only_passes()
    first = _timed(subject, passes, batches[:1], subject.sites)
    each = (
        0.0
        if len(batches) == 1
        else max(_timed(subject, passes, batches[:2], subject.sites) - first, 0.2 * first)
    )
    return first + each * (len(batches) - 1) + constant, words


def _choosing(subject: Subject, step: _Step, auto: AutoOfRun) -> Iterable[Estimate]:
    """``auto``: its candidates, each as it is alone, then its plans, by one cut, refit and judging
    in small.

    That is timed on a few rows and on twice as many, because solving takes as long for few rows as
    for many.
    """
    scored = sum(_one_scorer(subject, step, candidate)[0] for candidate in auto.scorers)
    yield Estimate(
        "score", scored, f"{_named(subject)}: {len(auto.candidates)} scorers, one after the other"
    )
    size = subject.recipe.score.batch_size
    batches = subject.data.batches("calibration", size)
    few = -(-2 * auto.folds // size)  # batches with at least two rows a fold
    once = _judged_in(auto, batches[:few])
    more = max(_judged_in(auto, batches[: 2 * few]) - once, 0.0) if len(batches) > few else 0.0
    judged = auto.most_plans * auto.folds * (once + more * (len(batches) / few - 1))
    rows = " and ".join(f"{n:,}" for n in sorted({_rows(subject, few), _rows(subject, 2 * few)}))
    yield Estimate("choose", judged, f"{auto.said}; one such time was measured, on {rows} rows")


def _rows(subject: Subject, batches: int) -> int:
    """Rows of so many batches."""
    return min(batches * subject.recipe.score.batch_size, len(subject.data.examples["calibration"]))


def _judged_in(auto: AutoOfRun, batches: list[Any]) -> float:
    """Seconds of one cut, refit and judging on these batches."""
    start = perf_counter()
    auto.judge_once(batches)
    return perf_counter() - start


def _constant(subject: Subject, scorer: ConstantWork) -> tuple[float, str]:
    """Seconds of a scorer's work after its passes, and in words what they rest on: one run at the
    largest site."""
    sites = [site for site in reversed(subject.sites) if site.heads]
    widest = max(
        sites, key=lambda site: len(site.heads) * site.value_dim
    )  # of equals the last: gradients end there
    alone = Sites([widest], subject.sites.layouts.values())
    once: Any = replace(scorer, blocks=1)  # type: ignore[type-var]
    few = subject.data.batches("calibration", 2)[:1]
    whole, passes = (_timed(subject, s, few, alone) for s in (once, once.only_passes()))
    runs = 1 if scorer.blocks == 1 else scorer.blocks + 1
    seconds = max(whole - passes, 0.0) * runs * len(sites)
    parts = (
        f"one of {runs * len(sites)} equal parts was timed (the largest site, without a standard"
        " error)"
    )
    return seconds, f"; {duration(seconds)} of it after the passes, of which {parts}"


def _timed(subject: Subject, scorer: Scorer, batches: list[Any], sites: Sites) -> float:
    """Seconds that scoring these batches takes."""
    start = perf_counter()
    score(subject.model, batches, scorer, sites=sites, progress=False)
    return perf_counter() - start


def _evaluations(subject: Subject) -> Estimate:
    """The base model and every recovery on test and validation rows, the baselines on test rows."""
    recipe = subject.recipe
    both = 2 + len(recipe.recover)
    alone = recipe.score.random_draws + recipe.score.magnitude
    counts = {name: len(subject.data.examples[name]) for name in ("test", "validation")}
    few = {name: rows[:EVALUATION_BATCH] for name, rows in subject.data.examples.items()}
    targets = {name: rows[:EVALUATION_BATCH] for name, rows in subject.data.targets.items()}
    little = replace(subject, data=replace(subject.data, examples=few, targets=targets))
    start = perf_counter()
    little.evaluate(subject.model, "test", little.data.evaluation("test", EVALUATION_BATCH))
    per_row = (perf_counter() - start) / len(few["test"])
    seconds = per_row * (both * sum(counts.values()) + alone * counts["test"])
    return Estimate(
        "quality", seconds, f"{both} times on test and validation rows, {alone} more on test rows"
    )


def _memory(subject: Subject, step: _Step) -> dict[str, int]:
    """Bytes that are there at the same time at the worst moment: training, or scoring beside the
    cut copy."""
    weights = sum(p.numel() * p.element_size() for p in subject.model.parameters())
    found = {"weights of the whole model and of its cut copy": 2 * weights}
    trains = subject.recipe.train is not None or subject.recipe.gradual is not None
    trains = trains or any(
        configured(recovery.registry, s.method, s.settings).trains for s in subject.recipe.recover
    )
    if trains:
        trained = sum(
            p.numel() * p.element_size() for p in subject.model.parameters() if p.requires_grad
        )
        found["gradients and both moments of AdamW"] = 3 * trained
    found[f"what a batch of {step.rows} keeps for its gradients"] = step.kept_bytes
    return found
