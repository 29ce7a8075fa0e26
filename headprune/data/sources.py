"""Load rows from the hub, from local files or from scikit-learn, all as ``datasets``."""

from __future__ import annotations

import csv
import glob
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headprune.core.errors import InvalidValue, did_you_mean, reason_of
from headprune.core.files import sha256_file
from headprune.core.opening import check_file
from headprune.recipes.schema import DataSection

_FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
#: Characters that may stand between the cells of a csv file.
_DELIMITERS = ",;\t|"
#: A first line by which Excel says which of them it is.
_SAID = re.compile(r'"?sep=(.)"?', re.IGNORECASE)
_ROLES = ("train", "validation", "test")
#: Other common names of the default splits.
_ALIASES = {"validation": ("val", "valid", "dev")}
_HINT = "Give a local copy with --set data.path=FOLDER."


@dataclass(frozen=True)
class Source:
    """Rows by role, before any of them are assigned to purposes.

    Args:
        splits: The rows of ``train``, ``validation`` and ``test``, where there are such splits.
        facts: Identity of the data, for the record.
        warnings: Files that were not used.
    """

    splits: dict[str, Any]
    facts: dict[str, Any]
    warnings: tuple[str, ...] = ()


def load_source(section: DataSection) -> Source:
    """Load every split of the data; ``train`` is always among them.

    Raises:
        InvalidValue: no such data, unreadable data, no train split, or an empty split.
    """
    path = Path(os.path.expanduser(section.path))
    # 1. Load from wherever the path leads.
    if section.path.startswith("sklearn:"):
        _split_names(section, ())  # refuses a recipe that names splits
        source = _load_sklearn(section.path)
    elif path.exists():
        source = _load_local(path, section)
    elif _suffix(path) in _FORMATS or path.is_absolute() or section.path.startswith((".", "~")):
        must = "an existing file or folder, or a hub name"
        hint = (
            "Give your data: --data (prune, init), --set data.path=... (run, score), or the key"
            " that data.path refers to, such as model.path."
        )
        raise InvalidValue("data.path", must, repr(section.path), hint)
    else:
        source = _load_hub(section)
    # 2. Check the splits.
    if "train" not in source.splits:
        got = f"only {', '.join(source.splits) or 'none'}"
        raise InvalidValue("data.train_split", f"a split of {section.path}", got)
    for name, rows in source.splits.items():
        if not len(rows):
            must = f"at least one row in {section.path}"
            raise InvalidValue(f"data: {name}", must, "an empty split")
    # 3. Bring the rows into the form that the recipe asks for.
    source = _flatten(source, section)
    return source if section.block is None else _cut_into_blocks(source, section, section.block)


def folder_of(section: DataSection) -> Path:
    """Return the folder that paths in rows start from.

    It is the data's folder, or that of its file; for a hub data set, the working directory.
    """
    path = Path(os.path.expanduser(section.path))
    if path.is_dir():
        return path
    return path.parent if path.is_file() else Path()


def undecoded(rows: Any, column: str) -> Any:
    """Return the rows with sound as bytes and paths.

    ``datasets`` would decode it with a package that headprune does not require.
    """
    from datasets import Audio

    if isinstance(rows.features.get(column), Audio):
        return rows.cast_column(column, Audio(decode=False))
    return rows


def check_pictures(rows: Any, column: str) -> None:
    """Refuse rows that name devices and FIFOs: ``datasets`` opens pictures by their paths.

    Raises:
        InvalidValue: a row that does.
    """
    from datasets import Image

    if not isinstance(rows.features.get(column), Image):
        return
    for row in rows.select_columns([column]).cast_column(column, Image(decode=False)):
        value = row[column] or {}
        path = value.get("path")
        if value.get("bytes") is None and path and os.path.exists(path):
            check_file(path)


# ---------------------------------------------------------------- forms of rows


def _flatten(source: Source, section: DataSection) -> Source:
    """Make nested columns columns ``outer.inner`` where the recipe names one of these."""
    wanted = {*section.text_columns, *section.label_columns}
    if section.target:
        wanted.add(section.target)
    nested = {name for name in wanted if "." in name}
    # A column whose own name has a dot needs no flattening.
    splits = {}
    for role, rows in source.splits.items():
        missing = nested - set(rows.column_names)
        splits[role] = rows.flatten() if missing else rows
    return replace(source, splits=splits)


def _cut_into_blocks(source: Source, section: DataSection, size: int) -> Source:
    """Cut the joined text of each split into rows of ``size`` characters.

    Splits that the data lacks are the end of the train text.

    Raises:
        InvalidValue: rows without text, or too little of it.
    """
    from datasets import Dataset

    (column,) = section.text_columns
    blocks = {}
    for role, rows in source.splits.items():
        text = _joined_text(rows, column, role, section)
        # A last block of one character is left out: it has no next token to predict.
        blocks[role] = [text[i : i + size] for i in range(0, len(text) - 1, size)]
    n_blocks = len(blocks["train"])
    for role, key in (("test", "test_holdout"), ("validation", "holdout")):
        if role in blocks:
            continue
        train = blocks["train"]
        amount = getattr(section, key)
        count = amount if isinstance(amount, int) else max(1, round(amount * n_blocks))
        if count >= len(train):
            must = f"fewer than the {len(train)} blocks of train"
            raise InvalidValue(f"data.{key}", must, amount)
        # The end of the text: random blocks would have neighbours in train.
        blocks["train"], blocks[role] = train[:-count], train[-count:]
    splits = {role: Dataset.from_dict({column: rows}) for role, rows in blocks.items()}
    return Source(splits, {**source.facts, "block": size}, source.warnings)


def _joined_text(rows: Any, column: str, role: str, section: DataSection) -> str:
    if column not in rows.column_names:
        must = f"a column of the {role} rows of {section.path}"
        hint = did_you_mean(column, rows.column_names)
        raise InvalidValue("data.text", must, repr(column), hint)
    texts = list(rows[column])
    for text in texts:
        if not isinstance(text, str):
            must = "rows of text, to be cut into blocks"
            raise InvalidValue(f"data: {role}", must, f"a {type(text).__name__} in {column!r}")
    return "".join(texts)


# ---------------------------------------------------------------- places


def _load_sklearn(path: str) -> Source:
    if path != "sklearn:digits":
        raise InvalidValue("data.path", "'sklearn:digits', the one such data set", repr(path))
    import sklearn
    from datasets import Dataset
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Pixels are 0 to 16.
    images = (digits.images / 16).astype("float32").tolist()
    rows = Dataset.from_dict({"image": images, "label": digits.target.tolist()})
    return Source({"train": rows}, {"path": path, "version": sklearn.__version__})


def _load_hub(section: DataSection) -> Source:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    # An offline machine, a private data set and a wrong name all end here.
    try:
        loaded = load_dataset(section.path, section.subset, revision=section.revision)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = reason_of(error)
        must = "local data, or a hub data set that can be reached"
        raise InvalidValue("data.path", must, f"{section.path!r} ({reason})", _HINT) from error
    names = _split_names(section, loaded)
    splits, fingerprints = {}, {}
    for role, name in names.items():
        splits[role] = loaded[name]
        fingerprints[role] = loaded[name]._fingerprint
    facts = {
        "path": section.path,
        "subset": section.subset,
        "revision": section.revision,
        "fingerprints": fingerprints,
        "splits": names,
    }
    return Source(splits, facts)


def _load_local(path: Path, section: DataSection) -> Source:
    # 1. Which files are which split?
    if not path.is_dir():
        check_file(path)
    warnings: list[str] = []
    if path.is_file():
        files = {"train": [path]}
        names = _split_names(section, (path.stem,), train=path.stem)
    else:
        files, names, warnings = _split_files(path, section)
    # 2. Read them.
    data_format = _format_of(files, path)
    splits = _read_files(data_format, files, path)
    # 3. Describe them for the record.
    hashes = {}
    for of_split in files.values():
        hashes.update({file.name: sha256_file(file) for file in of_split})
    facts: dict[str, Any] = {
        "path": section.path,
        "sha256": hashes,
        "splits": names,
    }
    hub_only = {"subset": section.subset, "revision": section.revision}
    given = {key: value for key, value in hub_only.items() if value is not None}
    if given:
        facts["not used, the data is local"] = given
    return Source(splits, facts, tuple(warnings))


def _format_of(files: Mapping[str, list[Path]], path: Path) -> str:
    """Return the one format of all files, by its name in ``datasets``."""
    formats: set[str] = set()
    for of_split in files.values():
        formats.update(_suffix(file) for file in of_split)
    if len(formats) != 1 or not formats <= _FORMATS.keys():
        must = f"files of one format out of {', '.join(_FORMATS)}"
        got = ", ".join(sorted(formats)) or f"none of the splits in {path}"
        raise InvalidValue("data.path", must, got)
    return _FORMATS[formats.pop()]


def _read_files(
    data_format: str,
    files: Mapping[str, list[Path]],
    path: Path,
) -> dict[str, Any]:
    """Read local files into memory, past the cache of ``datasets``."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    patterns = {}
    for role, of_split in files.items():
        for file in of_split:
            if not file.stat().st_size:
                raise InvalidValue("data.path", "files with rows", f"{file}, which is empty")
        patterns[role] = list(map(_as_pattern, of_split))
    options: dict[str, Any] = {}
    if data_format == "text":
        options = {"sample_by": "document"}
    elif data_format == "csv":
        options = _csv_options([file for of_split in files.values() for file in of_split])
    # The shared cache is keyed by path and time, and would serve a file that was replaced.
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        try:
            loaded = load_dataset(
                data_format, data_files=patterns, cache_dir=folder, keep_in_memory=True, **options
            )
            for rows in loaded.values():
                # Readers accept bytes that are not UTF-8.
                rows.data.table.validate(full=True)
        except (DatasetsError, OSError, ValueError, TypeError, StopIteration) as error:
            reason = " ".join(str(error.__cause__ or error).split()) or "no rows"
            hint = "Save it as UTF-8." if "codec can't decode" in reason else ""
            raise InvalidValue("data.path", "readable data", f"{path}: {reason}", hint) from error
    return dict(loaded)


def _csv_options(files: Sequence[Path]) -> dict[str, Any]:
    """Return how pandas is to read csv or tsv files, all in one way.

    Raises:
        InvalidValue: files with different delimiters.
    """
    forms = {file: _csv_form(file) for file in files}
    first, *others = forms
    for file in others:
        if forms[file] != forms[first]:
            got = f"{first.name} with {forms[first][0]!r} and {file.name} with {forms[file][0]!r}"
            raise InvalidValue("data.path", "files with the same delimiter and first line", got)
    delimiter, skipped = forms[first]
    # Excel puts a byte order mark first. "None" and "NA" may be classes, so they are not missing.
    missing = ["", "nan", "NaN", "#N/A"]
    options = {"encoding": "utf-8-sig", "keep_default_na": False, "na_values": missing}
    return {**options, "sep": delimiter, "skiprows": skipped}


def _csv_form(file: Path) -> tuple[str, int]:
    """Return the delimiter of a csv or tsv file, and the number of lines before its header."""
    check_file(file)
    with open(file, encoding="utf-8-sig", errors="replace", newline="") as lines:
        header = lines.readline(10_000)
    said = _SAID.fullmatch(header.rstrip("\r\n"))
    if said:
        return said[1], 1
    usual = "\t" if _suffix(file) == ".tsv" else ","
    # Names of a tsv file may hold commas.
    if usual == "\t" and "\t" in header:
        return usual, 0
    try:
        return csv.Sniffer().sniff(header, _DELIMITERS).delimiter, 0
    except csv.Error:  # a single column
        return usual, 0


def _suffix(file: Path) -> str:
    """Return how a file's name ends, without regard to case."""
    return file.suffix.lower()


def _as_pattern(file: Path) -> str:
    """Return a pattern that only this file matches: ``datasets`` looks for files by patterns.

    Raises:
        InvalidValue: there is no such pattern.
    """
    # A relative path would make the working directory's own name a part of the pattern.
    path = os.path.abspath(file)
    if "::" in path or os.path.expandvars(path) != path:
        must = "named without '::' and $VARIABLES, which readers take for more than names"
        raise InvalidValue("data.path", must, repr(path), "Rename the file or folder.")
    return glob.escape(path)


# ---------------------------------------------------------------- names of splits


def _split_names(
    section: DataSection,
    present: Iterable[str],
    **given: str,
) -> dict[str, str]:
    """Return the name of every role's split, where the data has one.

    A split that the recipe names for one role is not another role's by default.

    Args:
        section: The recipe's names.
        present: Splits of the data.
        given: Names by role that need no search.

    Raises:
        InvalidValue: a split that the recipe names itself is missing.
    """
    available = sorted(set(present))
    wanted = _wanted_names(section)
    # A name that differs from the default was chosen by the recipe.
    defaults = _wanted_names(DataSection(path=""))
    chosen = {role: name for role, name in wanted.items() if name != defaults[role]}
    names = dict(given)
    for role, name in wanted.items():
        if role in chosen:
            if name not in available:
                must = f"a split of {section.path}"
                hint = did_you_mean(name, available)
                raise InvalidValue(f"data.{role}_split", must, repr(name), hint)
            names.setdefault(role, name)
            continue
        # By default: the first common name that is not chosen for another role.
        for candidate in (name, *_ALIASES.get(role, ())):
            if candidate in available and candidate not in chosen.values():
                names.setdefault(role, candidate)
                break
    return names


def _wanted_names(section: DataSection) -> dict[str, str]:
    """Return the recipe's split name of every role."""
    return {
        "train": section.train_split,
        "validation": section.validation_split,
        "test": section.test_split,
    }


def _split_files(
    folder: Path,
    section: DataSection,
) -> tuple[dict[str, list[Path]], dict[str, str], list[str]]:
    """Return the files of every split, its name, and warnings of unused split files.

    A split is one file (``train.jsonl``) or several (``train-*.parquet``).
    """
    by_name: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if _suffix(file) in _FORMATS and file.is_file():
            by_name.setdefault(_split_of(file, section), []).append(file)
    if section.train_split not in by_name:
        seen = ", ".join(sorted(os.listdir(folder))[:8]) or "an empty folder"
        must = f"a folder with {section.train_split}{{{','.join(_FORMATS)}}}"
        hint = "Set data.train_split, or give the file."
        raise InvalidValue("data.path", must, f"{folder} with {seen}", hint)
    names = _split_names(section, by_name)
    files = {role: by_name[name] for role, name in names.items()}
    # Other files may serve other purposes; these names look like forgotten splits.
    spare = {*_ROLES, *_ALIASES["validation"]} - set(names.values())
    warnings: list[str] = []
    for name in sorted(spare & by_name.keys()):
        warnings.extend(f"{file} was not used" for file in by_name[name])
    return files, names, warnings


def _split_of(file: Path, section: DataSection) -> str:
    """Return the split that a file belongs to by its name."""
    for name in _wanted_names(section).values():
        if file.stem == name or file.stem.startswith(f"{name}-"):
            return name
    return file.stem.partition("-")[0]
