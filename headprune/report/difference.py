"""Differences of two plans, or of two records of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from headprune.core.codec import LATER, Value, leaves
from headprune.core.errors import PlanMismatch
from headprune.core.heads import HeadId, HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.record import QualityRow, RunRecord

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class PlanDifference(Value):
    """Two plans head by head.

    Args:
        names: Names of the plans, as the caller calls them.
        titles: Their titles.
        n_heads: Heads that both cover.
        both_keep, both_remove: Heads on which they agree.
        only_first, only_second: Heads that one keeps and the other removes.
        neurons: Of every feed-forward, what each plan keeps, as text.
    """

    names: tuple[str, str]
    titles: tuple[str, str]
    n_heads: int
    both_keep: int
    both_remove: int
    only_first: tuple[HeadId, ...]
    only_second: tuple[HeadId, ...]
    neurons: tuple[str, ...] = field(default=(), metadata=LATER)

    @property
    def agreement(self) -> float:
        """Jaccard index: heads that both remove over heads that either removes; 1 for none."""
        either = self.both_remove + len(self.only_first) + len(self.only_second)
        return self.both_remove / either if either else 1.0

    def __str__(self) -> str:
        lines = [f"{name}: {title}" for name, title in zip(self.names, self.titles, strict=True)]
        if self.n_heads:  # else both are of neurons alone
            lines.append(
                f"of {self.n_heads} heads both keep {self.both_keep} and both remove"
                f" {self.both_remove}; of those that either removes, {100 * self.agreement:.0f} %"
                " are removed by both"
            )
        for name, heads in zip(self.names, (self.only_first, self.only_second), strict=True):
            if heads:
                lines += [f"kept by {name} alone, {len(heads)} heads:", *_by_site(heads)]
        return "\n".join([*lines, *self.neurons])


@dataclass(frozen=True)
class RecordChange:
    """One figure or setting of two records; None where a record lacks it."""

    what: str
    first: Scalar
    second: Scalar

    def __str__(self) -> str:
        first, second = self.first, self.second
        text = f"{self.what}: {_text(first)} -> {_text(second)}"
        if not isinstance(first, (int, float)) or not isinstance(second, (int, float)):
            return text
        # Both are numbers: their difference follows.
        if first != second:
            text += f" ({second - first:+.4g})"
        return text


@dataclass(frozen=True)
class RecordDifference(Value):
    """Two records of runs.

    Args:
        names: Names of the records, as the caller calls them.
        recipe: Settings that differ, by dotted key.
        surroundings: Versions, hardware and commit that differ.
        figures: Quality, sizes, speed and times of both, equal ones included.
        plans: Their plans; None unless both have one for the same sites.
    """

    names: tuple[str, str]
    recipe: tuple[RecordChange, ...]
    surroundings: tuple[RecordChange, ...]
    figures: tuple[RecordChange, ...]
    plans: PlanDifference | None = None

    def __str__(self) -> str:
        first, second = self.names
        lines = [f"{first} -> {second}"]
        sections = {
            "recipe": self.recipe,
            "surroundings": self.surroundings,
            "figures": self.figures,
        }
        for title, changes in sections.items():
            if changes:
                lines += [title, *(f"  {change}" for change in changes)]
        if self.plans is not None:
            lines += ["plans", *(f"  {line}" for line in str(self.plans).split("\n"))]
        return "\n".join(lines)


def plan_difference(
    first: PruningPlan, second: PruningPlan, names: tuple[str, str]
) -> PlanDifference:
    """Compare two plans head by head.

    A plan of heads alone keeps all neurons.

    Raises:
        PlanMismatch: they cover different attention or head counts.
    """
    a, b = first.mask, second.mask
    a, b = _with_neurons_of(b, a), _with_neurons_of(a, b)
    widths, others = _widths(a), _widths(b)
    if widths != others:
        # The first site in which they differ, by name.
        odd, _ = min(widths.items() ^ others.items())
        raise PlanMismatch(
            "plans", "about the same sites with the same head counts", f"two that differ at {odd!r}"
        )
    neurons = frozenset(row.site for row in (*a.rows, *b.rows) if row.neurons)
    lines = _neuron_lines(a, b, names, neurons)
    # From here on heads alone.
    a, b = _without(a, neurons), _without(b, neurons)
    return PlanDifference(
        names=names,
        titles=(first.title, second.title),
        n_heads=a.n_heads,
        both_keep=(a & b).n_kept,
        both_remove=a.n_heads - (a | b).n_kept,
        only_first=tuple(a - b),
        only_second=tuple(b - a),
        neurons=lines,
    )


def _with_neurons_of(other: HeadMask, mask: HeadMask) -> HeadMask:
    """A mask that also keeps all of each feed-forward that only the other one names."""
    lacking = (row for row in other.rows if row.neurons and row.site not in mask.sites)
    whole = (replace(row, kept=tuple(range(row.n_heads))) for row in lacking)
    return HeadMask((*mask.rows, *whole))


def _without(mask: HeadMask, sites: frozenset[str]) -> HeadMask:
    """A mask of the other sites."""
    return HeadMask(tuple(row for row in mask.rows if row.site not in sites))


def _neuron_lines(
    a: HeadMask, b: HeadMask, names: tuple[str, str], sites: frozenset[str]
) -> tuple[str, ...]:
    """What both masks keep of each feed-forward; single neurons would fill pages."""
    lines = []
    for row in a.rows:
        if row.site in sites:
            theirs = b.kept(row.site)
            both = len(frozenset(row.kept).intersection(theirs))
            lines.append(
                f"{row.site}: {names[0]} keeps {len(row.kept):,} and {names[1]} {len(theirs):,} of"
                f" {row.n_heads:,} neurons, both of them {both:,}"
            )
    return tuple(lines)


def _widths(mask: HeadMask) -> dict[str, int]:
    """Heads per site, removed ones included."""
    return {row.site: row.n_heads for row in mask.rows}


def record_difference(
    first: RunRecord, second: RunRecord, names: tuple[str, str]
) -> RecordDifference:
    """Compare two records; plans for different sites are left out."""
    # Runs of other models, or runs that stopped early, still have comparable settings.
    plans = None
    if first.plan is not None and second.plan is not None:
        with suppress(PlanMismatch):
            plans = plan_difference(first.plan, second.plan, names)
    return RecordDifference(
        names=names,
        recipe=_changes(_flat(first.recipe), _flat(second.recipe)),
        surroundings=_changes(_surroundings(first), _surroundings(second)),
        figures=_changes(_figures(first), _figures(second), every=True),
        plans=plans,
    )


def _surroundings(record: RunRecord) -> dict[str, Scalar]:
    parts = {
        "versions": record.versions,
        "hardware": record.hardware,
        "git_commit": record.git_commit,
    }
    return _flat(parts)


def _figures(record: RunRecord) -> dict[str, Scalar]:
    """List everything that a run measured, by the label of its line."""
    figures: dict[str, Scalar] = {"status": record.status}
    for quality in record.quality:
        figures[f"{_role(record, quality)}, {quality.split} {quality.metric}"] = quality.value
    for size in record.size:
        figures[f"{size.name}, pruned"] = size.pruned
    for speed in record.speed:
        figures[f"speed, batch {speed.batch} x {speed.length}"] = speed.ratio
    for name, seconds in _flat(record.timings).items():
        figures[f"seconds of {name}"] = seconds
    return figures


def _role(record: RunRecord, row: QualityRow) -> str:
    """Name a row; the plan's own row has the same name whatever its scorer."""
    chosen = record.scores is not None and row.name == record.scores.scorer
    return "cut" if chosen else row.name


def _flat(data: Mapping[str, Any]) -> dict[str, Scalar]:
    """List every leaf by its dotted key; lists become text, empty sections are left out."""
    flat: dict[str, Scalar] = {}
    for key, value in leaves(data):
        if value is None or isinstance(value, (str, int, float, bool)):
            flat[key] = value
        elif not isinstance(value, Mapping):
            flat[key] = str(value)
    return flat


def _changes(
    first: Mapping[str, Scalar], second: Mapping[str, Scalar], every: bool = False
) -> tuple[RecordChange, ...]:
    """Pair the values of two records; equal ones only if ``every``."""
    changes = []
    for key in dict.fromkeys((*first, *second)):
        change = RecordChange(key, first.get(key), second.get(key))
        if every or change.first != change.second:
            changes.append(change)
    return tuple(changes)


def _text(value: Scalar) -> str:
    if value is None:
        return "none"
    if not isinstance(value, float):
        return str(value)
    # Large whole numbers, such as parameters, are shown in full.
    if math.isfinite(value) and value == int(value) and abs(value) >= 10:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _by_site(heads: tuple[HeadId, ...]) -> list[str]:
    """A line per site, its heads below those of other sites."""
    sites: dict[str, list[int]] = {}
    for head in heads:
        sites.setdefault(head.site, []).append(head.head)
    width = max(map(len, sites))
    return [f"  {site:<{width}}  {', '.join(map(str, n))}" for site, n in sites.items()]
