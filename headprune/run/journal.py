"""The journal of a run: its record, rewritten after every stage, and lines of progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

from headprune.core.bars import lines_to
from headprune.core.codec import FrozenDict
from headprune.core.display import clean
from headprune.core.errors import WARNING
from headprune.core.files import append_line
from headprune.core.record import RunRecord
from headprune.core.version import __version__

#: The record of a run.
RECORD = "record.json"
#: A line per start and end of an attempt.
HISTORY = "history.jsonl"
#: The table of a sweep.
TABLE = "table.json"
#: The heads to keep.
PLAN = "plan.json"
#: The scores of the chosen scorer.
SCORES = "scores.json"
#: The cut model.
MODEL = "model"
#: The uncut model, if the run trained it.
BASE = "base"
#: Which rows of which split served which purpose.
ROWS = "rows.json"
#: The latency table, for budgets of speed.
LATENCY = "latency.json"
#: The recipe with all defaults.
RECIPE = "recipe.yaml"
#: What the heads attend to in some test rows.
ATTENTION = "attention.json"
#: The test rows whose answer changed.
ANSWERS = "answers.json"
#: The scores of the magnitude baseline.
MAGNITUDE = "scores-magnitude.json"
#: The run's folder inside the model's folder, which ``headprune prune --data`` writes.
RUN = "run"
#: Unfinished work of a run; removed when the run is done.
WORK = ".work"
#: Files that may belong to the scores.
COMPANIONS = ("scores.samples.safetensors", "scores.curvature.safetensors")
#: Every file of a run, the record first.
FILES = (
    RECORD,
    PLAN,
    SCORES,
    *COMPANIONS,
    ROWS,
    LATENCY,
    RECIPE,
    ATTENTION,
    ANSWERS,
    MAGNITUDE,
    "report.html",
    "report.md",
)
#: Every folder of a run, with a file by which it is distinguished from a user's own folder.
FOLDERS = {MODEL: "headprune.json", BASE: "config.json", WORK: ""}
#: Fields of a record that belong to the run, not to a stage of it.
_OF_THE_RUN = ("name", "status", "stage", "created", "recipe", "error")


def record_path(path: Path) -> Path:
    """Return the record's path, given that or the run's folder."""
    return path / RECORD if path.is_dir() else path


def to_stderr(line: str) -> None:
    """Print a line of progress to standard error."""
    print(clean(line), file=sys.stderr, flush=True)


class Journal:
    """The record of one run, in memory and on disk, and its lines of progress.

    Args:
        name: The run's name.
        recipe: The resolved recipe.
        folder: Where the record is written; None writes no record.
        say: Takes one line of progress.
        progress: Show progress bars within stages; None shows them on a terminal, and prints a
            line now and then elsewhere.
    """

    def __init__(
        self,
        name: str,
        recipe: dict[str, Any],
        folder: Path | None,
        say: Callable[[str], None],
        progress: bool | None = None,
    ) -> None:
        self.record = RunRecord(name, "running", "start", now(), FrozenDict(recipe))
        self.folder, self.say = folder, say
        self.progress = sys.stderr.isatty() if progress is None else progress
        self._lines = self.tell if progress is None and not self.progress else None
        self._stages: int | None = None
        self._begun = 0  # stages so far, with those that were done before
        self._inside = False  # a stage
        self._collected: RunRecord | None = None  # of the block of `collected`

    def begin(self) -> None:
        """Write the record of a new attempt over an earlier one; the history keeps both."""
        self.write()
        self._append_history()

    def write(self) -> None:
        """Write the record atomically: a kill leaves the old file or the new one."""
        if self.folder is not None:
            self.record.save(self.folder / RECORD)

    def note(self, **noted: Any) -> None:
        """Set fields of the record. Tuples are extended, mappings updated, warnings noted once."""
        self.record = _with_notes(self.record, noted)
        if self._collected is not None:
            self._collected = _with_notes(self._collected, noted)

    @contextmanager
    def collected(self) -> Iterator[Callable[[], RunRecord]]:
        """Keep a second record with only what is noted inside the block.

        A run that resumes after this block notes it again with ``repeat``.

        Yields:
            A function that returns that record; call it after the block.
        """
        record = self.record
        self._collected = RunRecord(record.name, "running", record.stage, record.created)
        collected = self._collected
        try:
            yield lambda: collected
            collected = self._collected
        finally:
            self._collected = None

    def repeat(self, noted: RunRecord) -> None:
        """Note again what an earlier run collected."""
        for field in fields(noted):
            value = getattr(noted, field.name)
            empty = value in (None, (), FrozenDict())
            if not empty and field.name not in _OF_THE_RUN:
                self.note(**{field.name: value})

    def warn(self, warnings: Iterable[str]) -> None:
        """Note warnings, and print them at once."""
        for warning in warnings:
            self.note(warnings=(warning,))
            self.tell(f"{WARNING}{warning}")

    def tell(self, line: str) -> None:
        """Print an indented line of progress under the stage's name."""
        self.say(f"    {line}")

    def expect(self, stages: int) -> None:
        """Set the number of stages; each stage is then printed with its own number."""
        self._stages = stages

    def skip(self, name: str) -> None:
        """Say that an earlier run finished a stage, or a part of the present one."""
        if not self._inside:
            self._begun += 1
        self.say(f"[{name}] was done before")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run the block as a stage: name it in the record, time it, write the record."""
        self.note(stage=name)
        self.write()
        self._begun += 1
        number = "" if self._stages is None else f" {self._begun} of {self._stages}"
        self.say(f"[{name}]{number}")
        start = perf_counter()
        self._inside = True
        try:
            with lines_to(self._lines):
                yield
        finally:
            self._inside = False
        seconds = perf_counter() - start
        self.note(timings={name: round(seconds, 3)})
        self.tell(f"{seconds:.1f} s")
        self.write()

    def close(self, status: str, error: str | None = None) -> None:
        """Write the record at the end of the run, successful or not."""
        self.note(status=status, error=error)
        self.write()
        self._append_history()

    def _append_history(self) -> None:
        """Append a line at the start and end of an attempt; lines are never removed."""
        assert self.folder is not None
        record = self.record
        line = {
            "at": now(),
            "status": record.status,
            "stage": record.stage,
            "error": record.error,
            "timings": dict(record.timings),
            "headprune": __version__,
        }
        append_line(self.folder / HISTORY, json.dumps(line, ensure_ascii=False))


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _with_notes(record: RunRecord, noted: dict[str, Any]) -> RunRecord:
    """Return the record with fields set, tuples extended and mappings updated."""
    changes: dict[str, Any] = {}
    for name, value in noted.items():
        old = getattr(record, name)
        if isinstance(old, tuple):
            value = (*old, *value)
            if name == "warnings":  # each one once, in the order in which they came
                value = tuple(dict.fromkeys(value))
        elif isinstance(old, FrozenDict):
            value = FrozenDict({**old, **value})
        changes[name] = value
    return replace(record, **changes)
