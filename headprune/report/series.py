"""Quality against heads kept, by method: the points and lines of trade-off pictures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadCounts
from headprune.core.plan import Budget
from headprune.core.record import QualityRow, RunRecord
from headprune.core.sweeps import SweepTable

#: Recipe keys in which runs of one method may differ: where they lie, how much they cut, what was
#: drawn and timed.
_FREE = {
    "name",
    "description",
    "out",
    "seed",
    "threads",
    "bench",
    "report",
    *(field.name for field in fields(Budget)),
}
#: Rows that a run is compared with, and the recipe keys that cannot change them.
_BASELINES = ("base", "random", "magnitude")
_OURS = {"score", "scorer", "recover", "gradual", "preset"}
#: Recipe keys that records on one curve must share.
_SUBJECT = ("task", "model", "train", "data")


@dataclass(frozen=True)
class TradeoffPoint:
    """One measurement; ``spread`` is a standard deviation over ``draws``, 0 without."""

    metric: str
    method: str  # row of the quality table, or setting of a sweep
    kept: int  # heads
    value: float
    spread: float
    draws: int = 1
    neurons: int | None = None  # kept, where feed-forwards may be cut


@dataclass(frozen=True)
class Comparable:
    """Records of one task, model and data: their names, and a point per row of their tables."""

    names: tuple[str, ...]
    points: tuple[TradeoffPoint, ...]


@dataclass(frozen=True)
class Series:
    """One method: (heads kept, mean, spread), in order of heads kept."""

    method: str
    points: tuple[tuple[int, float, float], ...]

    @property
    def role(self) -> str:
        """``base`` for the uncut model, ``random`` for chance, else ``method``."""
        # Brackets hold the name of a scorer or a record.
        method = self.method.partition(" [")[0]
        if method == "base":
            return "base"
        # Methods of a sweep read "scorer random, recover none".
        words = method.replace(",", " ").split()
        return "random" if "random" in words else "method"


@dataclass(frozen=True)
class _RecordedRow:
    """A row with its record's name and scorer.

    ``way`` is the recipe without budget and seed: equal for runs of one method.
    """

    row: QualityRow
    record: str  # its name
    scorer: str
    way: Hashable


def comparable(records: Iterable[tuple[str, RunRecord]], split: str) -> list[Comparable]:
    """Group named records by task, model and data, and collect their points.

    A method in several records keeps its name where these differ in budget and seed alone. Else it
    gets their scorer's name in brackets; where that is the same, the record's name.
    """
    groups: dict[Hashable, list[tuple[str, RunRecord]]] = {}
    for name, record in records:
        if any(row.split == split for row in record.quality):
            groups.setdefault(_subject(record, split), []).append((name, record))
    comparables = []
    for members in groups.values():
        names, _ = zip(*members, strict=True)
        comparables.append(Comparable(names, tuple(_points(members, split))))
    return comparables


def points_of_sweep(table: SweepTable, split: str) -> list[TradeoffPoint]:
    """Make a point for the uncut model and one per run.

    Raises:
        InvalidValue: no such split.
    """
    if split not in ("test", "validation"):
        raise InvalidValue("split", "test or validation", repr(split))
    metric, base = table.metric, table.base

    def point(method: str, row: Mapping[str, Any]) -> TradeoffPoint:
        kept, value = int(row["heads"]), float(row[split])
        return TradeoffPoint(metric, method, kept, value, 0.0, neurons=row.get("neurons"))

    points = [point("base", base)]
    for setting in table.settings():
        points += [point(setting.method, row) for row in setting.rows]
    return points


def differ_in_heads_alone(points: Iterable[TradeoffPoint]) -> bool:
    """Whether all models keep as many neurons, so that heads are a measure of their size."""
    return len({point.neurons for point in points}) < 2


def series_of(points: Iterable[TradeoffPoint]) -> list[Series]:
    """Sort points by method and heads kept; several of one size become their mean and spread."""
    methods: dict[str, dict[int, list[TradeoffPoint]]] = {}
    for point in points:
        methods.setdefault(point.method, {}).setdefault(point.kept, []).append(point)
    lines = []
    for method, sizes in methods.items():
        means = tuple(_mean(kept, sizes[kept]) for kept in sorted(sizes))
        lines.append(Series(method, means))
    return lines


def _mean(kept: int, points: list[TradeoffPoint]) -> tuple[int, float, float]:
    """Pool all draws: their mean and standard deviation, within the points and between them."""
    # Equal points with a spread are the same draws in several records.
    distinct = dict.fromkeys(point for point in points if point.spread)
    pooled = [*distinct, *(point for point in points if not point.spread)]
    first = pooled[0]
    if len(pooled) == 1:
        return kept, first.value, first.spread
    draws = []
    for point in pooled:
        # A spread needs two draws at least.
        fewest = 2 if point.spread else 1
        draws.append(max(point.draws, fewest))
    n_draws = sum(draws)
    if len({point.value for point in pooled}) == 1:
        # The weighted mean has a rounding error, which would show as a spread.
        mean = first.value
    else:
        mean = math.fsum(n * point.value for n, point in zip(draws, pooled, strict=True)) / n_draws
    squares = []
    for n, point in zip(draws, pooled, strict=True):
        squares.append((n - 1) * point.spread**2 + n * (point.value - mean) ** 2)
    return kept, mean, math.sqrt(sum(squares) / (n_draws - 1))


def _subject(record: RunRecord, split: str) -> Hashable:
    """What records must share to be on one curve."""
    shape, value = None, None
    for row in record.quality:
        if row.split == split and row.name == "base":
            shape, value = (row.metric, row.kept_heads, row.n_examples), row.value
            break
    structure = record.scores.model.structure if record.scores else None
    recipe = {key: record.recipe[key] for key in _SUBJECT if key in record.recipe}
    data = recipe.get("data")
    if isinstance(data, Mapping):
        # Other calibration rows give other plans for the same model and test rows.
        recipe["data"] = {key: value for key, value in data.items() if key != "calibration"}
    if recipe:
        return shape, structure, FrozenDict(recipe)
    # Without a recipe, only the uncut model's value tells models apart.
    return shape, structure, value


def _points(records: Sequence[tuple[str, RunRecord]], split: str) -> list[TradeoffPoint]:
    """Make a point per row, under a label that is the same for runs of one method."""
    # 1. Collect the rows of every method.
    methods: dict[str, list[_RecordedRow]] = {}
    for name, record in records:
        for row in record.quality:
            if row.split == split:
                methods.setdefault(row.name, []).append(_recorded_row(row, name, record))
    # 2. Add the scorer's name where several scorers have a row of one name, as recoveries do.
    labels: dict[str, list[_RecordedRow]] = {}
    for method, rows in methods.items():
        shared = method in _BASELINES or len({row.scorer for row in rows}) == 1
        for each in rows:
            label = method
            if not shared and each.scorer != method:
                label += f" [{each.scorer}]"
            labels.setdefault(label, []).append(each)
    # 3. Add the record's name where that is not enough.
    points = []
    for label, rows in labels.items():
        points += _labelled_points(label, rows)
    return points


def _labelled_points(label: str, rows: Sequence[_RecordedRow]) -> list[TradeoffPoint]:
    """Make the points of one label; ways that disagree get their first record's name."""
    owners: dict[Hashable, str] = {}
    if label != "base" and _disagree(rows):
        owners = _owners(rows)
    points = []
    for each in rows:
        row = each.row
        method = f"{label} [{owners[each.way]}]" if owners else label
        spread = row.spread or 0.0
        points.append(
            TradeoffPoint(
                row.metric, method, row.kept_heads, row.value, spread, row.draws, row.kept_neurons
            )
        )
    return points


def _disagree(rows: Sequence[_RecordedRow]) -> bool:
    """Whether two ways have different values for one size."""
    sizes: dict[HeadCounts, dict[Hashable, set[float]]] = {}
    for each in rows:
        ways = sizes.setdefault(each.row.kept, {})
        ways.setdefault(each.way, set()).add(each.row.value)
    return any(len(set(map(frozenset, ways.values()))) > 1 for ways in sizes.values())


def _owners(rows: Sequence[_RecordedRow]) -> dict[Hashable, str]:
    """Name every way after its first record, numbered where records share a name."""
    owners: dict[Hashable, str] = {}
    taken: Counter[str] = Counter()
    for each in rows:
        if each.way not in owners:
            taken[each.record] += 1
            n = taken[each.record]
            owners[each.way] = each.record if n == 1 else f"{each.record} #{n}"
    return owners


def _recorded_row(row: QualityRow, name: str, record: RunRecord) -> _RecordedRow:
    ignored = _FREE
    if row.name in _BASELINES:
        ignored = _FREE | _OURS
    scorer = record.scores.scorer if record.scores else ""
    return _RecordedRow(row, name, scorer, FrozenDict(_without(record.recipe, ignored)))


def _without(recipe: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    """Copy a recipe without some keys, at any depth."""
    copied = {}
    for key, value in recipe.items():
        if key not in keys:
            copied[key] = _without(value, keys) if isinstance(value, Mapping) else value
    return copied
