"""The subject of a run: data loaded and told apart, model loaded or built and, where the recipe
says so, trained."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune import recovery, selection
from headprune.bench.answers import evaluate_answers
from headprune.bench.latency_tables import latency_table
from headprune.bench.quality import Quality, evaluate
from headprune.bench.translation import check_sacrebleu, evaluate_translation
from headprune.checkpoints.checkpoint import from_pretrained, save_pretrained
from headprune.core.errors import HeadPruneError, InvalidValue, UnsupportedModel
from headprune.core.files import staged, write_atomic
from headprune.core.latency import LatencyTable
from headprune.core.record import QualityRow
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
from headprune.model.sites import Sites, find_sites
from headprune.recipes.schema import Recipe, SelectSection
from headprune.recipes.validate import configured
from headprune.recovery._api import recover_
from headprune.run.journal import BASE, ROWS, Journal
from headprune.run.launched import Launch
from headprune.run.progress import Progress
from headprune.run.surroundings import git_commit, hardware, versions
from headprune.selection._groups import divided
from headprune.selection._task import check_possible

EVALUATION_BATCH = 64
_EXAMPLE_ROWS = 8


@dataclass(frozen=True)
class Subject:
    """What a run works on.

    Args:
        recipe: The recipe.
        journal: Where everything is noted.
        data: Encoded rows.
        model: The original; never cut.
        preparation: Its tokenizer or image processor.
        launch: This process among several that score together; None where it is the only one.
    """

    recipe: Recipe
    journal: Journal
    data: Data
    model: nn.Module
    preparation: Preparation
    launch: Launch | None = None

    @cached_property
    def example(self) -> Any:
        """A small batch of test rows, for proofs and sizes."""
        return self.data.collate(self.data.examples["test"][:_EXAMPLE_ROWS])

    @cached_property
    def sites(self) -> Sites:
        """The attention modules, with the policy that the recipe cuts them under."""
        return _located(self.model, self.recipe)

    def whole(self) -> nn.Module | None:
        """A freshly built full-size model of a class that no checkpoint can build; None where it
        can."""
        return None if self.recipe.model.import_path is None else build_model(self.recipe, ())

    @cached_property
    def latency(self) -> LatencyTable | None:
        """The latency table of the model as it is, where a budget is one of speed; measured when
        first asked for."""
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
        return {
            split: self.data.evaluation(split, EVALUATION_BATCH) for split in ("test", "validation")
        }

    def evaluate(self, model: nn.Module, split: str, batches: list[Any]) -> Quality:
        """One evaluation on the batches of a split, by the metric of the task."""
        if self.recipe.task == "translation":
            how = self.recipe.decode.model_dump()
            return evaluate_translation(
                model, batches, self.data.references(split), self.preparation.tokenizer, **how
            )
        if self.recipe.task == "question_answering":
            return evaluate_answers(model, batches, self.data.references(split))
        return evaluate(
            model,
            batches,
            bits=self.recipe.data.tokenizer == "characters",
            metric=self.recipe.metric,
        )

    def measure(
        self, model: nn.Module, name: str, kept_heads: int, split: str, trained: bool = False
    ) -> QualityRow:
        """One evaluation, as a row of the accuracy table."""
        return self._row(
            self.evaluate(model, split, self._batches[split]), name, kept_heads, split, trained
        )

    def report(self, model: nn.Module, name: str, kept_heads: int, trained: bool = False) -> None:
        """Measures on test and validation rows and notes both; nothing is ever chosen by either."""
        found = {
            split: self.evaluate(model, split, self._batches[split])
            for split in ("test", "validation")
        }
        rows = [
            self._row(quality, name, kept_heads, split, trained) for split, quality in found.items()
        ]
        self.journal.note(quality=tuple(rows))
        self.journal.tell(
            ", ".join(f"{name}: {row.split} {row.metric} {row.value:.4f}" for row in rows)
        )
        for metric in found["test"].more:
            values = {split: quality.more[metric] for split, quality in found.items()}
            before = self.journal.record.metrics.get(metric, {})
            self.journal.note(metrics={metric: {**before, name: values}})
            self.journal.tell(
                ", ".join(
                    f"{name}: {split} {metric} {value:.4f}" for split, value in values.items()
                )
            )

    @staticmethod
    def _row(found: Quality, name: str, kept_heads: int, split: str, trained: bool) -> QualityRow:
        counted = (found.metric, found.value, split, found.n_examples, found.loss)
        return QualityRow(name, kept_heads, *counted, trained=trained)


def quiet() -> None:
    """Keeps the libraries from writing between our lines."""
    import datasets
    import huggingface_hub
    import transformers

    # It reports every retry of a name that cannot be reached.
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
    """The first stages: surroundings, data, model, training.

    Args:
        recipe: The recipe.
        journal: Where everything is noted.
        base: A folder that ``save_base`` wrote for this recipe: its model is taken as it is, and
            not trained again.
        train: Train where the recipe says so; without, the model is only good for finding out what
            it costs.
        progress: Of a run, which trains once.
    """
    progress = progress or Progress(journal)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if recipe.task == "translation":
        check_sacrebleu("task")
    device = resolve_device(recipe.device)
    known = versions()
    journal.note(
        versions=known,
        hardware=hardware(device),
        git_commit=git_commit(),
        seeds={"seed": recipe.seed},
    )
    with journal.stage("data"):
        raw = load_rows(recipe)
        journal.note(rows=raw.facts)
        if journal.folder is not None:
            write_atomic(journal.folder / ROWS, (json.dumps(raw.numbers()) + "\n").encode())
        journal.tell(", ".join(f"{name} {len(rows)}" for name, rows in raw.splits.items()))
        _warn(journal, raw.warnings)
    progress.begin(recipe, raw.facts, device.type, known)
    train = train and recipe.train is not None and base is None
    if train and journal.folder is not None and progress.done("train"):
        train, base = False, journal.folder / BASE
    with journal.stage("model"):
        before, raw = raw.warnings, number_labels(recipe, raw)
        preparation = prepare(recipe, raw.texts, base)
        opened = None if base is None else Loaded(_open_base(recipe, base))
        loaded = opened or load_model(recipe, raw.labels, preparation)
        model = loaded.model.to(device)
        _warn(journal, (*raw.warnings[len(before) :], *loaded.warnings))
        data = encode_rows(recipe, raw, preparation, dtype=next(model.parameters()).dtype)
        _warn(journal, data.warnings)
        _note_overlap(journal, data)
        _check_length(model, data)
        if recipe.model.import_path is not None:
            check_takes(model, data.batches("test", _EXAMPLE_ROWS)[0], recipe, len(raw.labels))
        sites = _located(model, recipe)  # refused now, not after the training
        _check_select(recipe.select, sites)
        if base is None:
            _check_labels(recipe, journal, model, data, raw)
        journal.tell(
            f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters on"
            f" {device}"
        )
    subject = Subject(recipe, journal, data, model, preparation)
    if train:
        progress.once(
            "train", lambda: _train_(subject, progress.work("train")), lambda: None, (BASE,)
        )
    return subject


def _warn(journal: Journal, warnings: Iterable[str]) -> None:
    """Notes what a reader should know, and tells it now, before any long work."""
    for warning in warnings:
        journal.note(warnings=(warning,))
        journal.tell(f"warning: {warning}")


def _note_overlap(journal: Journal, data: Data) -> None:
    found = read_twice(data.examples)
    journal.note(rows={"overlap": {**journal.record.rows["overlap"], "read": found}})
    _warn(journal, read_notes(found, data.examples))


def _check_labels(
    recipe: Recipe, journal: Journal, model: nn.Module, data: Data, raw: RawData
) -> None:
    """Says which label is which class of a model that comes trained, and looks whether its answers
    fit that."""
    if not raw.labels or recipe.train is not None or recipe.model.class_name is not None:
        return
    journal.tell(mapping_words(raw))
    fit, notes = check_order(model, data, raw)
    journal.tell(f"the model is {fit}")
    journal.note(metrics={"labels": facts_of_labels(raw, fit)})
    _warn(journal, notes)


def _train_(subject: Subject, work: Path | None) -> None:
    """Trains the model and, in a run, saves it."""
    recipe, journal, model = subject.recipe, subject.journal, subject.model
    assert recipe.train is not None
    settings = {k: v for k, v in recipe.train.model_dump().items() if k != "batch_size"}
    method = configured(recovery.registry, "finetune", {**settings, "seed": recipe.seed})
    loader = subject.data.loader("train", recipe.train.batch_size)
    leave = work is not None
    done = recover_(
        model, loader, method, progress=journal.progress, folder=work, leave_checkpoint=leave
    )
    journal.note(metrics={"training": {"seconds": round(done.seconds, 3), **done.metrics}})
    journal.tell(str(done).partition("\n")[0])
    if journal.folder is not None:
        save_base(model, subject.preparation, journal.folder / BASE, subject.sites)


def _open_base(recipe: Recipe, folder: Path) -> nn.Module:
    """The base model that lies in a folder; one of one's own is built and filled."""
    if recipe.model.import_path is None:
        return open_model(str(folder), "the base model")
    model = build_model(recipe, ())
    return from_pretrained(folder, model, _located(model, recipe))


def _located(model: nn.Module, recipe: Recipe) -> Sites:
    """The model's sites; a policy that one of its layouts does not have is the recipe's mistake."""
    layouts, policy = own_layouts(recipe.model), recipe.select.policy
    if policy == "group":
        return find_sites(model, layouts)
    try:
        return find_sites(model, layouts, policy)
    except UnsupportedModel as error:
        find_sites(model, layouts)  # raises where nothing was found at all
        hint = f"There it must be {error.must}."
        raise InvalidValue(
            "select.policy", f"one that {error.where} has", repr(policy), hint
        ) from error


def _check_select(wanted: SelectSection, sites: Sites) -> None:
    """Refuses budgets and heads for sites that the model lacks, and heads that leave a site no
    lawful number."""
    if wanted.sites:
        divided(sites, wanted.budgets)
    selector = configured(selection.registry, wanted.selector, wanted.settings)
    try:
        check_possible(sites, selector, wanted.must_keep, wanted.must_remove)
    except HeadPruneError as error:
        where = error.where
        for name in ("must_keep", "must_remove"):
            where = where.replace(f"select({name}=)", f"select.{name}")
        raise type(error)(where, error.must, error.got, error.hint) from None


def _check_length(model: nn.Module, data: Data) -> None:
    """Refuses examples that are longer than the model can read, before any long work."""
    limit = longest_input(model)
    longest = max(len(e.get("input_ids", ())) for rows in data.examples.values() for e in rows)
    if limit is not None and longest > limit:
        raise InvalidValue(
            "data.max_length", f"at most {limit}, what the model can read", f"{longest} tokens"
        )


def save_base(model: nn.Module, preparation: Preparation, folder: Path, sites: Sites) -> None:
    """The trained model before this run's cut: it exists nowhere else. In Transformers' own format
    if it is one of theirs, and whole."""
    if not isinstance(model, PreTrainedModel) or any(
        len(site.heads) != site.n_query_heads for site in sites
    ):
        save_pretrained(model, folder, sites, processor=preparation.tools)
        return
    with staged(folder) as place:
        for part in (model, *preparation.tools):
            part.save_pretrained(place)
