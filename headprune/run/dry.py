"""``headprune run --dry-run``: estimate the time and memory of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headprune import recovery, selection
from headprune.bench.latency import synchronize
from headprune.choice.ladder import Ladder
from headprune.choice.refitted import refitted_loss_of
from headprune.core.codec import FrozenDict, Value
from headprune.core.heads import AttentionSite, HeadCounts, HeadMask
from headprune.core.ladders import PRICE_SETTINGS
from headprune.model.cut import cut_
from headprune.model.losses import default_loss
from headprune.model.running import device_of, tensors, to_device, undisturbed
from headprune.model.sites import Sites, bind
from headprune.recipes.schema import Recipe, RecoverStep, SelectSection
from headprune.recipes.validate import configured
from headprune.run.auto import AutoOfRun, half_of_heads, scorer_of
from headprune.run.choosing import MOST_COPIES
from headprune.run.journal import Journal, to_stderr
from headprune.run.recovering import recover_once
from headprune.run.runner import resolved
from headprune.run.stages import REFITTED_DRAWS, expects_random
from headprune.run.subject import EVALUATION_BATCH, Subject, prepare_subject, quiet
from headprune.scoring._api import score
from headprune.scoring._base import Scorer
from headprune.scoring._constant import ConstantWork
from headprune.scoring._learned import LearnedScorer
from headprune.selection._inner import CALLABLES
from headprune.selection.repriced import Repriced


@dataclass(frozen=True)
class StageEstimate:
    """A stage, its estimated seconds (None: not estimated), and what they are estimated from."""

    stage: str
    seconds: float | None
    basis: str


@dataclass(frozen=True)
class DryRun(Value):
    """The size of a run: model, rows, sites, and estimates of time and memory.

    Args:
        name: Name of the recipe.
        model: Class of the model.
        device: Where it would run.
        parameters: Parameters of the whole model.
        rows: Number of rows by purpose.
        sites: The attention modules and feed-forwards that can be cut.
        budget: What to keep, as text.
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
    stages: tuple[StageEstimate, ...]
    memory: FrozenDict

    @property
    def seconds(self) -> float:
        """Seconds of all stages that could be estimated."""
        return sum(stage.seconds or 0.0 for stage in self.stages)

    def __str__(self) -> str:
        heads = HeadCounts.present(self.sites)
        units = sum(len(site.units) for site in self.sites)

        # 1. What the run works on.
        rows = ", ".join(f"{name} {count:,}" for name, count in self.rows.items())
        lines = [
            f"{self.name}: {self.model}, {self.parameters:,} parameters on {self.device}",
            f"rows: {rows}",
            f"{heads} in {units} prune units, at {len(self.sites)} sites; {self.budget}",
        ]
        lines += [f"  {site}" for site in self.sites]

        # 2. Time, by stage.
        lines.append(f"about {duration(self.seconds)}:")
        width = max((len(stage.stage) for stage in self.stages), default=0)
        for stage in self.stages:
            about = "not estimated" if stage.seconds is None else duration(stage.seconds)
            lines.append(f"  {stage.stage:<{width}} {about:>14}  {stage.basis}")

        # 3. Memory, by purpose.
        lines.append(f"memory, at least {size(sum(self.memory.values()))}:")
        lines += [f"  {size(count):>10}  {what}" for what, count in self.memory.items()]
        lines.append("nothing was trained, cut or written")
        return "\n".join(lines)


def dry_run(
    recipe: str | Path | Recipe,
    settings: Iterable[str] = (),
    *,
    say: Callable[[str], None] = to_stderr,
) -> DryRun:
    """Estimate a run from one batch of each kind; writes nothing.

    Args:
        recipe: A path, the name of a shipped recipe, or a Recipe.
        settings: ``dotted.key=value`` overrides.
        say: Takes lines of progress.

    Raises:
        HeadPruneError: the same as from a run.
    """
    # 1. Load data and model; an untrained model takes as long as a trained one.
    chosen = resolved(recipe, settings, None)
    quiet()
    journal = Journal(chosen.name, chosen.model_dump(), None, say)
    subject = prepare_subject(chosen, journal, train=False)

    # 2. Time a batch of each kind.
    say("[estimate]")
    step = _TrainingStep(subject)
    return DryRun(
        name=chosen.name,
        model=type(subject.model).__name__,
        device=str(device_of(subject.model)),
        parameters=sum(p.numel() for p in subject.model.parameters()),
        rows=FrozenDict({name: len(rows) for name, rows in subject.data.examples.items()}),
        sites=tuple(subject.sites),
        budget=_budget_words(chosen.select),
        stages=tuple(_stages(subject, step)),
        memory=FrozenDict(_memory(subject, step)),
    )


def _budget_words(wanted: SelectSection) -> str:
    """The budget, or the budget of every group of sites, as text."""
    if not wanted.sites:
        return str(wanted.budget)
    return ", ".join(f"{name}: {budget}" for name, budget in wanted.budgets.items())


def duration(seconds: float) -> str:
    """Format a length of time for people.

    >>> duration(7.4), duration(312), duration(8000)
    ('7 s', '5 min', '2.2 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Format a number of bytes for people.

    >>> size(900), size(88_000_000), size(3.2e9)
    ('900 bytes', '88 MB', '3.2 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


class _TrainingStep:
    """One training batch, timed, with the memory that its gradients need.

    Attributes:
        rows: Rows of the batch.
        seconds: Of one forward and backward pass.
        kept_bytes: Bytes of the activations kept between forward and backward.
    """

    def __init__(self, subject: Subject) -> None:
        section = subject.recipe.train or subject.recipe.score
        examples = subject.data.examples["train"]
        batch = subject.data.collate(examples[: section.batch_size])
        self.rows = min(section.batch_size, len(examples))
        self.kept_bytes = 0
        with undisturbed(subject.model, frozen=False):
            self._run(subject.model, batch)  # the first pass is slower, so it is not timed
            device = device_of(subject.model)
            synchronize(device)
            start = perf_counter()
            self._run(subject.model, batch)
            synchronize(device)
            self.seconds = perf_counter() - start

    def _run(self, model: nn.Module, batch: Any) -> None:
        """Run forward and backward, and count the bytes kept between the two."""
        kept: dict[int, int] = {}  # bytes by address, so that views of one storage count once

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        trained = [p for p in model.parameters() if p.requires_grad]
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.enable_grad(), hooks:
            loss = default_loss(model, to_device(batch, device_of(model))).mean()
        # Not `backward`: the parameters' .grad must not change.
        torch.autograd.grad(loss, trained, allow_unused=True)

        # Weights are kept for the gradients too, but they are counted elsewhere.
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept_bytes = sum(count for place, count in kept.items() if place not in weights)

    def seconds_of(self, rows: int) -> float:
        """Seconds of training on so many rows."""
        return self.seconds * rows / self.rows


def _stages(subject: Subject, step: _TrainingStep) -> Iterable[StageEstimate]:
    """Estimate every stage of the run, in order."""
    recipe = subject.recipe

    # 1. Training: one step is timed.
    if recipe.train is not None:
        n_train = len(subject.data.examples["train"])
        yield _training_estimate("train", step, recipe.train.epochs, n_train)

    # 2. Scoring, judging the plans of `auto`, and choosing.
    yield from _scoring(subject, step)
    yield from _choosing(subject)

    # 3. Evaluations.
    yield _evaluations(subject)

    # 4. Recoveries: those that train are estimated from the training step.
    recoveries = [_recovery_estimate(subject, step, wanted) for wanted in recipe.recover]
    yield from recoveries
    n_random = _refitted_draws(recipe)
    if n_random:
        seconds = n_random * sum(one.seconds or 0.0 for one in recoveries)
        draws = f"{n_random} draw{'s' if n_random > 1 else ''}"
        basis = f"{draws} of random heads, cut and recovered alike"
        yield StageEstimate("random", seconds, basis)

    # 5. Speed: as long as the recipe says.
    if recipe.select.timed:
        seconds = recipe.select.latency.seconds
        basis = f"the table, a cut copy and the cut model, {seconds:g} s each"
        yield StageEstimate("latency", 3 * seconds, basis)
    if recipe.bench is not None:
        cells = len(recipe.bench.batch_sizes) * len(recipe.bench.lengths or [0])
        if recipe.bench.new_tokens is not None:  # prefill and decode are timed as well
            cells *= 3
        basis = f"{cells} cells, {recipe.bench.seconds:g} s each"
        yield StageEstimate("bench", cells * recipe.bench.seconds, basis)


def _choosing(subject: Subject) -> Iterable[StageEstimate]:
    """Estimate the choice of heads, if the selector measures models; others take no time."""
    wanted = subject.recipe.select
    selector = configured(selection.registry, wanted.selector, wanted.settings)
    # While a model is pruned gradually, or where refits are made, cut models are measured.
    predicts_refits = not wanted.recover and subject.recipe.gradual is None
    scorer = scorer_of(subject)
    if isinstance(selector, Repriced) and isinstance(scorer, Ladder) and predicts_refits:
        yield _repricing(subject, selector, scorer)
    elif selector.needs & CALLABLES:
        basis = f"{wanted.selector} measures smaller models while it chooses"
        yield StageEstimate("select", None, basis)


def _refitted_draws(recipe: Recipe) -> int:
    """How many random plans get the recoveries, too."""
    return min(REFITTED_DRAWS, recipe.score.random_draws) if expects_random(recipe) else 0


def _training_estimate(
    stage: str, step: _TrainingStep, epochs: float, n_rows: int
) -> StageEstimate:
    """Estimate a training by the time of one step."""
    per_step = f"a batch of {step.rows} takes {1e3 * step.seconds:.0f} ms forward and backward"
    seconds = step.seconds_of(round(epochs * n_rows))
    return StageEstimate(stage, seconds, f"{epochs:g} epochs; {per_step}")


def _recovery_estimate(subject: Subject, step: _TrainingStep, wanted: RecoverStep) -> StageEstimate:
    """Estimate a recovery: one that trains by the training step, others by a few rows."""
    method: Any = configured(recovery.registry, wanted.method, wanted.settings)
    name = f"recover ({wanted.method})"
    purpose = wanted.rows_of(method.trains)
    n_rows = len(subject.data.some(purpose, wanted.examples).examples[purpose])
    if method.trains:
        steps = getattr(method, "steps", None)
        epochs = steps * wanted.batch_size / n_rows if steps else getattr(method, "epochs", 1)
        return _training_estimate(name, step, epochs, n_rows)

    # Solving takes as long for few rows as for many: only the difference grows with the rows.
    few, twice = min(2 * wanted.batch_size, n_rows), min(4 * wanted.batch_size, n_rows)
    once = _timed_recovery(subject, wanted, purpose, few)
    seconds, timed = once, f"{few:,}"
    if twice > few:
        more = max(_timed_recovery(subject, wanted, purpose, twice) - once, 0.0)
        seconds += more * (n_rows - few) / (twice - few)
        timed += f" and {twice:,}"
    return StageEstimate(name, seconds, f"on {n_rows:,} rows; timed on {timed}")


def _timed_recovery(subject: Subject, wanted: RecoverStep, purpose: str, rows: int) -> float:
    """Seconds of a recovery on this many rows, for a copy with half of the heads and neurons."""
    drawn = subject.data.some(purpose, wanted.examples).examples[purpose]
    examples = {**subject.data.examples, purpose: drawn[:rows]}
    small = replace(subject, data=replace(subject.data, examples=examples))
    pruned = copy.deepcopy(subject.model)
    cut_(pruned, bind(pruned, subject.sites), half_of_heads(subject))
    start = perf_counter()
    recover_once(small, pruned, wanted)
    return perf_counter() - start


def _scoring(subject: Subject, step: _TrainingStep) -> Iterable[StageEstimate]:
    """Estimate the scoring, and for ``auto`` the choice among its candidates."""
    scorer = scorer_of(subject)
    if isinstance(scorer, AutoOfRun):
        yield from _auto(subject, step, scorer)
    else:
        seconds, basis = _one_scorer(subject, step, scorer)
        if not isinstance(scorer, LearnedScorer):
            basis = f"{_scoring_basis(subject)}{basis}"
        yield StageEstimate("score", seconds, basis)


def _scoring_basis(subject: Subject) -> str:
    """The recipe's scorer, the rows it scores on, and how many batches were timed."""
    wanted, n_rows = subject.recipe.score, len(subject.data.examples["calibration"])
    n_batches = -(-n_rows // wanted.batch_size)  # rounded up
    text = f"{wanted.scorer} on {n_rows:,} rows in {n_batches} batches"
    if n_batches >= 3:
        text += ", 2 of which were timed"
    if wanted.until:
        text += "; fewer rows are read if it stops early"
    return text


def _one_scorer(subject: Subject, step: _TrainingStep, scorer: Scorer) -> tuple[float, str]:
    """Estimate one scorer, by its training steps or by its first two batches.

    Returns:
        Seconds, and what they were estimated from besides the batches.
    """
    if isinstance(scorer, LearnedScorer):
        seconds = step.seconds_of(scorer.steps * scorer.block)
        return seconds, f"{scorer.steps} steps of {scorer.block} rows"

    # Work that does not grow with the data is timed apart, on as small a part of it as there is.
    constant, basis = 0.0, ""
    passes = scorer
    if isinstance(scorer, ConstantWork):
        constant, basis = _constant_work(subject, scorer)
        passes = scorer.only_passes()

    n_rows = len(subject.data.examples["calibration"])
    if isinstance(scorer, Ladder) and n_rows > 2 * scorer.examples:  # it measures half of them
        basis = f"; at most, for prices are measured on {scorer.examples:,} rows"
    batches = _typical_first(subject)
    first = _timed(subject, passes, batches[:1], subject.sites)
    per_batch = 0.0
    if len(batches) > 1:
        per_batch = _per_batch(first, _timed(subject, passes, batches[:2], subject.sites))
    return first + per_batch * (len(batches) - 1) + constant, basis


def _per_batch(first: float, both: float) -> float:
    """Seconds of each further batch, from those of one batch and of two.

    At least a fifth of the first, in case the clock says that two batches are as fast as one.
    """
    return max(both - first, 0.2 * first)


def _auto(subject: Subject, step: _TrainingStep, auto: AutoOfRun) -> Iterable[StageEstimate]:
    """Estimate ``auto``: its candidates one by one, then cuts, refits and losses of its plans."""
    # 1. The candidates.
    scored = 0.0
    for candidate in auto.scorers:
        scored += _one_scorer(subject, step, candidate)[0]
    basis = f"{_scoring_basis(subject)}: {len(auto.candidates)} scorers, one after the other"
    yield StageEstimate("score", scored, basis)

    # 2. One plan, on a few rows and on twice as many: solving takes as long for few rows as for
    # many, so only the difference grows with the rows.
    batch_size, n_rows = subject.recipe.score.batch_size, len(subject.data.examples["calibration"])
    batches = _typical_first(subject)
    few = -(-2 * auto.folds // batch_size)  # rounded up: batches with two rows per fold
    once = _timed_plan(auto, batches[:few])
    more = 0.0
    if len(batches) > few:
        more = max(_timed_plan(auto, batches[: 2 * few]) - once, 0.0)

    # 3. All plans and folds.
    of_all_rows = once + more * (len(batches) / few - 1)
    n_plans = auto.most_plans(subject.sites, len(auto.candidates))
    seconds = n_plans * auto.folds * of_all_rows
    samples = sorted({min(few * batch_size, n_rows), min(2 * few * batch_size, n_rows)})
    rows = " and ".join(f"{n:,}" for n in samples)
    judging = auto.judging(subject.sites, len(auto.candidates))
    basis = f"{judging}; one such time was measured, on {rows} rows"
    yield StageEstimate("choose", seconds, basis)


def _repricing(subject: Subject, selector: Repriced, ladder: Ladder) -> StageEstimate:
    """Estimate ``repriced``, if it measures as many plans as its rounds allow."""
    # 1. One batch and two.
    plans = _neighbours(subject)
    batches, batch_size = _typical_first(subject), subject.recipe.score.batch_size
    prepared, measured = _timed_plans(subject, ladder, plans, batches[:1])
    more_prepared = more_measured = 0.0
    if len(batches) > 1:
        both_prepared, both_measured = _timed_plans(subject, ladder, plans, batches[:2])
        more_prepared = _per_batch(prepared, both_prepared)
        more_measured = _per_batch(measured, both_measured)

    # 2. All batches are prepared. Half of the rows of each are measured, up to the ladder's limit.
    n_measured = min(len(batches), 2 * ladder.examples / batch_size)
    prepared += more_prepared * (len(batches) - 1)
    measured += more_measured * max(n_measured - 1, 0.0)

    # 3. All plans.
    n_plans = selector.most_plans(len(subject.sites))
    seconds = prepared + measured * n_plans / len(plans)
    timed = f"{len(plans)} were timed on {min(2, len(batches))} batches"
    basis = f"repriced, up to {n_plans} plans; {timed}"
    if subject.recipe.select.timed:
        basis += f"; again, up to {MOST_COPIES} times, if"
        basis += " the speed of a cut copy is not the predicted one"
    return StageEstimate("select", seconds, basis)


def _neighbours(subject: Subject) -> list[HeadMask]:
    """A mask of half of the heads and neurons, and one per site that keeps that site whole."""
    rows, whole = half_of_heads(subject).rows, HeadMask.full(subject.sites).rows
    places = range(len(rows))
    near = [HeadMask((*rows[:i], whole[i], *rows[i + 1 :])) for i in places]
    return [HeadMask(rows), *near]


def _timed_plans(
    subject: Subject, ladder: Ladder, plans: list[HeadMask], batches: list[Any]
) -> tuple[float, float]:
    """Seconds to prepare, and to measure plans."""
    options: dict[str, Any] = {name: getattr(ladder, name) for name in PRICE_SETTINGS}
    start = perf_counter()
    rise = refitted_loss_of(subject.model, batches, sites=subject.sites, progress=False, **options)
    prepared = perf_counter()
    rise(plans)
    return prepared - start, perf_counter() - prepared


def _typical_first(subject: Subject) -> list[Any]:
    """The scorer's batches, those of about the mean number of tokens first."""
    batches = subject.data.of_like_length("calibration", subject.recipe.score.batch_size)
    sizes = [sum(map(Tensor.numel, tensors(batch))) for batch in batches]
    mean = sum(sizes) / len(sizes)
    order = sorted(range(len(batches)), key=lambda number: abs(sizes[number] - mean))
    return [batches[number] for number in order]


def _timed_plan(auto: AutoOfRun, batches: list[Any]) -> float:
    """Seconds of one cut, refit and evaluation on these batches."""
    start = perf_counter()
    auto.judge_once(batches)
    return perf_counter() - start


def _constant_work(subject: Subject, scorer: ConstantWork) -> tuple[float, str]:
    """Estimate a scorer's work after its passes, from the largest attention and feed-forward.

    Returns:
        Seconds, and what they were estimated from.
    """
    kinds = _kinds(subject.sites)
    seconds = sum(_largest(subject, scorer, sites) * len(sites) for sites in kinds)

    # Standard errors need one more run per block.
    has_neurons = kinds[-1][0].is_feed_forward
    in_one = scorer.blocks == 1 or (has_neurons and scorer.one_block_with_neurons)
    runs = 1 if in_one else scorer.blocks + 1
    parts = runs * sum(map(len, kinds))
    part = f"1 of {parts} equal parts (the largest site, without a standard error)"
    if len(kinds) == 2:
        part = (
            f"2 of {parts} parts (the largest attention and feed-forward, without standard errors)"
        )
    seconds *= runs
    return seconds, f"; {duration(seconds)} of it after the passes, estimated from {part}"


def _kinds(sites: Sites) -> list[list[AttentionSite]]:
    """Sites of attention with heads, and feed-forwards with neurons; those that there are."""
    neurons = [site for site in sites if site.heads and site.is_feed_forward]
    attention = [site for site in sites if site.heads and not site.is_feed_forward]
    return [kind for kind in (attention, neurons) if kind]


def _largest(subject: Subject, scorer: ConstantWork, sites: list[AttentionSite]) -> float:
    """Seconds of a scorer's work after its passes, once, for the largest of some sites."""
    once: Any = replace(scorer, blocks=1)  # type: ignore[type-var]
    few = subject.data.batches("calibration", 2)[:1]
    # Of equally large sites the last one: its backward pass is the shortest.
    widest = max(reversed(sites), key=lambda site: len(site.heads) * site.value_dim)
    alone = Sites([widest], subject.sites.layouts.values())
    whole = _timed(subject, once, few, alone)
    passes = _timed(subject, once.only_passes(), few, alone)
    return max(whole - passes, 0.0)


def _timed(subject: Subject, scorer: Scorer, batches: list[Any], sites: Sites) -> float:
    """Seconds that scoring these batches takes."""
    start = perf_counter()
    score(subject.model, batches, scorer, sites=sites, progress=False)
    return perf_counter() - start


def _evaluations(subject: Subject) -> StageEstimate:
    """Estimate all evaluations from one batch of test rows.

    The base model, the plan, a gradual cut and every recovery are measured on test and validation
    rows, the baselines on test rows only.
    """
    recipe, data = subject.recipe, subject.data
    n_both = 2 + (recipe.gradual is not None) + len(recipe.recover)
    # A scorer is not compared with itself.
    n_test_only = _refitted_draws(recipe)
    if recipe.score.scorer != "random":
        n_test_only += recipe.score.random_draws
    if recipe.score.scorer != "magnitude":
        n_test_only += recipe.score.magnitude

    # Time one batch.
    few = {name: rows[:EVALUATION_BATCH] for name, rows in data.examples.items()}
    targets = {name: rows[:EVALUATION_BATCH] for name, rows in data.targets.items()}
    small = replace(subject, data=replace(data, examples=few, targets=targets))
    start = perf_counter()
    small.evaluate(subject.model, "test", small.data.evaluation("test", EVALUATION_BATCH))
    per_row = (perf_counter() - start) / len(few["test"])

    n_test, n_validation = len(data.examples["test"]), len(data.examples["validation"])
    seconds = per_row * (n_both * (n_test + n_validation) + n_test_only * n_test)
    basis = f"{n_both} times on test and validation rows, {n_test_only} more on test rows"
    return StageEstimate("quality", seconds, basis)


def _matrix_bytes(scorer: Scorer, sites: Sites) -> int:
    """Bytes of the matrices that a scorer keeps of every site."""
    count = 0
    if isinstance(scorer, Ladder):
        count, scorer = 1, scorer.ranker()
    if isinstance(scorer, ConstantWork):
        neurons = any(site.is_feed_forward for site in sites)
        one_block = neurons and scorer.one_block_with_neurons
        count += scorer.matrices * (1 if one_block else scorer.blocks)
    widths = [len(site.heads) * site.value_dim for site in sites]
    return 8 * count * sum(width**2 for width in widths)


def _memory(subject: Subject, step: _TrainingStep) -> dict[str, int]:
    """Bytes needed at once, in training or while the cut copy exists."""
    recipe = subject.recipe
    weights = trained = 0
    for parameter in subject.model.parameters():
        n_bytes = parameter.numel() * parameter.element_size()
        weights += n_bytes
        if parameter.requires_grad:
            trained += n_bytes
    memory = {"weights of the whole model and of its cut copy": 2 * weights}
    scorer = scorer_of(subject)
    candidates = scorer.scorers if isinstance(scorer, AutoOfRun) else [scorer]
    matrices = max(_matrix_bytes(one, subject.sites) for one in candidates)
    if matrices:
        memory["matrices of the scorer, width x width per site"] = matrices

    trains = recipe.train is not None or recipe.gradual is not None
    for wanted in recipe.recover:
        method = configured(recovery.registry, wanted.method, wanted.settings)
        trains = trains or method.trains
    if trains:
        memory["gradients and both moments of AdamW"] = 3 * trained
    memory[f"activations of a batch of {step.rows} for the backward pass"] = step.kept_bytes
    return memory
