"""The subject of a run: data loaded and told apart, model loaded or built and, where the recipe says so, trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import recovery
from headprune.bench.quality import evaluate
from headprune.core.errors import InvalidValue
from headprune.core.record import QualityRow
from headprune.recovery._api import recover_
from headprune.run.data import Data, encode_rows, load_rows
from headprune.run.journal import BASE, Journal
from headprune.run.models import build_model, prepare, resolve_device
from headprune.run.recipe import Recipe
from headprune.run.surroundings import git_commit, hardware, versions
from headprune.run.validate import configured

_EVALUATION_BATCH = 64
_EXAMPLE_ROWS = 8


@dataclass(frozen=True)
class Subject:
    """What a run works on.

    Args:
        recipe: The recipe.
        journal: Where everything is noted.
        data: Encoded rows.
        model: The original; never cut.
    """

    recipe: Recipe
    journal: Journal
    data: Data
    model: nn.Module

    @cached_property
    def example(self) -> Any:
        """A small batch of test rows, for proofs and sizes."""
        return self.data.collate(self.data.examples["test"][:_EXAMPLE_ROWS])

    @cached_property
    def _batches(self) -> dict[str, list[Any]]:
        return {split: self.data.evaluation(split, _EVALUATION_BATCH) for split in ("test", "validation")}

    def measure(self, model: nn.Module, name: str, kept_heads: int, split: str, trained: bool = False) -> QualityRow:
        """One evaluation, as a row of the accuracy table."""
        found = evaluate(model, self._batches[split])
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
    import transformers

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def prepare_subject(recipe: Recipe, journal: Journal) -> Subject:
    """The first stages: surroundings, data, model, training."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    device = resolve_device(recipe.device)
    journal.note(versions=versions(), hardware=hardware(device), git_commit=git_commit(), seeds={"seed": recipe.seed})
    with journal.stage("data"):
        raw = load_rows(recipe)
        journal.note(rows=raw.facts)
        journal.tell(", ".join(f"{name} {len(rows)}" for name, rows in raw.splits.items()))
    with journal.stage("model"):
        preparation = prepare(recipe)
        model = build_model(recipe, raw.labels).to(device)
        data = encode_rows(recipe, raw, preparation)
        _check_length(model, data)
        journal.tell(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters on {device}")
    if recipe.train is not None:
        with journal.stage("train"):
            settings = {k: v for k, v in recipe.train.model_dump().items() if k != "batch_size"}
            method = configured(recovery.registry, "finetune", {**settings, "seed": recipe.seed})
            done = recover_(model, data.loader("train", recipe.train.batch_size), method)
            journal.note(metrics={"training": {"seconds": round(done.seconds, 3), **done.metrics}})
            journal.tell(str(done).partition("\n")[0])
            if journal.folder is not None:
                _save_base(model, preparation.tokenizer, journal.folder / BASE)
    return Subject(recipe, journal, data, model)


def _check_length(model: nn.Module, data: Data) -> None:
    """Refuses examples that are longer than the model can read, before any long work."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    longest = max(len(e.get("input_ids", ())) for rows in data.examples.values() for e in rows)
    if isinstance(limit, int) and longest > limit:
        raise InvalidValue("data.max_length", f"at most {limit}, what the model can read", f"{longest} tokens")


def _save_base(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """The trained, uncut model in Transformers' own format: it exists nowhere else."""
    model.save_pretrained(folder)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
