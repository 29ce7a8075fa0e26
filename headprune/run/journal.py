"""The journal of a run: its record, written again after every stage, and a line a stage for who watches."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.display import clean
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.record import RunRecord

RECORD = "record.json"
TABLE = "table.json"
PLAN = "plan.json"
SCORES = "scores.json"
MODEL = "model"
BASE = "base"
ROWS = "rows.json"
LATENCY = "latency.json"
RECIPE = "recipe.yaml"
ATTENTION = "attention.json"
MAGNITUDE = "scores-magnitude.json"
_FILES = (
    *(RECORD, PLAN, SCORES, "scores.samples.safetensors", "scores.curvature.safetensors", ROWS, LATENCY),
    *(RECIPE, ATTENTION, MAGNITUDE, "report.html", "report.md"),
)
_FOLDERS = {MODEL: "headprune.json", BASE: "config.json"}


def record_path(path: Path) -> Path:
    """The record's file, of a run's folder or a file."""
    return path / RECORD if path.is_dir() else path


def to_stderr(line: str) -> None:
    """Says a line of progress to who watches."""
    print(clean(line), file=sys.stderr, flush=True)


def take_folder(folder: Path, overwrite: bool, say: Callable[[str], None]) -> None:
    """Makes the folder of a run ready: what a failed or interrupted run left there goes, any other only if asked.

    Raises:
        InvalidValue: a finished run, one that may still be running, or files that are not a run's, are there and
            ``overwrite`` was not given.
    """
    hint = "Give another folder with --out, or --overwrite."
    if folder.exists() and not folder.is_dir():
        raise InvalidValue(str(folder), "a folder", "a file", hint)
    present = [name for name in (*_FILES, *_FOLDERS) if (folder / name).exists()]
    if present and not overwrite:
        try:
            status = RunRecord.load(folder / RECORD).status
        except HeadPruneError:
            must = "free for the files of a run"
            raise InvalidValue(str(folder), must, f"{', '.join(present)} and no readable {RECORD}", hint) from None
        if status == "done":
            raise InvalidValue(str(folder), "free, or a failed run's", "a finished run", hint)
        if status == "running":
            got = "a run that is still running, or was killed"
            raise InvalidValue(str(folder), "free, or a failed run's", got, hint)
        say(f"replacing the {status} run in {folder}")
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for name, mark in _FOLDERS.items():
        if (folder / name / mark).is_file():
            shutil.rmtree(folder / name)
    folder.mkdir(parents=True, exist_ok=True)


class Journal:
    """Keeps the record of one run, in memory and on disk.

    Args:
        name: The run's name.
        recipe: The resolved recipe.
        folder: Where the record is written; None writes none.
        say: Takes one line of progress.
        progress: Show progress bars within stages; None shows them on a terminal.
    """

    def __init__(
        self,
        name: str,
        recipe: dict[str, Any],
        folder: Path | None,
        say: Callable[[str], None],
        progress: bool | None = None,
    ) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.record = RunRecord(name, "running", "start", now, FrozenDict(recipe))
        self.folder, self.say = folder, say
        self.progress = sys.stderr.isatty() if progress is None else progress

    def write(self) -> None:
        """Writes the record as it is now, whole or not at all."""
        if self.folder is not None:
            self.record.save(self.folder / RECORD)

    def note(self, **fields: Any) -> None:
        """Sets fields of the record; tuples are added to, mappings are updated."""
        changes: dict[str, Any] = {}
        for name, value in fields.items():
            old = getattr(self.record, name)
            if isinstance(old, tuple):
                value = (*old, *value)
            elif isinstance(old, FrozenDict):
                value = FrozenDict({**old, **value})
            changes[name] = value
        self.record = replace(self.record, **changes)

    def tell(self, line: str) -> None:
        """A line of progress under the stage."""
        self.say(f"    {line}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of the run: named in the record before it begins, timed, and written when it is through."""
        self.note(stage=name)
        self.write()
        self.say(f"[{name}]")
        start = perf_counter()
        yield
        seconds = perf_counter() - start
        self.note(timings={name: round(seconds, 3)})
        self.tell(f"{seconds:.1f} s")
        self.write()

    def close(self, status: str, error: str | None = None) -> None:
        """The end, however it came."""
        self.note(status=status, error=error)
        self.write()
