"""The table of a sweep, made from its files, and written in every form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.files import atomic_path, write_atomic
from headprune.core.opening import read_bytes
from headprune.core.sweeps import SweepTable
from headprune.data.models import resolve_device
from headprune.recipes.schema import Recipe
from headprune.run.journal import TABLE
from headprune.run.surroundings import hardware, versions
from headprune.sweep.grid import Design
from headprune.sweep.outcome import SPLITS, Outcome
from headprune.sweep.paired import paired_drops
from headprune.sweep.runs import Run, SweepRun
from headprune.sweep.tasks import file_of, outcome_of

#: How text begins that spreadsheets take for a formula; numbers, which begin so and are none.
_FORMULA = re.compile(
    r"[=@+\-\t\r\n\uff1d\uff20\uff0b\uff0d]"
)  # the last four are wide forms of the first
_NUMBER = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)
TIMINGS = "timings.jsonl"
SURROUNDINGS = "surroundings.json"


def table_of(
    design: Design, runs: Sequence[Run], files: Mapping[str, SweepRun], base: Outcome, sweep: Path
) -> SweepTable:
    """The table of all runs.

    Args:
        design: The grid.
        runs: In the order of the rows.
        files: The file of every run, by its key.
        base: The uncut model's outcome.
        sweep: The sweep's folder.
    """
    done = [run for run in runs if files[run.key].status == "done"]
    outcomes = [outcome_of(sweep, str(files[run.key].outcome)) for run in done]
    columns: list[dict[str, Any]] = [
        {"run": run.key[:24], **run.values, "seed": run.draw} for run in done
    ]
    for split in SPLITS:
        drops = paired_drops(base.answers(split), [o.answers(split) for o in outcomes])
        for row, outcome, drop in zip(columns, outcomes, drops, strict=True):
            row |= {split: outcome.answers(split).value, f"{split}_loss": outcome.loss(split)}
            row |= {
                f"{split}_drop": drop.value,
                f"{split}_drop_low": drop.low,
                f"{split}_drop_high": drop.high,
            }
    for row, run, outcome in zip(columns, done, outcomes, strict=True):
        row |= {**outcome.sizes, "plan": str(file_of(sweep, "plans", run.plan).relative_to(sweep))}
    failed = [run for run in runs if files[run.key].status == "failed"]
    return SweepTable(
        name=design.recipe.name,
        metric=base.metric,
        keys=design.keys,
        budgets=design.budgets,
        base=FrozenDict(
            {
                **{split: base.answers(split).value for split in SPLITS},
                **{f"{split}_loss": base.loss(split) for split in SPLITS},
                **{f"{split}_rows": len(base.arrays[f"{split}.losses"]) for split in SPLITS},
                **base.sizes,
            }
        ),
        rows=tuple(FrozenDict(row) for row in columns),
        failed=tuple(
            FrozenDict({**r.values, "seed": r.draw, "error": files[r.key].error}) for r in failed
        ),
    )


def write_table(table: SweepTable, sweep: Path) -> list[Path]:
    """``table.json``, ``table.csv`` and ``table.parquet``; returns their paths."""
    return [
        table.save(sweep / TABLE),
        *_columns([dict(row) for row in table.rows], sweep / "table"),
    ]


def write_timings(runs: Sequence[Run], files: Mapping[str, SweepRun], sweep: Path) -> None:
    """``timings.csv``: seconds that the pieces of every run took; shared ones stand at every run
    that uses them.

    Apart from the table, which is the same in every repetition. Empty where a kill came before the
    time was written.
    """
    seconds: dict[tuple[str, str], float] = {}
    path = sweep / TIMINGS
    for line in read_bytes(path).splitlines() if path.is_file() else ():
        # The last line of a killed process, or whatever else lies there: times are for people,
        # nothing is made of them.
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            found = json.loads(line)
            seconds[found["kind"], found["key"]] = float(found["seconds"])
    rows = [
        {
            "run": run.key[:24],
            **run.values,
            "seed": run.draw,
            "score": seconds.get(("scores", run.scores)),
            "select": seconds.get(("plans", run.plan)),
            "cut, recover and judge": seconds.get(("outcomes", str(files[run.key].outcome))),
        }
        for run in runs
    ]
    _columns(rows, sweep / "timings", (".csv",))


def write_surroundings(recipe: Recipe, sweep: Path) -> None:
    """``surroundings.json``: versions and hardware of this call. All runs of the table have these
    versions and this kind of device, for their keys say so; what else there is of a machine is that
    of the last one.

    Apart from the table, too, which is the same on machines that compute the same.
    """
    found = {"versions": versions(), "hardware": hardware(resolve_device(recipe.device))}
    write_atomic(sweep / SURROUNDINGS, (json.dumps(found, indent=1) + "\n").encode())


def _columns(
    rows: list[dict[str, Any]], stem: Path, endings: Sequence[str] = (".csv", ".parquet")
) -> list[Path]:
    import pyarrow
    from pyarrow import csv, parquet

    names = list(rows[0]) if rows else ["run"]
    columns = {name: _one_type([row[name] for row in rows]) for name in names}
    paths = []
    for ending in endings:
        paths.append(stem.with_name(stem.name + ending))
        with atomic_path(paths[-1]) as temporary:
            if ending == ".csv":
                marked = {
                    _no_formula(name): list(map(_no_formula, column))
                    for name, column in columns.items()
                }
                csv.write_csv(pyarrow.table(marked), temporary)
            else:
                parquet.write_table(pyarrow.table(columns), temporary)
    return paths


def _no_formula(cell: Any) -> Any:
    """A cell that a spreadsheet does not compute: text that would be a formula gets the mark of
    text before it."""
    text = isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if text else cell


def _one_type(values: list[Any]) -> list[Any]:
    """A column's values; as text where they are of unlike kinds, such as a word beside a number."""
    kinds = {type(v) for v in values if v is not None}
    return (
        values
        if len(kinds) < 2 or kinds == {int, float}
        else [None if v is None else str(v) for v in values]
    )
