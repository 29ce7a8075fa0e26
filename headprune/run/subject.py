"""The subject of a run: data loaded and told apart, model loaded or built and, where the recipe says so, trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import recovery, selection
from headprune.bench.latency_tables import latency_table
from headprune.bench.quality import Quality, evaluate
from headprune.bench.translation import check_sacrebleu, evaluate_translation
from headprune.core.errors import HeadPruneError, InvalidValue, UnsupportedModel
from headprune.core.files import write_atomic
from headprune.core.heads import Policy
from headprune.core.latency import LatencyTable
from headprune.core.record import QualityRow
from headprune.model.sites import Sites, find_sites
from headprune.recovery._api import recover_
from headprune.run.data import Data, encode_rows, load_rows
from headprune.run.journal import BASE, ROWS, Journal
from headprune.run.labels import number_labels
from headprune.run.models import Loaded, Preparation, load_model, longest_input, open_model, prepare, resolve_device
from headprune.run.recipe import Recipe, SelectSection
from headprune.run.surroundings import git_commit, hardware, versions
from headprune.run.validate import configured
from headprune.selection._groups import divided
from headprune.selection._task import check_possible
from headprune.surgery.checkpoint import save_pretrained

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
    """

    recipe: Recipe
    journal: Journal
    data: Data
    model: nn.Module
    preparation: Preparation

    @cached_property
    def example(self) -> Any:
        """A small batch of test rows, for proofs and sizes."""
        return self.data.collate(self.data.examples["test"][:_EXAMPLE_ROWS])

    @cached_property
    def sites(self) -> Sites:
        """The attention modules, with the policy that the recipe cuts them under."""
        return find_sites(self.model, policy=self.recipe.select.policy)

    @cached_property
    def latency(self) -> LatencyTable | None:
        """The latency table of the model as it is, where a budget is one of speed; measured when first asked for."""
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
        return {split: self.data.evaluation(split, EVALUATION_BATCH) for split in ("test", "validation")}

    def evaluate(self, model: nn.Module, split: str, batches: list[Any]) -> Quality:
        """One evaluation on the batches of a split, by the metric of the task."""
        if self.recipe.task == "translation":
            how = self.recipe.decode.model_dump()
            return evaluate_translation(model, batches, self.data.references(split), self.preparation.tokenizer, **how)
        return evaluate(model, batches, bits=self.recipe.data.tokenizer == "characters")

    def measure(self, model: nn.Module, name: str, kept_heads: int, split: str, trained: bool = False) -> QualityRow:
        """One evaluation, as a row of the accuracy table."""
        found = self.evaluate(model, split, self._batches[split])
        row = QualityRow(name, kept_heads, found.metric, found.value, split, found.n_examples, found.loss)
        return row if not trained else QualityRow(**{**vars(row), "trained": True})

    def report(self, model: nn.Module, name: str, kept_heads: int, trained: bool = False) -> None:
        """Measures on test and validation rows and notes both; nothing is ever chosen by either."""
        rows = [self.measure(model, name, kept_heads, split, trained) for split in ("test", "validation")]
        self.journal.note(quality=tuple(rows))
        self.journal.tell(", ".join(f"{name}: {row.split} {row.metric} {row.value:.4f}" for row in rows))


def quiet() -> None:
    """Keeps the libraries from writing between our lines."""
    import datasets
    import huggingface_hub
    import transformers

    huggingface_hub.utils.logging.set_verbosity_error()  # every retry of a name that cannot be reached
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def prepare_subject(recipe: Recipe, journal: Journal, base: Path | None = None) -> Subject:
    """The first stages: surroundings, data, model, training.

    Args:
        recipe: The recipe.
        journal: Where everything is noted.
        base: A folder that ``save_base`` wrote for this recipe: its model is taken as it is, and not trained again.
    """
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if recipe.task == "translation":
        check_sacrebleu("task")
    device = resolve_device(recipe.device)
    journal.note(versions=versions(), hardware=hardware(device), git_commit=git_commit(), seeds={"seed": recipe.seed})
    with journal.stage("data"):
        raw = load_rows(recipe)
        journal.note(rows=raw.facts)
        if journal.folder is not None:
            write_atomic(journal.folder / ROWS, (json.dumps(raw.numbers()) + "\n").encode())
        journal.tell(", ".join(f"{name} {len(rows)}" for name, rows in raw.splits.items()))
    with journal.stage("model"):
        raw = number_labels(recipe, raw)
        preparation = prepare(recipe, raw.texts, base)
        opened = None if base is None else Loaded(open_model(str(base), "the base model"))
        loaded = opened or load_model(recipe, raw.labels, preparation)
        model = loaded.model.to(device)
        journal.note(warnings=(*raw.warnings, *loaded.warnings))
        data = encode_rows(recipe, raw, preparation, dtype=next(model.parameters()).dtype)
        _check_length(model, data)
        sites = _located(model, recipe.select.policy)  # refused now, not after the training
        _check_select(recipe.select, sites)
        journal.tell(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters on {device}")
    if recipe.train is not None and base is None:
        with journal.stage("train"):
            settings = {k: v for k, v in recipe.train.model_dump().items() if k != "batch_size"}
            method = configured(recovery.registry, "finetune", {**settings, "seed": recipe.seed})
            done = recover_(model, data.loader("train", recipe.train.batch_size), method)
            journal.note(metrics={"training": {"seconds": round(done.seconds, 3), **done.metrics}})
            journal.tell(str(done).partition("\n")[0])
            if journal.folder is not None:
                save_base(model, preparation, journal.folder / BASE)
    return Subject(recipe, journal, data, model, preparation)


def _located(model: nn.Module, policy: Policy) -> Sites:
    """The model's sites; a policy that one of its layouts does not have is the recipe's mistake."""
    if policy == "group":
        return find_sites(model)
    try:
        return find_sites(model, policy=policy)
    except UnsupportedModel as error:
        find_sites(model)  # raises where nothing was found at all
        hint = f"There it must be {error.must}."
        raise InvalidValue("select.policy", f"one that {error.where} has", repr(policy), hint) from error


def _check_select(wanted: SelectSection, sites: Sites) -> None:
    """Refuses budgets and heads for sites that the model lacks, and heads that leave a site no lawful number."""
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
        raise InvalidValue("data.max_length", f"at most {limit}, what the model can read", f"{longest} tokens")


def save_base(model: nn.Module, preparation: Preparation, folder: Path) -> None:
    """The trained model before this run's cut: it exists nowhere else. In Transformers' own format if it is whole."""
    if any(len(site.heads) < site.n_query_heads for site in find_sites(model)):
        save_pretrained(model, folder)
    else:
        model.save_pretrained(folder)  # type: ignore[operator]
    preparation.save(folder)
