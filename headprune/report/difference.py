"""What two plans, or two records of runs, say differently."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headprune.core.codec import Value, leaves
from headprune.core.errors import PlanMismatch
from headprune.core.heads import HeadId, HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.record import QualityRow, RunRecord

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class PlanDifference(Value):
    """Two plans head by head.

    Args:
        names: What the plans are called.
        titles: Their own words.
        n_heads: Heads that both are about.
        both_keep, both_remove: Heads on which they agree.
        only_first, only_second: Heads that one keeps and the other removes.
    """

    names: tuple[str, str]
    titles: tuple[str, str]
    n_heads: int
    both_keep: int
    both_remove: int
    only_first: tuple[HeadId, ...]
    only_second: tuple[HeadId, ...]

    @property
    def agreement(self) -> float:
        """Jaccard index of the sets that go: heads that both remove over heads that either removes;
        1 for none."""
        either = self.both_remove + len(self.only_first) + len(self.only_second)
        return self.both_remove / either if either else 1.0

    def __str__(self) -> str:
        lines = [f"{name}: {title}" for name, title in zip(self.names, self.titles, strict=True)]
        lines.append(
            f"of {self.n_heads} heads both keep {self.both_keep} and both remove"
            f" {self.both_remove}; of those that either removes, {100 * self.agreement:.0f} % go in"
            " both"
        )
        for name, heads in zip(self.names, (self.only_first, self.only_second), strict=True):
            if heads:
                lines.append(f"kept by {name} alone: {_by_site(heads)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Change:
    """One figure or setting of two records; None where one lacks it."""

    what: str
    first: Scalar
    second: Scalar

    def __str__(self) -> str:
        text = f"{self.what}: {_word(self.first)} -> {_word(self.second)}"
        numbers = isinstance(self.first, (int, float)) and isinstance(self.second, (int, float))
        if not numbers or self.first == self.second:
            return text
        return f"{text} ({self.second - self.first:+.4g})"  # type: ignore[operator]


@dataclass(frozen=True)
class RecordDifference(Value):
    """Two records of runs.

    Args:
        names: What they are called.
        recipe: Settings that differ, by dotted key.
        surroundings: Versions, hardware and commit that differ.
        figures: Quality, sizes and speed of both, line by line.
        plans: Their plans, where both have one for the same sites.
    """

    names: tuple[str, str]
    recipe: tuple[Change, ...]
    surroundings: tuple[Change, ...]
    figures: tuple[Change, ...]
    plans: PlanDifference | None = None

    def __str__(self) -> str:
        first, second = self.names
        lines = [f"{first} -> {second}"]
        for title in ("recipe", "surroundings", "figures"):
            changes: tuple[Change, ...] = getattr(self, title)
            if changes:
                lines += [title, *(f"  {change}" for change in changes)]
        if self.plans:
            lines += ["plans", *(f"  {line}" for line in str(self.plans).split("\n"))]
        return "\n".join(lines)


def plan_difference(
    first: PruningPlan, second: PruningPlan, names: tuple[str, str]
) -> PlanDifference:
    """Sets two plans side by side.

    Raises:
        PlanMismatch: they are about different sites or head counts.
    """
    a, b = first.mask, second.mask
    sizes = [{row.site: row.n_heads for row in mask.rows} for mask in (a, b)]
    if sizes[0] != sizes[1]:
        odd = sorted(set(sizes[0].items()) ^ set(sizes[1].items()))[0][0]
        raise PlanMismatch(
            "plans", "about the same sites with the same head counts", f"two that differ at {odd!r}"
        )
    whole = HeadMask.from_keep({}, sizes[0])
    return PlanDifference(
        names,
        (first.title, second.title),
        a.n_heads,
        (a & b).n_kept,
        (whole - (a | b)).n_kept,
        tuple(a - b),
        tuple(b - a),
    )


def record_difference(
    first: RunRecord, second: RunRecord, names: tuple[str, str]
) -> RecordDifference:
    """Sets two records side by side; plans for different sites are left out."""
    plans = None
    if first.plan is not None and second.plan is not None:
        with suppress(PlanMismatch):
            plans = plan_difference(first.plan, second.plan, names)
    return RecordDifference(
        names,
        _changes(_flat(first.recipe), _flat(second.recipe)),
        _changes(_surroundings(first), _surroundings(second)),
        _changes(_figures(first), _figures(second), every=True),
        plans,
    )


def _surroundings(record: RunRecord) -> dict[str, Scalar]:
    parts = {
        "versions": record.versions,
        "hardware": record.hardware,
        "git_commit": record.git_commit,
    }
    return _flat(parts)


def _figures(record: RunRecord) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {"status": record.status}
    found |= {
        f"{_role(record, row)}, {row.split} {row.metric}": row.value for row in record.quality
    }
    found |= {f"{row.name}, pruned": row.pruned for row in record.size}
    found |= {f"speed, batch {row.batch} x {row.length}": row.ratio for row in record.speed}
    found |= {f"seconds of {name}": seconds for name, seconds in _flat(record.timings).items()}
    return found


def _role(record: RunRecord, row: QualityRow) -> str:
    """The plan's own row is one line, whatever the scorer is called."""
    chosen = record.scores is not None and row.name == record.scores.scorer
    return "cut" if chosen else row.name


def _flat(data: Mapping[str, Any]) -> dict[str, Scalar]:
    """Every leaf by its dotted key; lists in words, empty sections left out."""
    found = ((key, value) for key, value in leaves(data) if not isinstance(value, Mapping))
    return {
        k: v if isinstance(v, (str, int, float, bool, type(None))) else str(v) for k, v in found
    }


def _changes(
    first: Mapping[str, Scalar], second: Mapping[str, Scalar], every: bool = False
) -> tuple[Change, ...]:
    keys = dict.fromkeys((*first, *second))
    found = (Change(key, first.get(key), second.get(key)) for key in keys)
    return tuple(change for change in found if every or change.first != change.second)


def _word(value: Scalar) -> str:
    if isinstance(value, float):
        whole = math.isfinite(value) and value == int(value) and abs(value) >= 10
        return f"{value:,.0f}" if whole else f"{value:.4g}"
    return "none" if value is None else str(value)


def _by_site(heads: tuple[HeadId, ...]) -> str:
    sites: dict[str, list[int]] = {}
    for head in heads:
        sites.setdefault(head.site, []).append(head.head)
    return ", ".join(f"{site}{numbers}" for site, numbers in sites.items())
