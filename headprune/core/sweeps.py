"""SweepTable: every run of a sweep as one row, the Pareto curve, and the best per budget."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.core.codec import FrozenDict, Value
from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.metrics import drop_words

if TYPE_CHECKING:
    from typing_extensions import Self

#: The columns of a table that hold a model's size.
SIZES = ("heads", "params", "macs", "kv")
#: Names of a run and of a plan's file. A table may come from anywhere, and pages link to these.
_RUN = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z0-9_-]")
_PLAN = re.compile(r"plans/[A-Za-z0-9_-]+\.json")


@dataclass(frozen=True)
class Spread:
    """Mean over calibration draws; ``sd`` is None for a single draw."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one value per draw."""
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd)


@dataclass(frozen=True)
class Setting:
    """One combination of the grid, over all its calibration draws.

    Args:
        values: The value of every grid key.
        method: All of them but the budget, as text.
        budget: The budget, in words; empty where the grid has none.
        rows: Its rows of the table, one per draw.
        validation, test: Drops against the base.
    """

    values: FrozenDict
    method: str
    budget: str
    rows: tuple[FrozenDict, ...]
    validation: Spread
    test: Spread

    @property
    def is_random(self) -> bool:
        """Whether its heads were drawn at random, by the grid's value."""
        return "random" in (self.values.get("scorer"), self.values.get("score.scorer"))

    def size(self, by: str) -> float:
        """Mean size over the draws."""
        return statistics.fmean(row[by] for row in self.rows)

    @property
    def best(self) -> FrozenDict:
        """The row whose drop on validation rows is the smallest; the first of equals."""
        return min(self.rows, key=lambda row: row["validation_drop"])


@dataclass(frozen=True)
class SweepTable(Value):
    """The outcome of a sweep.

    It has no timings: the table is the same whenever and wherever the sweep runs.

    A row has ``run`` (its digest), the grid's keys, ``seed``, the metric on ``validation`` and
    ``test`` rows with the mean per-example ``_loss``, and the ``_drop`` against the base (see
    ``headprune.core.metrics.drop``; above 0 is worse). ``_low`` and ``_high`` are the drop's 95 %
    interval by the paired bootstrap over examples. ``heads``, ``params``, ``macs`` and ``kv``
    (bytes per token; None without a cache) are sizes of the cut model, and ``neurons`` where
    feed-forwards may be cut; ``plan`` is its file.

    Args:
        name: The recipe's name.
        metric: ``accuracy``, ``perplexity``, ``mse`` or ``loss``.
        keys: The grid's keys, as they were given.
        budgets: Those of them that are budgets.
        base: The uncut model: ``validation``, ``test``, their losses, and sizes.
        rows: One per finished run.
        failed: Runs that ended in an error: grid keys, ``seed`` and ``error``.
    """

    name: str
    metric: str
    keys: tuple[str, ...]
    budgets: tuple[str, ...]
    base: FrozenDict
    rows: tuple[FrozenDict, ...] = ()
    failed: tuple[FrozenDict, ...] = ()

    @classmethod
    def from_dict(cls, data: Any, where: str = "") -> Self:
        """Rebuild a table; its rows must have the columns of a sweep's.

        Raises:
            InvalidValue: as for every value; or a column that is missing or of another kind.
        """
        table = super().from_dict(data, where)
        _check_table(table, where or cls.__name__)
        return table

    def settings(self) -> tuple[Setting, ...]:
        """Every combination that has a finished run, in the order of the rows."""
        # Dicts keep the order of the first row of each combination.
        rows_of: dict[tuple[Any, ...], list[FrozenDict]] = {}
        for row in self.rows:
            combination = tuple(row[key] for key in self.keys)
            rows_of.setdefault(combination, []).append(row)
        return tuple(map(self._setting, rows_of.values()))

    def _setting(self, rows: list[FrozenDict]) -> Setting:
        values = FrozenDict({key: rows[0][key] for key in self.keys})
        method: dict[str, Any] = {}
        budget: dict[str, Any] = {}
        for key, value in values.items():
            # A budget is no part of the method: methods are compared at equal budgets.
            part = budget if key in self.budgets else method
            part[key] = value
        return Setting(
            values=values,
            method=words(method) or "all",
            budget=words(budget),
            rows=tuple(rows),
            validation=Spread.of([row["validation_drop"] for row in rows]),
            test=Spread.of([row["test_drop"] for row in rows]),
        )

    @property
    def usual_size(self) -> str:
        """The size that models are ranked by: ``heads``, or ``params`` where neurons are cut."""
        return "params" if "neurons" in self.base else "heads"

    def front(self, by: str | None = None) -> tuple[Setting, ...]:
        """The Pareto curve, largest first.

        Its settings are those that no other beats in both size and mean validation drop. By default
        the size is `usual_size`.
        """
        by = by or self.usual_size
        check_size(self.base, by, "SweepTable.front(by=)")
        settings = self.settings()
        sizes = [setting.size(by) for setting in settings]
        # The choice uses validation rows only, so that test rows stay an honest check.
        chosen = pareto(sizes, [setting.validation.mean for setting in settings])
        return tuple(settings[i] for i in reversed(chosen))

    def best(self) -> tuple[Setting, ...]:
        """For every budget the setting with the smallest mean drop on validation rows.

        Of equals the first.
        """
        best: dict[str, Setting] = {}
        for setting in self.settings():
            other = best.get(setting.budget)
            if other is None or setting.validation.mean < other.validation.mean:
                best[setting.budget] = setting
        return tuple(best.values())

    def __str__(self) -> str:
        base = (
            f"{self.metric} {self.base['validation']:.4f} validation, {self.base['test']:.4f} test"
        )
        lines = [
            f"SweepTable {self.name}: {len(self.rows)} runs of {len(self.settings())} settings;"
            f" base: {base}"
        ]
        # 1. The best setting of each budget.
        for setting in self.best():
            drops = (
                f"validation {self.spread(setting.validation)}, test {self.spread(setting.test)}"
            )
            where = f"{setting.budget}: " if setting.budget else ""
            size = f"{setting.size('heads'):g} heads"
            if "neurons" in self.base:
                size += f", {setting.size('neurons'):,g} neurons"
            lines.append(f"  {where}{setting.method}, {size}, drop {drops}")
        # 2. Runs without a result.
        for row in self.failed:
            combination = {key: value for key, value in row.items() if key != "error"}
            lines.append(f"  failed: {words(combination)}: {row['error']}")
        return "\n".join(lines)

    def spread(self, drop: Spread) -> str:
        """A mean drop and its spread in words."""
        number, _, unit = drop_words(self.metric, drop.mean).partition(" ")
        # The unit is written once, after the spread.
        if drop.sd is not None:
            sd, _, _ = drop_words(self.metric, drop.sd).partition(" ")
            number += f" ± {sd}"
        return f"{number} {unit}".rstrip()


def _check_table(table: SweepTable, where: str) -> None:
    """Refuse a table that no sweep wrote."""
    _check_keys(table.base, SIZES, f"{where}.base", "one without")
    _check_model(table.base, f"{where}.base", table.base)
    _check_numbers(table.base, ("validation_rows", "test_rows"), f"{where}.base")
    for i, row in enumerate(table.rows):
        here = f"{where}.rows[{i}]"
        _check_model(row, here, table.base)
        _check_numbers(row, ("validation_drop", "test_drop"), here)
        _check_file_name(row, "run", _RUN, here)
        _check_file_name(row, "plan", _PLAN, here)
        _check_keys(row, table.keys, here, "a row without")
    for i, row in enumerate(table.failed):
        _check_keys(row, ("error",), f"{where}.failed[{i}]", "a row without")


def _check_keys(row: FrozenDict, needed: Sequence[str], where: str, got: str) -> None:
    missing = [key for key in needed if key not in row]
    if missing:
        raise InvalidValue(where, f"complete (with {', '.join(missing)})", got)


def _check_numbers(row: FrozenDict, names: Sequence[str], where: str) -> None:
    for name in names:
        if not _is_number(row.get(name)):
            raise InvalidValue(f"{where}.{name}", "a number", repr(row.get(name)))


def _check_file_name(row: FrozenDict, name: str, pattern: re.Pattern[str], where: str) -> None:
    value = row.get(name)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        must = "the name of a file of this sweep, inside its folder"
        raise InvalidValue(f"{where}.{name}", must, repr(value))


def _check_model(row: FrozenDict, where: str, base: FrozenDict) -> None:
    """Refuse wrong metrics, or other sizes than the base has."""
    _check_numbers(row, ("validation", "test"), where)
    for name in SIZES:
        # A model without a KV cache has no cache size, before and after a cut.
        size = row.get(name)
        if name != "heads" and base.get(name) is None:
            if size is not None:
                raise InvalidValue(f"{where}.{name}", "none, as the base has", repr(size))
        elif not _is_number(size) or not math.isfinite(row[name]):
            raise InvalidValue(f"{where}.{name}", "a size", repr(size))


def _is_number(value: Any) -> bool:
    """Whether sums, spreads and axes can take a value.

    NaN and infinity are numbers too: the loss of a model that a cut has ruined.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) < 1e306 or not math.isfinite(value)


def words(values: Any) -> str:
    """Keys and values of a combination, as text.

    >>> words({"scorer": "taylor", "keep": 0.5})
    'scorer taylor, keep 0.5'
    """
    return ", ".join(f"{key} {value}" for key, value in values.items())


def pareto(sizes: Sequence[float], drops: Sequence[float]) -> list[int]:
    """Find the points that no other beats.

    A point beats another if it is as small and loses less, or is smaller and loses as little.

    Returns:
        Their positions, smallest first. Of equal points only the first one.

    >>> pareto([36, 24, 24, 14], [0.01, 0.02, 0.03, 0.02])
    [3, 0]
    """
    # From the smallest up: a larger model must lose less than all smaller ones.
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], drops[i], i))
    chosen: list[int] = []
    for i in order:
        if not chosen or drops[i] < drops[chosen[-1]]:
            chosen.append(i)
    return chosen


def check_size(base: FrozenDict, by: str, where: str) -> None:
    """Refuse an unknown size, or one that the model does not have.

    Raises:
        UnknownName: no such size.
        InvalidValue: no KV cache.
    """
    if by not in SIZES:
        raise UnknownName(where, f"one of {', '.join(SIZES)}", repr(by), did_you_mean(by, SIZES))
    if base[by] is None:
        got = f"{by!r}, of a model without a KV cache"
        raise InvalidValue(where, "a size that the model has", got)
