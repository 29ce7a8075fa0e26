"""The journal of a run: its record, written again after every stage, and a line a stage for who
watches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.display import clean
from headprune.core.files import append_line
from headprune.core.record import RunRecord
from headprune.core.version import __version__

RECORD = "record.json"
HISTORY = "history.jsonl"
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
#: The folder of a run inside that of the model which comes of it: ``headprune prune --data``.
RUN = "run"
#: What a run is in the middle of; gone when it is done.
WORK = ".work"
#: What may lie beside the scores.
COMPANIONS = ("scores.samples.safetensors", "scores.curvature.safetensors")
#: Every file of a run, the record first.
FILES = (
    *(RECORD, PLAN, SCORES, *COMPANIONS, ROWS, LATENCY),
    *(RECIPE, ATTENTION, MAGNITUDE, "report.html", "report.md"),
)
#: Every folder of a run, with a file that tells it from a user's own.
FOLDERS = {MODEL: "headprune.json", BASE: "config.json", WORK: ""}
#: Fields of a record that belong to the run, not to a stage of it.
_OF_THE_RUN = ("name", "status", "stage", "created", "recipe", "error")


def record_path(path: Path) -> Path:
    """The record's file, of a run's folder or a file."""
    return path / RECORD if path.is_dir() else path


def to_stderr(line: str) -> None:
    """Says a line of progress to who watches."""
    print(clean(line), file=sys.stderr, flush=True)


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
        self._collected: RunRecord | None = None

    def begin(self) -> None:
        """The record of an attempt takes the place of an earlier one's, whose lines in the history
        stay."""
        self.write()
        self._tell_history()

    def write(self) -> None:
        """Writes the record as it is now, whole or not at all."""
        if self.folder is not None:
            self.record.save(self.folder / RECORD)

    def note(self, **noted: Any) -> None:
        """Sets fields of the record; tuples are added to, mappings are updated. A warning is noted
        once."""
        self.record = _noted(self.record, noted)
        if self._collected is not None:
            self._collected = _noted(self._collected, noted)

    @contextmanager
    def collected(self) -> Iterator[Callable[[], RunRecord]]:
        """Yields what gives everything that was noted inside, and nothing else, as a record."""
        record = self.record
        self._collected = RunRecord(record.name, "running", record.stage, record.created)
        found = self._collected
        try:
            yield lambda: found
            found = self._collected
        finally:
            self._collected = None

    def repeat(self, noted: RunRecord) -> None:
        """Notes what an earlier run collected."""
        for field in fields(noted):
            value = getattr(noted, field.name)
            if field.name not in _OF_THE_RUN and value not in (None, (), FrozenDict()):
                self.note(**{field.name: value})

    def tell(self, line: str) -> None:
        """A line of progress under the stage."""
        self.say(f"    {line}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of the run: named in the record before it begins, timed, and written when it is
        through."""
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
        self._tell_history()

    def _tell_history(self) -> None:
        """A line for every beginning and end of an attempt; nothing takes one away again."""
        assert self.folder is not None
        record, now = self.record, datetime.now(timezone.utc).isoformat(timespec="seconds")
        said = {"at": now, "status": record.status, "stage": record.stage, "error": record.error}
        line = {**said, "timings": dict(record.timings), "headprune": __version__}
        append_line(self.folder / HISTORY, json.dumps(line, ensure_ascii=False))


def _noted(record: RunRecord, noted: dict[str, Any]) -> RunRecord:
    changes: dict[str, Any] = {}
    for name, value in noted.items():
        old = getattr(record, name)
        if isinstance(old, tuple):
            value = (*old, *value)
            value = tuple(dict.fromkeys(value)) if name == "warnings" else value
        elif isinstance(old, FrozenDict):
            value = FrozenDict({**old, **value})
        changes[name] = value
    return replace(record, **changes)
