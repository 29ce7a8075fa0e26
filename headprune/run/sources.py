"""Where rows come from: hub data sets, local files, and scikit-learn's digits, all as ``datasets``."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.core.errors import InvalidValue
from headprune.core.files import sha256_file
from headprune.run.recipe import DataSection

_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_SETS = ("train", "validation", "test")
_HINT = "Give a local copy with --set data.path=FOLDER."


@dataclass(frozen=True)
class Source:
    """The raw splits, by role (train, validation, test), and what tells this data from other data."""

    splits: dict[str, Any]
    facts: dict[str, Any]


def load_source(section: DataSection) -> Source:
    """Loads the splits that there are; ``train`` is always among them.

    Raises:
        InvalidValue: no such data, data that cannot be read, no train split, or an empty split.
    """
    path = Path(section.path).expanduser()
    if section.path.startswith("sklearn:"):
        source = _sklearn(section.path)
    elif path.exists():
        source = _local(path, section)
    elif path.suffix in _FORMATS or path.is_absolute() or section.path.startswith((".", "~")):
        hint = "Give yours: --set data.path=..., or the key that the recipe makes it from, such as model.path."
        raise InvalidValue("data.path", "an existing file or folder, or a hub name", repr(section.path), hint)
    else:
        source = _hub(section)
    if "train" not in source.splits:
        got = f"only {', '.join(source.splits) or 'none'}"
        raise InvalidValue("data.train_split", f"a split of {section.path}", got)
    for name, rows in source.splits.items():
        if not len(rows):
            raise InvalidValue(f"data: {name}", f"at least one row in {section.path}", "an empty split")
    return source


def _sklearn(path: str) -> Source:
    if path != "sklearn:digits":
        raise InvalidValue("data.path", "'sklearn:digits', the one such data set", repr(path))
    import sklearn
    from datasets import Dataset
    from sklearn.datasets import load_digits

    digits = load_digits()
    columns = {"image": (digits.images / 16).astype("float32").tolist(), "label": digits.target.tolist()}
    return Source({"train": Dataset.from_dict(columns)}, {"path": path, "version": sklearn.__version__})


def _local(path: Path, section: DataSection) -> Source:
    files = {"train": [path]} if path.is_file() else _files(path, section)
    formats = {file.suffix for found in files.values() for file in found}
    if len(formats) != 1 or not formats <= _FORMATS.keys():
        must = f"files of one format out of {', '.join(_FORMATS)}"
        raise InvalidValue("data.path", must, ", ".join(sorted(formats)) or f"none of the splits in {path}")
    for file in (file for found in files.values() for file in found):
        if not file.stat().st_size:
            raise InvalidValue("data.path", "files with rows", f"{file}, which is empty")
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    names = {role: [str(file) for file in found] for role, found in files.items()}
    # A cache of its own: the shared one is keyed by path and time, and would survive a file that was replaced.
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        try:
            loaded = load_dataset(_FORMATS[formats.pop()], data_files=names, cache_dir=folder, keep_in_memory=True)
        except (DatasetsError, OSError, ValueError, TypeError, StopIteration) as error:
            reason = " ".join(str(error.__cause__ or error).split()) or "no rows"
            raise InvalidValue("data.path", "readable data", f"{path}: {reason}") from error
    hashes = {file.name: sha256_file(file) for found in files.values() for file in found}
    return Source(dict(loaded), {"path": section.path, "sha256": hashes})


def _files(folder: Path, section: DataSection) -> dict[str, list[Path]]:
    """The files of every split: ``train.jsonl``, or several ``train-*.parquet``."""
    found: dict[str, list[Path]] = {}
    for role in _SETS:
        split = getattr(section, f"{role}_split")
        files = sorted(f for f in folder.iterdir() if f.suffix in _FORMATS and f.is_file())
        mine = [f for f in files if f.stem == split or f.stem.startswith(f"{split}-")]
        if mine:
            found[role] = mine
    if "train" not in found:
        seen = ", ".join(sorted(f.name for f in folder.iterdir())[:8]) or "an empty folder"
        must = f"a folder with {section.train_split}{{{','.join(_FORMATS)}}}"
        raise InvalidValue("data.path", must, f"{folder} with {seen}", "Set data.train_split, or give the file.")
    return found


def _hub(section: DataSection) -> Source:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        loaded = load_dataset(section.path, section.subset, revision=section.revision)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        must = "local data, or a hub data set that can be reached"
        raise InvalidValue("data.path", must, f"{section.path!r} ({reason})", _HINT) from error
    wanted = {role: getattr(section, f"{role}_split") for role in _SETS}
    splits = {role: loaded[name] for role, name in wanted.items() if name in loaded}
    marks = {role: rows._fingerprint for role, rows in splits.items()}
    facts = {"path": section.path, "subset": section.subset, "revision": section.revision, "fingerprints": marks}
    return Source(splits, facts)
