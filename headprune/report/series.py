"""Quality against heads kept, method by method: what pictures of the trade-off draw."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.plan import Budget
from headprune.core.record import QualityRow, RunRecord
from headprune.core.sweeps import SweepTable

#: Keys of recipes by which runs of one way may differ: where they lie, how much they cut, what was
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
#: Rows that a run is compared with, and the sections of recipes that change nothing about them.
_BASELINES = ("base", "random", "magnitude")
_OURS = {"score", "scorer", "recover", "gradual", "preset"}


@dataclass(frozen=True)
class TradeoffPoint:
    """One measurement; ``spread`` is a standard deviation over ``draws``, 0 without."""

    metric: str
    method: str
    kept: int
    value: float
    spread: float
    draws: int = 1


@dataclass(frozen=True)
class Comparable:
    """Records of one task, model and data, by name, and a point a row of their accuracy tables."""

    names: tuple[str, ...]
    points: tuple[TradeoffPoint, ...]


@dataclass(frozen=True)
class Series:
    """One method: heads kept, mean and spread, by heads kept; ``role`` says how it is drawn."""

    method: str
    points: tuple[tuple[int, float, float], ...]

    @property
    def role(self) -> str:
        """``base`` for the uncut model, ``random`` for chance, else ``method``."""
        method = self.method.partition(" [")[0]  # in brackets stands whose it is
        words = method.replace(",", " ").split()  # of a sweep: "scorer random, recover none"
        return "base" if method == "base" else "random" if "random" in words else "method"


@dataclass(frozen=True)
class _Row:
    """A row of a table, and whose it is; ``way`` is equal for runs that differ in budget and seed
    alone."""

    row: QualityRow
    record: str
    scorer: str
    way: Hashable


def comparable(records: Iterable[tuple[str, RunRecord]], split: str) -> list[Comparable]:
    """The points of named records, those apart that are of another task, model or data: no line
    joins these.

    A method that stands in several records keeps its name where these differ in budget and seed
    alone. Else it gets their scorer's name in brackets or, where that does not tell them apart, the
    record's.
    """
    groups: dict[Hashable, list[tuple[str, RunRecord]]] = {}
    for name, record in records:
        if any(row.split == split for row in record.quality):
            groups.setdefault(_subject(record, split), []).append((name, record))
    return [
        Comparable(tuple(name for name, _ in found), tuple(_points(found, split)))
        for found in groups.values()
    ]


def points_of_sweep(table: SweepTable, split: str) -> list[TradeoffPoint]:
    """The uncut model, and a point a run.

    Raises:
        InvalidValue: no such split.
    """
    if split not in ("test", "validation"):
        raise InvalidValue("split", "test or validation", repr(split))
    base = TradeoffPoint(
        table.metric, "base", int(table.base["heads"]), float(table.base[split]), 0.0
    )
    runs = ((setting.method, row) for setting in table.settings() for row in setting.rows)
    return [
        base,
        *(
            TradeoffPoint(table.metric, m, int(row["heads"]), float(row[split]), 0.0)
            for m, row in runs
        ),
    ]


def series_of(points: Iterable[TradeoffPoint]) -> list[Series]:
    """Points by method; several of one method and size become their mean, with the spread of all
    their draws."""
    methods: dict[str, dict[int, list[TradeoffPoint]]] = {}
    for point in points:
        methods.setdefault(point.method, {}).setdefault(point.kept, []).append(point)
    return [
        Series(m, tuple(_mean(kept, by_kept[kept]) for kept in sorted(by_kept)))
        for m, by_kept in methods.items()
    ]


def _mean(kept: int, points: list[TradeoffPoint]) -> tuple[int, float, float]:
    """The mean of all draws, and their standard deviation: inside of every point, and between the
    points."""
    once = list(
        dict.fromkeys(p for p in points if p.spread)
    )  # the same draws, told by several records
    once += [p for p in points if not p.spread]
    if len(once) == 1:
        return kept, once[0].value, once[0].spread
    draws = [max(p.draws, 2 if p.spread else 1) for p in once]
    values = {p.value for p in once}
    mean = math.fsum(n * p.value for n, p in zip(draws, once, strict=True)) / sum(draws)
    mean = (
        values.pop() if len(values) == 1 else mean
    )  # without an error of rounding, which would be a spread
    squares = sum(
        (n - 1) * p.spread**2 + n * (p.value - mean) ** 2 for n, p in zip(draws, once, strict=True)
    )
    return kept, mean, math.sqrt(squares / (sum(draws) - 1))


def _subject(record: RunRecord, split: str) -> Hashable:
    """What records must share to stand on one curve; the value of the uncut model only where no
    recipe says more."""
    base = next((row for row in record.quality if (row.split, row.name) == (split, "base")), None)
    shape = base and (base.metric, base.kept_heads, base.n_examples)
    told = {
        key: record.recipe[key]
        for key in ("task", "model", "train", "data")
        if key in record.recipe
    }
    if isinstance(data := told.get("data"), Mapping):
        told["data"] = {key: value for key, value in data.items() if key != "calibration"}
    structure = record.scores.model.structure if record.scores else None
    return shape, structure, FrozenDict(told) if told else base and base.value


def _points(records: Sequence[tuple[str, RunRecord]], split: str) -> list[TradeoffPoint]:
    rows = [
        _row(row, name, record)
        for name, record in records
        for row in record.quality
        if row.split == split
    ]
    labels: dict[str, list[_Row]] = {}
    for name in dict.fromkeys(row.row.name for row in rows):
        found = [row for row in rows if row.row.name == name]
        alone = name in _BASELINES or len({row.scorer for row in found}) == 1
        for row in found:
            labels.setdefault(
                name if alone or row.scorer == name else f"{name} [{row.scorer}]", []
            ).append(row)
    return [point for label, found in labels.items() for point in _labelled(label, found)]


def _labelled(label: str, rows: Sequence[_Row]) -> list[TradeoffPoint]:
    """Points of one label; where ways of one size disagree, each gets its first record's name."""
    values: dict[int, dict[Hashable, set[float]]] = {}
    for row in rows:
        values.setdefault(row.row.kept_heads, {}).setdefault(row.way, set()).add(row.row.value)
    apart = label != "base" and any(
        len(set(map(frozenset, found.values()))) > 1 for found in values.values()
    )
    owners: dict[Hashable, str] = {}
    for row in rows if apart else ():
        if row.way not in owners:
            taken = sum(owner.partition(" #")[0] == row.record for owner in owners.values())
            owners[row.way] = f"{row.record} #{taken + 1}" if taken else row.record
    return [_point(row.row, f"{label} [{owners[row.way]}]" if apart else label) for row in rows]


def _point(row: QualityRow, method: str) -> TradeoffPoint:
    return TradeoffPoint(
        row.metric, method, row.kept_heads, row.value, row.spread or 0.0, row.draws
    )


def _row(row: QualityRow, name: str, record: RunRecord) -> _Row:
    left_out = _FREE | _OURS if row.name in _BASELINES else _FREE
    return _Row(
        row,
        name,
        record.scores.scorer if record.scores else "",
        FrozenDict(_without(record.recipe, left_out)),
    )


def _without(recipe: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {
        k: _without(v, keys) if isinstance(v, Mapping) else v
        for k, v in recipe.items()
        if k not in keys
    }
