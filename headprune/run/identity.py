"""Digests that identify the parts of runs and sweeps by everything they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.files import sha256_file
from headprune.data.imported import source_files
from headprune.data.models import model_config, resolve_path
from headprune.recipes.schema import Recipe

#: Sections of a recipe that decide what its base model is.
_PARTS = ("task", "seed", "model", "data", "train")


def digest(data: Any) -> str:
    """Return the SHA-256 of JSON data, whatever the order of its keys."""
    text = json.dumps(FrozenDict({"": data}), default=dict, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def made_of(recipe: Recipe, rows: Mapping[str, Any]) -> str:
    """Return the digest of what decides a base model.

    That is model, data, training and seed of the recipe, the rows, and the model's files.

    Args:
        recipe: The recipe.
        rows: Facts about the data's rows, as in the record.
    """
    parts: tuple[str, ...] = _PARTS
    if recipe.task == "translation":
        # A sweep compares translations, so how they are decoded belongs to its base model.
        parts = (*_PARTS, "decode")
    sections = {name: _section(recipe, name) for name in parts}
    return digest([sections, facts_of(rows), _model_files(recipe)])


def facts_of(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about rows that decide the base model.

    Calibration rows differ between draws, and the overlap of purposes follows from the rows.
    """
    return {name: facts for name, facts in rows.items() if name not in ("calibration", "overlap")}


def hashes(folder: Path, names: tuple[str, ...] = (".",)) -> dict[str, str]:
    """Return the SHA-256 of files, by their paths relative to a folder.

    Args:
        folder: The folder.
        names: Files in it, or folders with all their files.
    """
    paths: list[Path] = []
    for name in names:
        path = folder / name
        if path.is_dir():
            paths.extend(path.rglob("*"))
        else:
            paths.append(path)
    return {str(p.relative_to(folder)): sha256_file(p) for p in sorted(paths) if p.is_file()}


def check_inside(where: str, names: Iterable[str]) -> None:
    """Refuse file names, read from a file, that lead out of the folder.

    Raises:
        InvalidValue: an absolute path, one with ``..``, or the folder itself.
    """
    for name in names:
        path = PurePath(name)
        inside = path.parts and not path.is_absolute() and ".." not in path.parts
        if not inside or "\0" in name:
            raise InvalidValue(where, "the path of a file inside the folder", repr(name))


def _section(recipe: Recipe, name: str) -> Any:
    """A section of the recipe, without the calibration rows."""
    section = recipe.model_dump()[name]
    if name == "data":
        del section["calibration"]
    return section


def _model_files(recipe: Recipe) -> Any:
    """Identify the model that the recipe starts from.

    Returns:
        Hashes of the folder's files or of the code that builds the model, the commit on the hub, or
        None for a model that is built from a configuration.
    """
    if recipe.model.import_path is not None:
        return source_files(recipe.model)
    if recipe.model.path is None:
        return None  # built from a configuration, which is in the recipe
    folder = Path(resolve_path(recipe.model.path))
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.is_file())
        return {path.name: sha256_file(path) for path in files if not path.name.startswith(".")}
    try:
        return getattr(model_config(recipe.model.path), "_commit_hash", None)
    except HeadPruneError:
        return None  # refused with a better message when the model is loaded
