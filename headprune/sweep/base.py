"""The base model of a sweep: loaded or trained once, saved, checked when opened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headprune.core.codec import EMPTY, FrozenDict, Value
from headprune.core.errors import CheckpointError, InvalidValue
from headprune.core.files import staged
from headprune.core.scores import ModelFingerprint
from headprune.data.datasets import load_rows
from headprune.model.fingerprint import fingerprint
from headprune.recipes.schema import Recipe
from headprune.run.identity import check_inside, digest, facts_of, hashes, made_of
from headprune.run.journal import Journal
from headprune.run.subject import Subject, prepare_subject, save_base
from headprune.sweep.outcome import SPLITS

#: Folder of the base models in that of the sweep.
BASES = "bases"
#: The file that describes a base model; written last.
MARK = "base.json"
#: The saved model in its folder.
_MODEL = "model"


@dataclass(frozen=True)
class Base(Value):
    """A base model's description, by which it is recognised.

    Args:
        made_of: Digest of model, data, training and seed of the recipe, of the rows and of the
            model's files.
        files: SHA-256 of every file of the saved model.
        model: Fingerprint of the model in memory.
        rows: Facts about the data's rows, by purpose.
        metrics: Metrics of its training.
        versions: Versions of the process that loaded or trained it.
        hardware: Hardware of that process.
    """

    made_of: str
    files: FrozenDict
    model: ModelFingerprint
    rows: FrozenDict
    metrics: FrozenDict
    versions: FrozenDict = EMPTY
    hardware: FrozenDict = EMPTY

    def __post_init__(self) -> None:
        check_inside("Base.files", self.files)
        if not self.made_of.isalnum():
            must = "a digest, which names a folder of the sweep"
            raise InvalidValue("Base.made_of", must, repr(self.made_of))

    @cached_property
    def identity(self) -> str:
        """Digest of its rows and of every bit of its weights."""
        return digest([self.made_of, dict(self.files)])

    def is_model(self, other: ModelFingerprint | None) -> bool:
        """Whether a fingerprint is of these weights; recipes of one sweep may differ in sites."""
        return other is not None and other.weights == self.model.weights

    def folder(self, sweep: Path) -> Path:
        """Return where it is saved."""
        return sweep / BASES / self.made_of[:16]


def ready_base(recipe: Recipe, sweep: Path, say: Callable[[str], None]) -> Base:
    """Return the sweep's base model: the saved one, else load or train it.

    A training that was interrupted resumes from its last pass over the rows.

    Raises:
        CheckpointError: the saved model has changed since it was saved.
        InvalidValue: data that cannot be loaded, or fewer than two validation or test rows.
    """
    # 1. Check that there are enough rows to compare models on, before any long work.
    raw = load_rows(recipe)
    for split in SPLITS:
        n_rows = len(raw.splits[split])
        if n_rows < 2:
            must = "two or more rows, to compare models on"
            raise InvalidValue(f"data: {split}", must, n_rows)

    # 2. Use the saved model, if there is one.
    made = made_of(recipe, raw.facts)
    folder = sweep / BASES / made[:16]
    if (folder / MARK).is_file():
        base = Base.load(folder / MARK)
        _check_files(base, folder)
        if base.made_of != made:
            must = "the base model that its name says"
            raise CheckpointError(str(folder), must, "another base model", _HINT)
        return base

    # 3. Load or train it. A training has a folder of its own, from which it can resume.
    training = folder.with_name(f".{folder.name}.training")
    work = None if recipe.train is None else training
    journal = Journal(recipe.name, recipe.model_dump(), work, say)
    subject = prepare_subject(recipe, journal)

    # 4. Save it. A folder without the mark was not finished.
    shutil.rmtree(folder, ignore_errors=True)
    with staged(folder) as place:
        save_base(subject.model, subject.preparation, place / _MODEL, subject.sites)
        base = Base(
            made_of=made,
            files=FrozenDict(hashes(place / _MODEL)),
            model=fingerprint(subject.model, subject.sites),
            rows=FrozenDict(facts_of(raw.facts)),
            metrics=FrozenDict(journal.record.metrics),
            versions=journal.record.versions,
            hardware=journal.record.hardware,
        )
        base.save(place / MARK)
    shutil.rmtree(training, ignore_errors=True)
    return base


def open_base(base: Base, sweep: Path, recipe: Recipe) -> Subject:
    """Open the base model with its data, as every run starts from it.

    Raises:
        CheckpointError: the saved model has changed since it was saved.
        InvalidValue: the data has changed since then.
    """
    # 1. The saved model is the one that was described.
    folder = base.folder(sweep)
    _check_files(base, folder)
    journal = Journal(recipe.name, recipe.model_dump(), None, lambda line: None, progress=False)
    subject = prepare_subject(recipe, journal, folder / _MODEL)
    # 2. So are the rows.
    if FrozenDict(facts_of(journal.record.rows)) != base.rows:
        must = "the data that the base model saw"
        raise InvalidValue(recipe.data.path, must, "other rows", _HINT)
    # 3. So is the model as it was loaded.
    if not base.is_model(fingerprint(subject.model, subject.sites)):
        must, got = "the model that was saved there", "one with another fingerprint"
        raise CheckpointError(str(folder), must, got, _HINT)
    return subject


_HINT = "Give the sweep another folder with --out."


def _check_files(base: Base, folder: Path) -> None:
    """Refuse a saved model whose files have changed, and name the first of them."""
    present = hashes(folder / _MODEL)
    for name in sorted(present.keys() | base.files.keys()):
        if present.get(name) != base.files.get(name):
            place = str(folder / _MODEL)
            raise CheckpointError(place, "as it was saved", f"another {name}", _HINT)
