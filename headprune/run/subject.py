"""The subject of a run: its data, and its loaded, built or trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune import recovery, scoring, selection
from headprune.bench.answers import evaluate_answers
from headprune.bench.latency_tables import latency_table
from headprune.bench.quality import Quality, evaluate
from headprune.bench.translation import check_sacrebleu, evaluate_translation
from headprune.checkpoints.checkpoint import from_pretrained, save_pretrained
from headprune.choice._held_out import LEAST_ROWS
from headprune.core.errors import HeadPruneError, InvalidValue, UnsupportedModel
from headprune.core.files import staged, write_atomic
from headprune.core.heads import AttentionSite, HeadCounts, Policy
from headprune.core.latency import LatencyTable
from headprune.core.layout import AttentionLayout
from headprune.core.plan import Budget, allowance
from headprune.core.record import Comparison, QualityRow
from headprune.core.samples import Curvature
from headprune.core.units import CostTable
from headprune.data.datasets import Data, RawData, encode_rows, load_rows
from headprune.data.imported import check_takes, own_layouts
from headprune.data.label_order import check_order, facts_of_labels, mapping_words
from headprune.data.labels import number_labels
from headprune.data.models import (
    Loaded,
    Preparation,
    build_model,
    load_model,
    longest_input,
    open_model,
    prepare,
    resolve_device,
)
from headprune.data.overlap import read_notes, read_twice
from headprune.model.losses import default_loss
from headprune.model.sites import Sites, bind, find_sites
from headprune.recipes.schema import Recipe, SelectSection
from headprune.recipes.validate import configured
from headprune.recovery._api import recover_
from headprune.run.journal import BASE, ROWS, Journal
from headprune.run.judging import compared, interval_of
from headprune.run.launched import Launch
from headprune.run.progress import Progress
from headprune.run.surroundings import git_commit, hardware, versions
from headprune.scoring._base import ScoringProblem
from headprune.selection._api import count_hint, incomparable, reads_prices
from headprune.selection._base import Selector
from headprune.selection._groups import sites_by_budget
from headprune.selection._task import check_possible

#: Rows per batch of every evaluation.
EVALUATION_BATCH = 64
#: Splits that models are measured on.
_SPLITS = ("test", "validation")
#: Calibration rows that ``ladder`` needs with a selector that measures losses.
_LEAST_MEASURED = 4
#: Rows of the small batch that proofs run on.
_EXAMPLE_ROWS = 8


@dataclass(frozen=True)
class Subject:
    """What a run works on: recipe, data and model.

    Args:
        recipe: The recipe.
        journal: The run's record and its lines of progress.
        data: Encoded rows, by purpose.
        model: The original model; never cut.
        preparation: Its tokenizer or image processor.
        launch: This process, if several processes score together; else None.
    """

    recipe: Recipe
    journal: Journal
    data: Data
    model: nn.Module
    preparation: Preparation
    launch: Launch | None = None

    @cached_property
    def example(self) -> Any:
        """A small batch of test rows, for proofs and for counting sizes."""
        return self.data.collate(self.data.examples["test"][:_EXAMPLE_ROWS])

    @cached_property
    def sites(self) -> Sites:
        """The attention modules and, if asked for, feed-forwards, with the recipe's policy for
        shared key/value heads."""
        return _find_sites(self.model, self.recipe)

    def whole(self) -> nn.Module | None:
        """Build the uncut model anew if its class is the user's own; else None.

        A checkpoint of such a class holds weights only, which are loaded into a built model.
        """
        if self.recipe.model.import_path is None:
            return None
        return build_model(self.recipe, ())

    @cached_property
    def latency(self) -> LatencyTable | None:
        """Latency table, measured at first use; None if no budget needs it."""
        wanted = self.recipe.select
        if not wanted.timed:
            return None
        at = wanted.latency
        return latency_table(
            self.model,
            self.example,
            batch_size=at.batch_size,
            length=at.length,
            sites=self.sites,
            seconds=at.seconds,
        )

    @cached_property
    def _batches(self) -> dict[str, list[Any]]:
        return {split: self.data.evaluation(split, EVALUATION_BATCH) for split in _SPLITS}

    def evaluate(self, model: nn.Module, split: str, batches: list[Any]) -> Quality:
        """Evaluate a model on the batches of a split, by the metric of the task."""
        # Translations and answers are generated and compared with references.
        if self.recipe.task == "translation":
            decoding = self.recipe.decode.model_dump()
            references = self.data.references(split)
            tokenizer = self.preparation.tokenizer
            return evaluate_translation(model, batches, references, tokenizer, **decoding)
        if self.recipe.task == "question_answering":
            return evaluate_answers(model, batches, self.data.references(split))
        return evaluate(
            model,
            batches,
            bits=self.recipe.data.tokenizer == "characters",
            metric=self.recipe.metric,
        )

    @cached_property
    def base(self) -> dict[str, Quality]:
        """Results of the uncut model, which others are compared with; read it without gates."""
        return {split: self.evaluate(self.model, split, self._batches[split]) for split in _SPLITS}

    def judge(self, model: nn.Module, split: str) -> Quality:
        """Evaluate a model on all rows of a split."""
        return self.evaluate(model, split, self._batches[split])

    def report(
        self, model: nn.Module, name: str, kept: HeadCounts, trained: bool = False
    ) -> dict[str, Quality]:
        """Evaluate a model on test and validation rows, and note and print both.

        A run chooses nothing by these figures. A gated model is compared with ``base``, which must
        have been read before.

        Returns:
            The results by split.
        """
        # 1. The metric of the task, with its interval and its difference from the uncut model's.
        by_split: dict[str, Quality] = {}
        rows: list[QualityRow] = []
        comparisons: tuple[Comparison, ...] = ()
        for split in _SPLITS:
            quality = self.base[split] if name == "base" else self.judge(model, split)
            by_split[split] = quality
            rows.append(quality_row(quality, name, kept, split, trained))
            if name != "base":
                comparisons += compared(name, "base", split, [self.base[split]], [quality])
        self.journal.note(quality=tuple(rows), comparisons=comparisons)
        texts = [f"{name}: {row.split} {row.metric} {row.value:.4f}" for row in rows]
        self.journal.tell(", ".join(texts))

        # 2. Further metrics of the task, such as F1 of a question's answers.
        for metric in by_split["test"].more:
            values = {split: quality.more[metric] for split, quality in by_split.items()}
            earlier = self.journal.record.metrics.get(metric, {})
            self.journal.note(metrics={metric: {**earlier, name: values}})
            texts = [f"{name}: {split} {metric} {value:.4f}" for split, value in values.items()]
            self.journal.tell(", ".join(texts))
        return by_split


def quality_row(
    quality: Quality, name: str, kept: HeadCounts, split: str, trained: bool = False
) -> QualityRow:
    """Make a row of the accuracy table."""
    low, high = interval_of(quality)
    return QualityRow(
        name,
        kept.heads,
        quality.metric,
        quality.value,
        split,
        quality.n_examples,
        quality.loss,
        trained=trained,
        low=low,
        high=high,
        kept_neurons=kept.neurons,
    )


def quiet() -> None:
    """Silence progress bars and messages of the libraries."""
    import datasets
    import huggingface_hub
    import transformers

    # It would report every retry when the hub cannot be reached.
    huggingface_hub.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def prepare_subject(
    recipe: Recipe,
    journal: Journal,
    base: Path | None = None,
    *,
    train: bool = True,
    progress: Progress | None = None,
) -> Subject:
    """Load the data and the model, and train the model if the recipe says so.

    Args:
        recipe: The recipe.
        journal: The run's record and its lines of progress.
        base: A folder that ``save_base`` wrote for this recipe: its model is loaded and not
            trained again.
        train: Train if the recipe says so. Without training, the model is only good for measuring
            what it costs.
        progress: Of a run, so that an earlier run's training is reused.
    """
    progress = progress or Progress(journal)

    # 1. Note the machine and the versions.
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if recipe.task == "translation":
        check_sacrebleu("task")
    device = resolve_device(recipe.device)
    known, machine = versions(), hardware(device)
    journal.note(
        versions=known,
        hardware=machine,
        git_commit=git_commit(),
        seeds={"seed": recipe.seed},
    )

    # 2. Load the rows.
    with journal.stage("data"):
        raw = _load_rows(recipe, journal)
    progress.begin(recipe, raw.facts, device.type, machine, known)

    # 3. Train now, unless there is a trained model in `base` or in the run's folder.
    train = train and recipe.train is not None and base is None
    if train and journal.folder is not None and progress.done("train"):
        train = False
        base = journal.folder / BASE

    # 4. Build or load the model, and encode the rows for it.
    with journal.stage("model"):
        subject = _load_model_and_encode(recipe, journal, raw, base, device)
    if train:
        train_once = partial(_train_, subject, progress.work("train"))
        progress.once("train", train_once, lambda: None, (BASE,))
    return subject


def _load_rows(recipe: Recipe, journal: Journal) -> RawData:
    """Load the data and note which rows serve which purpose."""
    raw = load_rows(recipe)
    journal.note(rows=raw.facts)
    if journal.folder is not None:
        write_atomic(journal.folder / ROWS, (json.dumps(raw.numbers()) + "\n").encode())
    counts = [f"{name} {len(rows)}" for name, rows in raw.splits.items()]
    journal.tell(", ".join(counts))
    overlap = raw.facts["overlap"]["given"]
    if not overlap["test"]["train"] + overlap["validation"]["train"]:
        journal.tell("no test or validation row is among the train rows")
    journal.warn(raw.warnings)
    return raw


def _load_model_and_encode(
    recipe: Recipe, journal: Journal, raw: RawData, base: Path | None, device: torch.device
) -> Subject:
    """Load the model and encode the rows; refuse now whatever a later stage would refuse."""
    # 1. The tokenizer or image processor, and the model.
    n_warnings = len(raw.warnings)  # these are noted already
    raw = number_labels(recipe, raw)
    preparation = prepare(recipe, raw.texts, base)
    if base is None:
        loaded = load_model(recipe, raw.labels, preparation)
    else:
        loaded = Loaded(_open_base(recipe, base))
    model = loaded.model.to(device)
    journal.warn((*raw.warnings[n_warnings:], *loaded.warnings))

    # 2. The rows as the model reads them.
    data = encode_rows(recipe, raw, preparation, dtype=next(model.parameters()).dtype)
    journal.warn(data.warnings)
    _note_overlap(journal, data)

    # 3. Checks that cost little now and much after a training.
    _check_length(recipe, model, data)
    _check_calibration(recipe, len(data.examples["calibration"]))
    if recipe.model.import_path is not None:
        check_takes(model, data.batches("test", _EXAMPLE_ROWS)[0], recipe, len(raw.labels))
    sites = _find_sites(model, recipe)
    _check_select(recipe, model, data, sites)
    _warn_of_nothing(journal, recipe.select, sites)
    _warn_of_prices(journal, recipe, sites)
    if base is None:
        _check_labels(recipe, journal, model, data, raw)

    n_parameters = sum(p.numel() for p in model.parameters())
    journal.tell(f"{type(model).__name__}, {n_parameters:,} parameters on {device}")
    return Subject(recipe, journal, data, model, preparation)


def _note_overlap(journal: Journal, data: Data) -> None:
    """Note and print which encoded rows serve two purposes, such as training and test."""
    overlap = read_twice(data.examples)
    journal.note(rows={"overlap": {**journal.record.rows["overlap"], "read": overlap}})
    journal.warn(read_notes(overlap, data.examples))


def _check_labels(
    recipe: Recipe, journal: Journal, model: nn.Module, data: Data, raw: RawData
) -> None:
    """Print which label is which class, and check that by the model's answers."""
    if not raw.labels:
        return
    # A model that is trained here, or of a class of the user, gets its labels from the data.
    new = recipe.train is not None or recipe.model.class_name is not None
    journal.tell(mapping_words(raw, new))
    if new:
        return
    fit, notes = check_order(model, data, raw)
    journal.tell(f"the model is {fit}")
    journal.note(metrics={"labels": facts_of_labels(raw, fit)})
    journal.warn(notes)


def _train_(subject: Subject, work: Path | None) -> None:
    """Train the model and, if the run has a folder, save it."""
    recipe, journal, model = subject.recipe, subject.journal, subject.model
    assert recipe.train is not None
    # The recipe's section has the settings of `finetune`, and the batch size.
    settings = {k: v for k, v in recipe.train.model_dump().items() if k != "batch_size"}
    method = configured(recovery.registry, "finetune", {**settings, "seed": recipe.seed})
    loader = subject.data.loader("train", recipe.train.batch_size)
    leave = work is not None
    report = recover_(
        model, loader, method, progress=journal.progress, folder=work, leave_checkpoint=leave
    )
    journal.note(metrics={"training": {"seconds": round(report.seconds, 3), **report.metrics}})
    journal.tell(str(report).partition("\n")[0])
    if journal.folder is not None:
        save_base(model, subject.preparation, journal.folder / BASE, subject.sites)


def _open_base(recipe: Recipe, folder: Path) -> nn.Module:
    """Load the base model from a folder, for a user's class into a built model."""
    if recipe.model.import_path is None:
        return open_model(str(folder), "the base model")
    model = build_model(recipe, ())
    return from_pretrained(folder, model, _find_sites(model, recipe))


def _find_sites(model: nn.Module, recipe: Recipe) -> Sites:
    """Find the model's sites; refuse a policy or feed-forwards that no layout has."""
    layouts, policy = own_layouts(recipe.model), recipe.select.policy
    if not recipe.select.feed_forward:
        return _attention(model, layouts, policy)
    try:
        return find_sites(model, layouts, policy, feed_forward=True)
    except UnsupportedModel as error:
        _attention(model, layouts, policy)  # raises its own error for attention
        must = "left out for a model without feed-forwards that headprune knows"
        hint = f"{error.where} has {error.got}. {error.hint}"
        hint += " In a terminal, --no-feed-forward cuts heads alone."
        raise InvalidValue("select.feed_forward", must, "true", hint) from error


def _attention(model: nn.Module, layouts: Sequence[AttentionLayout], policy: Policy) -> Sites:
    """Find the attention of a model; refuse a policy that one of its layouts does not have."""
    if policy == "group":  # every layout has it
        return find_sites(model, layouts)
    try:
        return find_sites(model, layouts, policy)
    except UnsupportedModel as error:
        find_sites(model, layouts)  # raises its own error if the model has no sites at all
        hint = f"That attention must be {error.must}."
        raise InvalidValue(
            "select.policy", f"one that {error.where} has", repr(policy), hint
        ) from error


def _check_calibration(recipe: Recipe, n_rows: int) -> None:
    """Refuse fewer rows than ``auto`` can deal to folds, or than measured plans can be compared
    on."""
    wanted = recipe.score
    measures = "loss" in selection.registry.get(recipe.select.selector).needs
    if wanted.scorer == "ladder" and measures and n_rows < _LEAST_MEASURED:
        must = f"at least {_LEAST_MEASURED} rows: plans are compared on half of them"
        hint = "Give more rows, or set select.selector to knapsack."
        raise InvalidValue("data.calibration", must, n_rows, hint)
    if wanted.scorer != "auto":
        return
    least = LEAST_ROWS * configured(scoring.registry, "auto", wanted.settings).folds
    if n_rows < least:
        must = f"at least {least} rows, because auto holds a part of them out"
        hint = "Give more rows, or set score.scorer to another one: taylor, for example."
        raise InvalidValue("data.calibration", must, n_rows, hint)


def selector_of(recipe: Recipe, sites: Sequence[AttentionSite]) -> Selector:
    """The recipe's selector, with the default of ``min_heads`` filled in."""
    wanted = recipe.select
    selector: Selector = configured(selection.registry, wanted.selector, wanted.settings)
    # `auto` measures whole plans, and some of its candidates measure prices.
    priced = recipe.score.scorer in ("ladder", "auto") and reads_prices(selector)
    return selector.with_minimum(sites, wanted.budgets or wanted.budget, priced)


def _check_select(recipe: Recipe, model: nn.Module, data: Data, sites: Sites) -> None:
    """Refuse budgets and heads of sites that the model lacks, and budgets that cannot be met."""
    wanted = recipe.select
    if wanted.sites:
        sites_by_budget(sites, wanted.budgets)
    selector = selector_of(recipe, sites)
    _check_curvature(recipe, selector, sites)
    budgets: Budget | dict[str, Budget]
    if wanted.budgets:
        budgets = {key: _untimed(budget) for key, budget in wanted.budgets.items()}
    else:
        budgets = _untimed(wanted.budget)
    costs = _costs_of(recipe, model, data, sites)
    try:
        check_possible(sites, selector, wanted.must_keep, wanted.must_remove, budgets, costs=costs)
    except HeadPruneError as error:
        # Name the recipe's key instead of the argument of `select`.
        where = error.where
        for name in ("must_keep", "must_remove"):
            where = where.replace(f"select({name}=)", f"select.{name}")
        raise type(error)(where, error.must, error.got, error.hint) from None


def _check_curvature(recipe: Recipe, selector: Selector, sites: Sites) -> None:
    """Refuse a selector that reads the curvature, where there is none or it is too large."""
    if "curvature" not in selector.needs:
        return
    name = repr(recipe.select.selector)
    too_large = Curvature.too_large(sum(len(site.units) for site in sites))
    if too_large:
        hint = f"{too_large} Take another selector, or score heads alone."
        must = "one that reads scores alone, for so many units"
        raise InvalidValue("select.selector", must, name, hint)
    scorer = recipe.score.scorer
    has_neurons = any(site.is_feed_forward for site in sites)
    if scorer == "ladder" or (scorer == "auto" and has_neurons):
        must = "one that needs no curvature, which these scores do not have"
        hint = "Set score.scorer=fisher or ggn, or take another selector."
        raise InvalidValue("select.selector", must, name, hint)


def _untimed(budget: Budget) -> Budget:
    """All heads in place of a speed, which is checked once its latency table is measured."""
    if budget.kind != "speedup":
        return budget
    return Budget(keep_heads=1.0, tensor_parallel=budget.tensor_parallel)


def _costs_of(recipe: Recipe, model: nn.Module, data: Data, sites: Sites) -> CostTable | None:
    """What the units cost, measured as scoring does; None where no budget asks for it."""
    wanted = recipe.select
    kinds = {budget.kind for budget in (wanted.budgets or {"": wanted.budget}).values()}
    if kinds <= {"keep_heads", "speedup"}:
        return None
    batches = data.of_like_length("calibration", recipe.score.batch_size)[:1]
    problem = ScoringProblem(model, bind(model, sites), batches, default_loss, progress=False)
    problem.measure_costs()
    return problem.costs


def _warn_of_prices(journal: Journal, recipe: Recipe, sites: Sites) -> None:
    """Warn of a selector that does not read the prices which ``ladder`` measures, and of scores
    that do not compare heads with neurons."""
    selector = selector_of(recipe, sites)
    budget = recipe.select.budgets or recipe.select.budget
    journal.warn(incomparable(recipe.score.scorer, sites, budget, selector))
    if recipe.score.scorer == "ladder" and not reads_prices(selector):
        note = "does not read the prices that the scorer ladder measures"
        name = recipe.select.selector
        journal.warn([f"select.selector: {name} {note}; knapsack and repriced do."])


def _warn_of_nothing(journal: Journal, wanted: SelectSection, sites: Sites) -> None:
    """Warn, before any long work, of a count or share that allows every head."""
    if wanted.keep_heads is None or wanted.sites or wanted.must_remove:
        return
    present = HeadCounts.present(sites).heads
    if allowance(wanted.keep_heads, present) >= present:
        note = f"the budget allows all {present} heads: nothing will be removed."
        journal.warn([f"select.keep_heads: {note}{count_hint(wanted.budget, present)}"])


def _check_length(recipe: Recipe, model: nn.Module, data: Data) -> None:
    """Refuse inputs that are longer than the model can read, before any long work."""
    limit = longest_input(model)
    if limit is None:
        return
    longest = 0
    for examples in data.examples.values():
        for example in examples:
            longest = max(longest, len(example.get("input_ids", ())))
    lengths = {"data.max_length": longest}
    if recipe.select.latency.length is not None:
        lengths["select.latency.length"] = recipe.select.latency.length
    if recipe.bench is not None and recipe.bench.lengths is not None:
        lengths["bench.lengths"] = max(recipe.bench.lengths)
    for key, length in lengths.items():
        if length > limit:
            must = f"at most {limit}, what the model can read"
            raise InvalidValue(key, must, f"{length} tokens")


def save_base(model: nn.Module, preparation: Preparation, folder: Path, sites: Sites) -> None:
    """Save the trained model before it is cut.

    An uncut model of Transformers is saved in Transformers' own format, any other in headprune's.
    """
    whole = all(len(site.heads) == site.n_query_heads for site in sites)
    if isinstance(model, PreTrainedModel) and whole:
        with staged(folder) as place:
            for part in (model, *preparation.tools):
                part.save_pretrained(place)
    else:
        save_pretrained(model, folder, sites, processor=preparation.tools)
