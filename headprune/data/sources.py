"""Where rows come from: hub data sets, local files, and scikit-learn's digits, all as
``datasets``."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headprune.core.errors import InvalidValue, did_you_mean
from headprune.core.files import sha256_file
from headprune.core.opening import check_file
from headprune.recipes.schema import DataSection

_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_SETS = ("train", "validation", "test")
_ALSO = {"validation": ("val", "valid", "dev")}  # common names of the default split
_HINT = "Give a local copy with --set data.path=FOLDER."


@dataclass(frozen=True)
class Source:
    """The raw splits by role (train, validation, test), what tells this data from other data, and
    what was not used."""

    splits: dict[str, Any]
    facts: dict[str, Any]
    warnings: tuple[str, ...] = ()


def load_source(section: DataSection) -> Source:
    """Loads the splits that there are; ``train`` is always among them.

    Raises:
        InvalidValue: no such data, data that cannot be read, no train split, or an empty split.
    """
    path = Path(os.path.expanduser(section.path))
    if section.path.startswith("sklearn:"):
        _split_names(section, ())
        source = _sklearn(section.path)
    elif path.exists():
        source = _local(path, section)
    elif path.suffix in _FORMATS or path.is_absolute() or section.path.startswith((".", "~")):
        hint = (
            "Give yours: --set data.path=..., or the key that the recipe makes it from, such as"
            " model.path."
        )
        raise InvalidValue(
            "data.path", "an existing file or folder, or a hub name", repr(section.path), hint
        )
    else:
        source = _hub(section)
    if "train" not in source.splits:
        got = f"only {', '.join(source.splits) or 'none'}"
        raise InvalidValue("data.train_split", f"a split of {section.path}", got)
    for name, rows in source.splits.items():
        if not len(rows):
            raise InvalidValue(
                f"data: {name}", f"at least one row in {section.path}", "an empty split"
            )
    source = _flat(source, section)
    return source if section.block is None else _blocked(source, section, section.block)


def folder_of(section: DataSection) -> Path:
    """Where paths in rows begin: the data's folder, or that of its file; of a hub data set, the
    working directory."""
    path = Path(os.path.expanduser(section.path))
    return path if path.is_dir() else path.parent if path.is_file() else Path()


def undecoded(rows: Any, column: str) -> Any:
    """The rows with sound as bytes and paths: ``datasets`` decodes with a package that we do
    without."""
    from datasets import Audio

    kept = isinstance(rows.features.get(column), Audio)
    return rows.cast_column(column, Audio(decode=False)) if kept else rows


def check_pictures(rows: Any, column: str) -> None:
    """Refuses rows that name devices and FIFOs: ``datasets`` opens pictures by their names.

    Raises:
        InvalidValue: a row that does.
    """
    from datasets import Image

    if isinstance(rows.features.get(column), Image):
        for row in rows.select_columns([column]).cast_column(column, Image(decode=False)):
            value = row[column] or {}
            if value.get("bytes") is None and value.get("path") and os.path.exists(value["path"]):
                check_file(value["path"])


def _flat(source: Source, section: DataSection) -> Source:
    """The rows with nested columns as columns ``outer.inner`` of their own, where the recipe names
    one of these."""
    wanted = {
        *section.text_columns,
        *([section.target] if section.target else []),
        *section.label_columns,
    }
    splits = {
        role: (
            rows.flatten() if any("." in n and n not in rows.column_names for n in wanted) else rows
        )
        for role, rows in source.splits.items()
    }
    return replace(source, splits=splits)


def _blocked(source: Source, section: DataSection, size: int) -> Source:
    """The same text in rows of ``size`` characters; parts that the data lacks are the end of the
    text.

    Raises:
        InvalidValue: rows without text, or too little of it.
    """
    from datasets import Dataset

    (column,) = section.text_columns
    found: dict[str, list[str]] = {}
    for role, rows in source.splits.items():
        if column not in rows.column_names:
            hint = did_you_mean(column, rows.column_names)
            raise InvalidValue(
                "data.text", f"a column of the {role} rows of {section.path}", repr(column), hint
            )
        texts = list(rows[column])
        if not all(isinstance(text, str) for text in texts):
            raise InvalidValue(
                f"data: {role}", "rows of text, to be cut into blocks", "rows of something else"
            )
        text = "".join(texts)
        found[role] = [text[i : i + size] for i in range(0, len(text) - 1, size)]
    n_blocks = len(found["train"])
    for role, name in (("test", "test_holdout"), ("validation", "holdout")):
        if role not in found:
            amount = getattr(section, name)
            count = amount if isinstance(amount, int) else max(1, round(amount * n_blocks))
            if count >= len(found["train"]):
                raise InvalidValue(
                    f"data.{name}", f"fewer than the {len(found['train'])} blocks of train", amount
                )
            found["train"], found[role] = found["train"][:-count], found["train"][-count:]
    splits = {role: Dataset.from_dict({column: blocks}) for role, blocks in found.items()}
    return Source(splits, {**source.facts, "block": size}, source.warnings)


def _sklearn(path: str) -> Source:
    if path != "sklearn:digits":
        raise InvalidValue("data.path", "'sklearn:digits', the one such data set", repr(path))
    import sklearn
    from datasets import Dataset
    from sklearn.datasets import load_digits

    digits = load_digits()
    columns = {
        "image": (digits.images / 16).astype("float32").tolist(),
        "label": digits.target.tolist(),
    }
    return Source(
        {"train": Dataset.from_dict(columns)}, {"path": path, "version": sklearn.__version__}
    )


def _local(path: Path, section: DataSection) -> Source:
    unused: tuple[str, ...] = ()
    if not path.is_dir():
        check_file(path)
    if path.is_file():
        files, names = {"train": [path]}, _split_names(section, (path.stem,), train=path.stem)
    else:
        files, names, unused = _files(path, section)
    formats = {file.suffix for found in files.values() for file in found}
    if len(formats) != 1 or not formats <= _FORMATS.keys():
        must = f"files of one format out of {', '.join(_FORMATS)}"
        raise InvalidValue(
            "data.path", must, ", ".join(sorted(formats)) or f"none of the splits in {path}"
        )
    for file in (file for found in files.values() for file in found):
        if not file.stat().st_size:
            raise InvalidValue("data.path", "files with rows", f"{file}, which is empty")
    paths = {role: [_as_pattern(file) for file in found] for role, found in files.items()}
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    # A cache of its own: the shared one is keyed by path and time, and would survive a file that
    # was replaced.
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        try:
            name = _FORMATS[formats.pop()]
            whole = {"sample_by": "document"} if name == "text" else {}
            loaded = load_dataset(
                name, data_files=paths, cache_dir=folder, keep_in_memory=True, **whole
            )
            for rows in loaded.values():
                rows.data.table.validate(full=True)  # readers let bytes pass that are no text
        except (DatasetsError, OSError, ValueError, TypeError, StopIteration) as error:
            reason = " ".join(str(error.__cause__ or error).split()) or "no rows"
            raise InvalidValue("data.path", "readable data", f"{path}: {reason}") from error
    hashes = {file.name: sha256_file(file) for found in files.values() for file in found}
    facts: dict[str, Any] = {"path": section.path, "sha256": hashes, "splits": names}
    hub_only = {"subset": section.subset, "revision": section.revision}
    if given := {key: value for key, value in hub_only.items() if value is not None}:
        facts["not used, the data is local"] = given
    return Source(dict(loaded), facts, tuple(f"{path / name} was not used" for name in unused))


def _as_pattern(file: Path) -> str:
    """A pattern that is met by this file alone: ``datasets`` looks for files by patterns.

    Raises:
        InvalidValue: no pattern is.
    """
    path = os.path.abspath(
        file
    )  # else the working directory's own name would be a part of the pattern
    if "::" in path or os.path.expandvars(path) != path:
        must = "named without '::' and $VARIABLES, which readers take for more than names"
        raise InvalidValue("data.path", must, repr(path), "Rename the file or folder.")
    return glob.escape(path)


def _split_names(section: DataSection, present: Iterable[str], **given: str) -> dict[str, str]:
    """The name of every role's split, where the data has one; ``given`` names are not looked for. A
    split that the recipe names for one role is no other's by default.

    Raises:
        InvalidValue: a split that the recipe names itself is not there.
    """
    present = sorted(set(present))
    names = dict(given)
    named = {role: getattr(section, f"{role}_split") for role in _SETS}
    chosen = {
        r: name
        for r, name in named.items()
        if name != DataSection.model_fields[f"{r}_split"].default
    }
    for role, wanted in named.items():
        own = role in chosen
        candidates = (wanted, *(() if own else _ALSO.get(role, ())))
        found = next(
            (n for n in candidates if n in present and (own or n not in chosen.values())), None
        )
        if found is None and own:
            must = f"a split of {section.path}"
            raise InvalidValue(
                f"data.{role}_split", must, repr(wanted), did_you_mean(wanted, present)
            )
        if found is not None:
            names.setdefault(role, found)
    return names


def _files(
    folder: Path, section: DataSection
) -> tuple[dict[str, list[Path]], dict[str, str], tuple[str, ...]]:
    """The files of every split (``train.jsonl``, or several ``train-*.parquet``), its name, and
    unused split files."""
    by_name: dict[str, list[Path]] = {}
    wanted = [getattr(section, f"{role}_split") for role in _SETS]
    for file in sorted(f for f in folder.iterdir() if f.suffix in _FORMATS and f.is_file()):
        split = next((w for w in wanted if file.stem == w or file.stem.startswith(f"{w}-")), None)
        by_name.setdefault(split or file.stem.partition("-")[0], []).append(file)
    if section.train_split not in by_name:
        seen = ", ".join(sorted(f.name for f in folder.iterdir())[:8]) or "an empty folder"
        must = f"a folder with {section.train_split}{{{','.join(_FORMATS)}}}"
        raise InvalidValue(
            "data.path", must, f"{folder} with {seen}", "Set data.train_split, or give the file."
        )
    names = _split_names(section, by_name)
    spare = {*_SETS, *_ALSO["validation"]} - set(names.values())
    unused = tuple(file.name for name in sorted(spare & by_name.keys()) for file in by_name[name])
    return {role: by_name[name] for role, name in names.items()}, names, unused


def _hub(section: DataSection) -> Source:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        loaded = load_dataset(section.path, section.subset, revision=section.revision)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        must = "local data, or a hub data set that can be reached"
        raise InvalidValue("data.path", must, f"{section.path!r} ({reason})", _HINT) from error
    wanted = _split_names(section, loaded)
    splits = {role: loaded[name] for role, name in wanted.items()}
    marks = {role: rows._fingerprint for role, rows in splits.items()}
    facts = {
        "path": section.path,
        "subset": section.subset,
        "revision": section.revision,
        "fingerprints": marks,
    }
    return Source(splits, {**facts, "splits": wanted})
