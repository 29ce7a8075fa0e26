"""The table of a sweep, and its files: JSON, CSV and Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.files import atomic_path, write_atomic
from headprune.core.opening import read_bytes
from headprune.core.paired import Drop, paired_drops
from headprune.core.sweeps import SweepTable
from headprune.data.models import resolve_device
from headprune.recipes.schema import Recipe
from headprune.run.journal import TABLE
from headprune.run.surroundings import hardware, versions
from headprune.sweep.grid import Design
from headprune.sweep.outcome import SPLITS, ModelOutcome
from headprune.sweep.runs import PlannedRun, SweepRun
from headprune.sweep.tasks import file_of, outcome_of

#: Characters at the start of a text that a spreadsheet takes for a formula. The last four are the
#: wide forms of = @ + and -.
_FORMULA = re.compile(r"[=@+\-\t\r\n\uff1d\uff20\uff0b\uff0d]")
#: Numbers may start with a sign and are no formulas.
_NUMBER = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)
#: A line per task, with its seconds.
TIMINGS = "timings.jsonl"
#: Versions and hardware of the last call.
SURROUNDINGS = "surroundings.json"


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep: its folder and its table."""

    folder: Path
    table: SweepTable

    def __str__(self) -> str:
        return f"{self.table}\n  {self.folder}"


def table_of(
    design: Design,
    runs: Sequence[PlannedRun],
    files: Mapping[str, SweepRun],
    base: ModelOutcome,
    sweep: Path,
) -> SweepTable:
    """Make the table of all runs.

    Args:
        design: The grid.
        runs: In the order of the rows.
        files: The file of every run, by its key.
        base: The uncut model's outcome.
        sweep: The sweep's folder.
    """
    done = [run for run in runs if files[run.key].status == "done"]
    outcomes = [outcome_of(sweep, str(files[run.key].outcome)) for run in done]

    # Drops are resampled for all models at once, on the same examples.
    drops: dict[str, tuple[Drop, ...]] = {}
    for split in SPLITS:
        answers = [outcome.answers(split) for outcome in outcomes]
        drops[split] = paired_drops(base.answers(split), answers)

    # One row per finished run.
    rows = []
    for i, run in enumerate(done):
        row = {"run": run.key[:24], **run.values, "seed": run.draw}
        for split in SPLITS:
            row |= _quality_columns(split, outcomes[i], drops[split][i])
        plan = file_of(sweep, "plans", run.plan).relative_to(sweep)
        row |= {**outcomes[i].sizes, "plan": str(plan)}
        rows.append(FrozenDict(row))
    # One entry per failed run.
    failed = []
    for run in runs:
        file = files[run.key]
        if file.status == "failed":
            failed.append(FrozenDict({**run.values, "seed": run.draw, "error": file.error}))
    return SweepTable(
        name=design.recipe.name,
        metric=base.metric,
        keys=design.keys,
        budgets=design.budgets,
        base=_base_row(base),
        rows=tuple(rows),
        failed=tuple(failed),
    )


def _quality_columns(split: str, outcome: ModelOutcome, drop: Drop) -> dict[str, float]:
    """The columns of a row about one split."""
    return {
        split: outcome.answers(split).value,
        f"{split}_loss": outcome.loss(split),
        f"{split}_drop": drop.value,
        f"{split}_drop_low": drop.low,
        f"{split}_drop_high": drop.high,
    }


def _base_row(base: ModelOutcome) -> FrozenDict:
    """The uncut model's metrics, losses, numbers of rows and sizes."""
    row: dict[str, Any] = {split: base.answers(split).value for split in SPLITS}
    row |= {f"{split}_loss": base.loss(split) for split in SPLITS}
    row |= {f"{split}_rows": len(base.arrays[f"{split}.losses"]) for split in SPLITS}
    return FrozenDict({**row, **base.sizes})


def write_table(table: SweepTable, sweep: Path) -> list[Path]:
    """Write ``table.json``, ``table.csv`` and ``table.parquet``; return their paths."""
    rows = list(map(dict, table.rows))
    return [table.save(sweep / TABLE), *_write_columns(rows, sweep / "table")]


def write_timings(runs: Sequence[PlannedRun], files: Mapping[str, SweepRun], sweep: Path) -> None:
    """Write ``timings.csv``: seconds of every run's scores, plan and model.

    A shared piece is listed at every run that uses it. A cell is empty if the process was killed
    before it noted the time. Times are not in the table, which is the same in every repetition.
    """
    seconds = _read_timings(sweep / TIMINGS)
    rows = []
    for run in runs:
        outcome = str(files[run.key].outcome)
        row = {
            "run": run.key[:24],
            **run.values,
            "seed": run.draw,
            "score": seconds.get(("scores", run.scores)),
            "select": seconds.get(("plans", run.plan)),
            "cut, recover and judge": seconds.get(("outcomes", outcome)),
        }
        rows.append(row)
    _write_columns(rows, sweep / "timings", (".csv",))


def _read_timings(path: Path) -> dict[tuple[str, str], float]:
    """Read the seconds of every task, by kind and key."""
    seconds: dict[tuple[str, str], float] = {}
    if not path.is_file():
        return seconds
    for line in read_bytes(path).splitlines():
        # A killed process may leave half a line. Other lines that cannot be read are skipped too:
        # nothing depends on times.
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            timing = json.loads(line)
            seconds[timing["kind"], timing["key"]] = float(timing["seconds"])
    return seconds


def write_surroundings(recipe: Recipe, sweep: Path) -> None:
    """Write ``surroundings.json``: versions and hardware of this call.

    All runs of the table have these versions and this kind of device, which their keys contain.
    Other facts are those of the machine that worked last.
    """
    # Not in the table, which is the same on machines that compute the same.
    facts = {"versions": versions(), "hardware": hardware(resolve_device(recipe.device))}
    write_atomic(sweep / SURROUNDINGS, (json.dumps(facts, indent=1) + "\n").encode())


def _write_columns(
    rows: list[dict[str, Any]], stem: Path, endings: Sequence[str] = (".csv", ".parquet")
) -> list[Path]:
    """Write rows as columns to one file per format; return the paths."""
    import pyarrow
    from pyarrow import csv, parquet

    names = list(rows[0]) if rows else ["run"]
    columns: dict[str, list[Any]] = {}
    for name in names:
        columns[name] = _one_type([row[name] for row in rows])
    paths = []
    for ending in endings:
        path = stem.with_name(stem.name + ending)
        with atomic_path(path) as temporary:
            # Only CSV is opened in spreadsheets, which would compute formulas.
            if ending == ".csv":
                escaped = {_escaped(name): list(map(_escaped, columns[name])) for name in names}
                csv.write_csv(pyarrow.table(escaped), temporary)
            else:
                parquet.write_table(pyarrow.table(columns), temporary)
        paths.append(path)
    return paths


def _escaped(cell: Any) -> Any:
    """A cell that no spreadsheet computes: a text like a formula gets a leading apostrophe."""
    if not isinstance(cell, str) or not _FORMULA.match(cell) or _NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"


def _one_type(values: list[Any]) -> list[Any]:
    """Give a column one type: mixed values, such as words and numbers, become text."""
    # A column of Parquet has one type.
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 or kinds == {int, float}:
        return values
    return [None if value is None else str(value) for value in values]
