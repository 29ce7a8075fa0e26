"""SweepTable: every run of a sweep as one row; settings pooled over draws, the Pareto curve, the
best per budget."""

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

#: What a model's size may be counted in: the columns of a table that say it.
SIZES = ("heads", "params", "macs", "kv")
#: What a row may call a run and a plan: names of files, for a table may come from anywhere, and
#: pages link to them.
_RUN, _PLAN = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z0-9_-]"), re.compile(r"plans/[A-Za-z0-9_-]+\.json")


@dataclass(frozen=True)
class Spread:
    """Mean over calibration draws; ``sd`` is None for a single draw."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Setting:
    """One combination of the grid, over all its calibration draws.

    Args:
        values: The value of every grid key.
        method: All of them but the budget, in words.
        budget: The budget, in words; empty where the grid has none.
        rows: Its rows of the table, one a draw.
        validation, test: Drops against the base.
    """

    values: FrozenDict
    method: str
    budget: str
    rows: tuple[FrozenDict, ...]
    validation: Spread
    test: Spread

    def size(self, by: str) -> float:
        """Mean size over the draws."""
        return statistics.fmean(row[by] for row in self.rows)

    @property
    def best(self) -> FrozenDict:
        """The row whose drop on validation rows is the smallest; the first of equals."""
        return min(self.rows, key=lambda row: row["validation_drop"])


@dataclass(frozen=True)
class SweepTable(Value):
    """The outcome of a sweep, without timings, so that it is the same whenever and wherever it was
    run.

    A row has ``run`` (its digest), the grid's keys, ``seed``, the metric on ``validation`` and
    ``test`` rows with the mean per-example ``_loss``, the ``_drop`` against the base (see
    ``headprune.core.metrics.drop``; above 0 is worse) with ``_low`` and ``_high``, its 95 %
    interval by the paired bootstrap over examples; ``heads``, ``params``, ``macs`` and ``kv``
    (bytes a token; None where there is no cache) of the cut model, and ``plan``, the file with it.

    Args:
        name: The recipe's name.
        metric: ``accuracy``, ``perplexity``, ``mse`` or ``loss``.
        keys: The grid's keys, as they were given.
        budgets: Those of them that are budgets.
        base: The uncut model: ``validation``, ``test``, their losses, and sizes.
        rows: One a finished run.
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
        """Rebuilds a table; its rows must have the columns of a sweep's.

        Raises:
            InvalidValue: as for every value; or a column that is missing or of another kind.
        """
        table = super().from_dict(data, where)
        _check_columns(table, where or cls.__name__)
        return table

    def settings(self) -> tuple[Setting, ...]:
        """Every combination that has a finished run, in the order of the rows."""
        found: dict[tuple[Any, ...], list[FrozenDict]] = {}
        for row in self.rows:
            found.setdefault(tuple(row[key] for key in self.keys), []).append(row)
        return tuple(self._setting(rows) for rows in found.values())

    def _setting(self, rows: list[FrozenDict]) -> Setting:
        values = FrozenDict({key: rows[0][key] for key in self.keys})
        return Setting(
            values,
            words({k: v for k, v in values.items() if k not in self.budgets}) or "all",
            words({k: v for k, v in values.items() if k in self.budgets}),
            tuple(rows),
            Spread.of([row["validation_drop"] for row in rows]),
            Spread.of([row["test_drop"] for row in rows]),
        )

    def front(self, by: str = "heads") -> tuple[Setting, ...]:
        """The Pareto curve, largest first: settings that no other beats in both size and mean
        validation drop."""
        check_size(self.base, by, "SweepTable.front(by=)")
        settings = self.settings()
        chosen = pareto([s.size(by) for s in settings], [s.validation.mean for s in settings])
        return tuple(settings[i] for i in reversed(chosen))

    def best(self) -> tuple[Setting, ...]:
        """For every budget the setting with the smallest mean drop on validation rows, the first of
        equals."""
        found: dict[str, Setting] = {}
        for setting in self.settings():
            if (
                setting.budget not in found
                or setting.validation.mean < found[setting.budget].validation.mean
            ):
                found[setting.budget] = setting
        return tuple(found.values())

    def __str__(self) -> str:
        base = (
            f"{self.metric} {self.base['validation']:.4f} validation, {self.base['test']:.4f} test"
        )
        lines = [
            f"SweepTable {self.name}: {len(self.rows)} runs of {len(self.settings())} settings;"
            f" base: {base}"
        ]
        for setting in self.best():
            drops = (
                f"validation {self.spread(setting.validation)}, test {self.spread(setting.test)}"
            )
            where = f"{setting.budget}: " if setting.budget else ""
            lines.append(
                f"  {where}{setting.method}, {setting.size('heads'):g} heads, drop {drops}"
            )
        failed = [
            f"  failed: {words({k: v for k, v in f.items() if k != 'error'})}: {f['error']}"
            for f in self.failed
        ]
        return "\n".join([*lines, *failed])

    def spread(self, drop: Spread) -> str:
        """A mean drop and its spread in words."""
        number, _, unit = drop_words(self.metric, drop.mean).partition(" ")
        sd = "" if drop.sd is None else f" ± {drop_words(self.metric, drop.sd).partition(' ')[0]}"
        return f"{number}{sd} {unit}".rstrip()


def _check_columns(table: SweepTable, where: str) -> None:
    """Refuses rows of a file that no sweep has left."""
    if missing := [name for name in SIZES if name not in table.base]:
        raise InvalidValue(f"{where}.base", f"complete (with {', '.join(missing)})", "one without")
    _check_row(table.base, f"{where}.base", table.base)
    for split in ("validation", "test"):
        if not _is_number(table.base.get(f"{split}_rows")):
            raise InvalidValue(
                f"{where}.base.{split}_rows", "a number", repr(table.base.get(f"{split}_rows"))
            )
    for i, row in enumerate(table.rows):
        here = f"{where}.rows[{i}]"
        _check_row(row, here, table.base)
        for name in ("validation_drop", "test_drop"):
            if not _is_number(row.get(name)):
                raise InvalidValue(f"{here}.{name}", "a number", repr(row.get(name)))
        for name, pattern in (("run", _RUN), ("plan", _PLAN)):
            if not isinstance(row.get(name), str) or not pattern.fullmatch(row[name]):
                must = "the name of a file of this sweep, inside its folder"
                raise InvalidValue(f"{here}.{name}", must, repr(row.get(name)))
    for name, rows, needed in (
        ("rows", table.rows, table.keys),
        ("failed", table.failed, ("error",)),
    ):
        for i, row in enumerate(rows):
            if missing := [key for key in needed if key not in row]:
                raise InvalidValue(
                    f"{where}.{name}[{i}]", f"complete (with {', '.join(missing)})", "a row without"
                )


def _check_row(row: FrozenDict, where: str, base: FrozenDict) -> None:
    """A model's metrics, and its sizes: those of the base."""
    for name in ("validation", "test"):
        if not _is_number(row.get(name)):
            raise InvalidValue(f"{where}.{name}", "a number", repr(row.get(name)))
    for name in SIZES:
        lacks = name != "heads" and base.get(name) is None
        if not (
            row.get(name) is None
            if lacks
            else _is_number(row.get(name)) and math.isfinite(row[name])
        ):
            raise InvalidValue(
                f"{where}.{name}",
                "none, as the base has" if lacks else "a size",
                repr(row.get(name)),
            )


def _is_number(value: Any) -> bool:
    """One that sums, spreads and axes can take; a model that has come to nothing may have NaN or
    infinity."""
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
    """Which points no other beats: none is as small and loses less, or is smaller and loses as
    little.

    Returns:
        Their places, smallest first. Of equal points the first one stays.

    >>> pareto([36, 24, 24, 14], [0.01, 0.02, 0.03, 0.02])
    [3, 0]
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], drops[i], i))
    chosen: list[int] = []
    for i in order:
        if not chosen or drops[i] < drops[chosen[-1]]:
            chosen.append(i)
    return chosen


def check_size(base: FrozenDict, by: str, where: str) -> None:
    """Refuses what is no size, or one that the model does not have.

    Raises:
        UnknownName: no such size.
        InvalidValue: no KV cache.
    """
    if by not in SIZES:
        raise UnknownName(where, f"one of {', '.join(SIZES)}", repr(by), did_you_mean(by, SIZES))
    if base[by] is None:
        raise InvalidValue(
            where, "a size that the model has", f"{by!r}, of a model without a KV cache"
        )
