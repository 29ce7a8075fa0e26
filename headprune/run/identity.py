"""What the pieces of runs and sweeps are known by: digests of everything that they depend on."""

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

_PARTS = ("task", "seed", "model", "data", "train")


def digest(data: Any) -> str:
    """SHA-256 of JSON data, whatever the order of its keys."""
    text = json.dumps(FrozenDict({"": data}), default=dict, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def made_of(recipe: Recipe, rows: Mapping[str, Any]) -> str:
    """Digest of what makes a base model: model, data, training and seed of the recipe, rows, and
    the model's files.

    Args:
        recipe: The recipe.
        rows: Facts about the data's rows, as the record has them.
    """
    # How translations are made belongs to it, too: every outcome of a sweep is judged by them.
    parts = (*_PARTS, "decode") if recipe.task == "translation" else _PARTS
    return digest(
        [{name: _part(recipe, name) for name in parts}, facts_of(rows), _model_files(recipe)]
    )


def facts_of(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Which rows are for what, but for the calibration rows, which every draw has of its own, and
    what of rows is in several parts, which follows."""
    return {name: facts for name, facts in rows.items() if name not in ("calibration", "overlap")}


def hashes(folder: Path, names: tuple[str, ...] = (".",)) -> dict[str, str]:
    """SHA-256 of files, by their paths in a folder; a name is that of a file or of a folder with
    all that is in it."""
    found = (
        p
        for name in names
        for p in ((folder / name).rglob("*") if (folder / name).is_dir() else [folder / name])
    )
    return {str(p.relative_to(folder)): sha256_file(p) for p in sorted(found) if p.is_file()}


def check_inside(where: str, names: Iterable[str]) -> None:
    """Refuses names of files, out of a file, that are none of files inside a folder.

    Raises:
        InvalidValue: an absolute path, one that leaves the folder, or the folder itself.
    """
    for name in names:
        path = PurePath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise InvalidValue(where, "the path of a file inside the folder", repr(name))


def _part(recipe: Recipe, name: str) -> Any:
    found = recipe.model_dump()[name]
    return {k: v for k, v in found.items() if k != "calibration"} if name == "data" else found


def _model_files(recipe: Recipe) -> Any:
    """What tells the model that the recipe starts from: hashes of a folder's files or of the code
    that builds it, or the commit on the hub."""
    if recipe.model.import_path is not None:
        return source_files(recipe.model)
    if recipe.model.path is None:
        return None
    folder = Path(resolve_path(recipe.model.path))
    if folder.is_dir():
        return {
            p.name: sha256_file(p)
            for p in sorted(folder.iterdir())
            if p.is_file() and not p.name.startswith(".")
        }
    try:
        return getattr(model_config(recipe.model.path), "_commit_hash", None)
    except HeadPruneError:
        return None  # said with more words when it is loaded
