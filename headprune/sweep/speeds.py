"""Speed of a sweep's cut models, each timed in turn with the uncut one, in one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from headprune.bench.latency import compare_latency, shaped_batch
from headprune.core.files import write_atomic
from headprune.core.opening import read_bytes
from headprune.core.plan import PruningPlan
from headprune.core.record import SpeedRow
from headprune.core.sweeps import SweepTable
from headprune.model.costs import measure_costs
from headprune.model.sites import bind
from headprune.recipes.schema import Recipe
from headprune.report.formats import times
from headprune.run.subject import Subject
from headprune.surgery.prune import prune_

#: How models were timed, and a row per plan's file.
SPEEDS = "speeds.json"


def measure_speeds(
    table: SweepTable,
    folder: Path,
    recipe: Recipe,
    open_subject: Callable[[], Subject],
    say: Callable[[str], None],
) -> None:
    """Time the model of every plan that has no speed yet, and write ``speeds.json``.

    Models that keep as many heads in every layer have one speed, whatever was recovered. The shape
    is the largest of the recipe's ``bench`` section, which it must have. After another shape,
    device or number of threads, all models are timed again.

    Args:
        table: The sweep's table.
        folder: The sweep's folder.
        recipe: The sweep's, with a ``bench`` section.
        open_subject: Opens the base model.
        say: Takes a line per measurement.
    """
    # 1. What an earlier call timed in the same way.
    asked = _way(recipe)
    found = _read(folder)
    speeds = _rows_of(found) if found.get("way") == asked else {}
    plans = [row["plan"] for row in table.rows if row["plan"] not in speeds]
    if not plans:
        return

    # 2. Time one model per number of heads in every layer.
    subject = open_subject()
    known: dict[Any, SpeedRow] = {}
    for file in dict.fromkeys([*speeds, *plans]):
        plan = PruningPlan.load(folder / file)
        counts = tuple((row.site, len(row.kept)) for row in plan.mask.rows)
        if file in speeds:
            known[counts] = speeds[file]
            continue
        if counts not in known:
            known[counts] = _measured(subject, plan, asked["batch"], asked["length"])
            say(f"[speed] {plan.mask.kept_counts}: {times(known[counts].ratio)} as fast")
        speeds[file] = known[counts]
    data = {"way": asked, "speeds": {file: asdict(row) for file, row in speeds.items()}}
    write_atomic(folder / SPEEDS, (json.dumps(data, indent=1) + "\n").encode())


def _way(recipe: Recipe) -> dict[str, Any]:
    """What the timings of a recipe depend on, beside the models."""
    wanted = recipe.bench
    assert wanted is not None
    return {
        "batch": max(wanted.batch_sizes),
        "length": max(wanted.lengths or [0]),
        "device": str(recipe.device),
        "threads": recipe.threads,
    }


def _measured(subject: Subject, plan: PruningPlan, batch: int, length: int) -> SpeedRow:
    wanted, example = subject.recipe.bench, subject.example
    assert wanted is not None
    pruned = copy.deepcopy(subject.model)
    prune_(pruned, plan, example=example, sites=subject.sites)
    if not length:  # that of the examples
        bound = bind(subject.model, subject.sites)
        length = measure_costs(subject.model, bound, example).length
    make = partial(shaped_batch, example)
    seconds = wanted.seconds
    (row,) = compare_latency(subject.model, pruned, make, [batch], [length], seconds=seconds)
    return row


def load_speeds(folder: Path) -> Mapping[str, SpeedRow]:
    """Read the speeds of a sweep, by the plans' files; empty if none were measured."""
    return _rows_of(_read(folder))


def _read(folder: Path) -> Mapping[str, Any]:
    """The file of speeds; empty where there is none, or a damaged one."""
    if not (folder / SPEEDS).is_file():
        return {}
    try:
        data = json.loads(read_bytes(folder / SPEEDS))
    except ValueError:
        return {}  # measured again by the next sweep
    return data if isinstance(data, dict) else {}


def _rows_of(data: Mapping[str, Any]) -> dict[str, SpeedRow]:
    try:
        return {str(file): SpeedRow(**row) for file, row in data["speeds"].items()}
    except (KeyError, TypeError, AttributeError):
        return {}
