"""The base model of a sweep: trained or loaded once, kept in the sweep's folder, and proven to be the same one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headprune.core.codec import FrozenDict, Value
from headprune.core.errors import CheckpointError, HeadPruneError, InvalidValue
from headprune.core.files import sha256_file
from headprune.core.scores import ModelFingerprint
from headprune.model.fingerprint import fingerprint
from headprune.run.data import load_rows
from headprune.run.imported import source_files
from headprune.run.journal import Journal
from headprune.run.models import model_config, resolve_path
from headprune.run.outcome import SPLITS
from headprune.run.recipe import Recipe
from headprune.run.subject import Subject, prepare_subject, save_base

BASES = "bases"
MARK = "base.json"
_MODEL = "model"
_PARTS = ("task", "seed", "model", "data", "train")
_MODEL_FILES = (".safetensors", ".bin", ".json", ".txt", ".model")


def digest(data: Any) -> str:
    """SHA-256 of JSON data, whatever the order of its keys."""
    text = json.dumps(FrozenDict({"": data}), default=dict, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Base(Value):
    """What a base model is and how it is known again.

    Args:
        made_of: Digest of what makes it: model, data, training and seed of the recipe, the rows and the model's files.
        files: SHA-256 of every file of the saved model.
        model: Fingerprint of the model in memory.
        rows: Which data rows are for what.
        metrics: What its training reported.
    """

    made_of: str
    files: FrozenDict
    model: ModelFingerprint
    rows: FrozenDict
    metrics: FrozenDict

    @cached_property
    def identity(self) -> str:
        """Tells it from every other base model: its weights, every bit of them, and its rows."""
        return digest([self.made_of, dict(self.files)])

    def folder(self, sweep: Path) -> Path:
        """Where it lies."""
        return sweep / BASES / self.made_of[:16]


def ready_base(recipe: Recipe, sweep: Path, say: Callable[[str], None]) -> Base:
    """The sweep's base model: the one in its folder where it is made of the same, else loaded or trained now.

    Raises:
        CheckpointError: the folder's model is not what it was when it was saved.
        InvalidValue: data that cannot be had, or a single validation or test row.
    """
    raw = load_rows(recipe)
    for split in SPLITS:
        if len(raw.splits[split]) < 2:  # said now, not when all is done
            raise InvalidValue(f"data: {split}", "two or more rows, to compare models on", len(raw.splits[split]))
    # How translations are made belongs to it, too: every outcome of the sweep is judged by them.
    parts = (*_PARTS, "decode") if recipe.task == "translation" else _PARTS
    made_of = digest([{name: _part(recipe, name) for name in parts}, _facts(raw.facts), _model_files(recipe)])
    folder = sweep / BASES / made_of[:16]
    if (folder / MARK).is_file():
        base = Base.load(folder / MARK)
        _check_files(base, folder)
        if base.made_of != made_of:
            raise CheckpointError(str(folder), "made of what its name says", "another base model", _HINT)
        return base
    journal = Journal(recipe.name, recipe.model_dump(), None, say)
    subject = prepare_subject(recipe, journal)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)  # half a model, of a sweep that was killed
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as temporary:
        save_base(subject.model, subject.preparation, Path(temporary) / _MODEL, subject.sites)
        base = Base(
            made_of,
            FrozenDict(_hashes(Path(temporary) / _MODEL)),
            fingerprint(subject.model, subject.sites),
            FrozenDict(_facts(raw.facts)),
            FrozenDict(journal.record.metrics),
        )
        base.save(Path(temporary) / MARK)
        shutil.rmtree(folder, ignore_errors=True)  # without its mark: a kill came between
        os.replace(temporary, folder)
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
    if FrozenDict(_facts(journal.record.rows)) != base.rows:
        raise InvalidValue(recipe.data.path, "the data that the base model saw", "other rows", _HINT)
    if fingerprint(subject.model, subject.sites) != base.model:
        raise CheckpointError(str(folder), "the model that was saved there", "one with another fingerprint", _HINT)
    return subject


_HINT = "Give the sweep another folder with --out."


def _part(recipe: Recipe, name: str) -> Any:
    found = recipe.model_dump()[name]
    return {k: v for k, v in found.items() if k != "calibration"} if name == "data" else found


def _facts(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Which rows are for what, but for the calibration rows, which every draw has of its own."""
    return {name: facts for name, facts in rows.items() if name != "calibration"}


def _model_files(recipe: Recipe) -> Any:
    """What tells the model that the recipe starts from: hashes of a folder's files or of the code that builds it, or
    the commit on the hub."""
    if recipe.model.import_path is not None:
        return source_files(recipe.model)
    if recipe.model.path is None:
        return None
    folder = Path(resolve_path(recipe.model.path))
    if folder.is_dir():
        return {p.name: sha256_file(p) for p in sorted(folder.iterdir()) if p.is_file() and p.suffix in _MODEL_FILES}
    try:
        return getattr(model_config(recipe.model.path), "_commit_hash", None)
    except HeadPruneError:
        return None  # said with more words when it is loaded


def _hashes(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def _check_files(base: Base, folder: Path) -> None:
    found = _hashes(folder / _MODEL)
    if found != dict(base.files):
        differing = sorted(k for k in found.keys() | base.files.keys() if found.get(k) != base.files.get(k))
        raise CheckpointError(str(folder / _MODEL), "as it was saved", f"another {differing[0]}", _HINT)
