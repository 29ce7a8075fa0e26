"""The base model of a sweep: trained or loaded once, kept in the sweep's folder, and proven to be
the same one."""

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

BASES = "bases"
MARK = "base.json"
_MODEL = "model"


@dataclass(frozen=True)
class Base(Value):
    """What a base model is and how it is known again.

    Args:
        made_of: Digest of what makes it: model, data, training and seed of the recipe, the rows and
            the model's files.
        files: SHA-256 of every file of the saved model.
        model: Fingerprint of the model in memory.
        rows: Which data rows are for what.
        metrics: What its training reported.
        versions, hardware: Of the process that loaded or trained it.
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
            raise InvalidValue(
                "Base.made_of", "a digest, which names a folder of the sweep", repr(self.made_of)
            )

    @cached_property
    def identity(self) -> str:
        """Tells it from every other base model: its weights, every bit of them, and its rows."""
        return digest([self.made_of, dict(self.files)])

    def folder(self, sweep: Path) -> Path:
        """Where it lies."""
        return sweep / BASES / self.made_of[:16]


def ready_base(recipe: Recipe, sweep: Path, say: Callable[[str], None]) -> Base:
    """The sweep's base model: the one in its folder where it is made of the same, else loaded or
    trained now.

    A training that was interrupted goes on from its last pass over the rows.

    Raises:
        CheckpointError: the folder's model is not what it was when it was saved.
        InvalidValue: data that cannot be had, or a single validation or test row.
    """
    raw = load_rows(recipe)
    for split in SPLITS:
        if len(raw.splits[split]) < 2:  # said now, not when all is done
            raise InvalidValue(
                f"data: {split}", "two or more rows, to compare models on", len(raw.splits[split])
            )
    made = made_of(recipe, raw.facts)
    folder = sweep / BASES / made[:16]
    if (folder / MARK).is_file():
        base = Base.load(folder / MARK)
        _check_files(base, folder)
        if base.made_of != made:
            raise CheckpointError(
                str(folder), "made of what its name says", "another base model", _HINT
            )
        return base
    training = folder.with_name(f".{folder.name}.training")
    journal = Journal(
        recipe.name, recipe.model_dump(), None if recipe.train is None else training, say
    )
    subject = prepare_subject(recipe, journal)
    shutil.rmtree(folder, ignore_errors=True)  # without its mark
    with staged(folder) as place:
        save_base(subject.model, subject.preparation, place / _MODEL, subject.sites)
        base = Base(
            made,
            FrozenDict(hashes(place / _MODEL)),
            fingerprint(subject.model, subject.sites),
            FrozenDict(facts_of(raw.facts)),
            FrozenDict(journal.record.metrics),
            journal.record.versions,
            journal.record.hardware,
        )
        base.save(place / MARK)
    shutil.rmtree(training, ignore_errors=True)
    return base


def open_base(base: Base, sweep: Path, recipe: Recipe) -> Subject:
    """The base model with its data, as every run starts from it.

    Raises:
        CheckpointError: the folder's model is not what it was when it was saved.
        InvalidValue: the data is not what it was.
    """
    folder = base.folder(sweep)
    _check_files(base, folder)
    journal = Journal(recipe.name, recipe.model_dump(), None, lambda line: None, progress=False)
    subject = prepare_subject(recipe, journal, folder / _MODEL)
    if FrozenDict(facts_of(journal.record.rows)) != base.rows:
        raise InvalidValue(
            recipe.data.path, "the data that the base model saw", "other rows", _HINT
        )
    if fingerprint(subject.model, subject.sites) != base.model:
        raise CheckpointError(
            str(folder), "the model that was saved there", "one with another fingerprint", _HINT
        )
    return subject


_HINT = "Give the sweep another folder with --out."


def _check_files(base: Base, folder: Path) -> None:
    found = hashes(folder / _MODEL)
    if found != dict(base.files):
        differing = sorted(
            k for k in found.keys() | base.files.keys() if found.get(k) != base.files.get(k)
        )
        raise CheckpointError(
            str(folder / _MODEL), "as it was saved", f"another {differing[0]}", _HINT
        )
