"""The grid of layers x heads: which cell is joined with which, how dark it is, and what it says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Literal

from headprune.core.heads import AttentionSite, HeadId
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores, ScoredUnit
from headprune.maps.pictures import AttentionPictures
from headprune.report.formats import fixed, power, significant

#: Steps of the colour ramp; `style.css.j2` has one class for each, for light and for dark.
N_STEPS = 9

State = Literal["kept", "removed", "gone"]
_KINDS = {"self": "Self-attention", "causal": "Causal self-attention", "cross": "Cross-attention"}
_TOWERS = {
    "self": "Encoder: self-attention",
    "causal": "Decoder: causal self-attention",
    "cross": "Cross-attention",
}
_WORD = {"kept": "kept", "removed": "removed", "gone": "removed before this run"}


@dataclass(frozen=True)
class HeatCell:
    """One prune unit: a head, or a joined KV group.

    Args:
        heads: Original indices.
        state: kept, removed, or gone before the run.
        step: Colour, 0 to 8; None without a score.
        bar: Length of the bar in percent, so that the grid reads without colour.
        value: The score, divided by the map's common power of ten.
        score: The score as it is, to sort by; None without one.
        title: Everything in words.
    """

    heads: tuple[int, ...]
    state: State
    step: int | None
    bar: float
    value: str
    score: float | None
    title: str


@dataclass(frozen=True)
class HeatRow:
    """One site; ``label`` is the part of its name that differs between the sites of its group."""

    site: str
    label: str
    cells: tuple[HeatCell, ...]
    n_heads: int
    n_kept: int
    n_present: int


@dataclass(frozen=True)
class HeatGroup:
    """The sites of one kind of attention; ``title`` is empty where the model has one kind alone,
    ``pattern`` is what the names of its sites share."""

    title: str
    pattern: str
    rows: tuple[HeatRow, ...]


@dataclass(frozen=True)
class HeatMap:
    """The whole grid with what its legend needs."""

    scorer: str
    groups: tuple[HeatGroup, ...]
    n_columns: int
    unit: str
    low: str
    high: str
    logarithmic: bool
    scored: bool
    planned: bool
    grouped: bool
    any_gone: bool

    @property
    def rows(self) -> tuple[HeatRow, ...]:
        """Every site, group by group."""
        return tuple(row for group in self.groups for row in group.rows)

    def label_width(self, most: float) -> float:
        """Width of the row labels in rem, ``most`` at most; longer labels are broken at their
        dots."""
        longest = max((len(row.label) for row in self.rows), default=0)
        return round(min(max(0.5 * longest + 0.8, 1.6), most), 2)


@dataclass(frozen=True)
class _Scale:
    """Maps scores to 0..1: linear, or logarithmic where a few heads would leave all others pale."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def fit(cls, values: Sequence[float]) -> _Scale:
        low, high = min(values, default=0.0), max(values, default=0.0)
        if low > 0 and high > 8 * median(values):
            return cls(max(low, high / 1000), high, True)
        return cls(low, high, False)

    def level(self, value: float) -> float:
        if not self.high > self.low:
            return 0.5
        if self.logarithmic:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def short_names(names: Sequence[str]) -> tuple[str, list[str]]:
    """What all names share, as a pattern, and what is left of each."""
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts), default=0)
    head = 0
    while len(parts) > 1 and head < shortest - 1 and len({p[head] for p in parts}) == 1:
        head += 1
    tail = 0
    while len(parts) > 1 and tail < shortest - 1 - head and len({p[-1 - tail] for p in parts}) == 1:
        tail += 1
    left = [".".join(p[head : len(p) - tail]) for p in parts]
    if not head and not tail:
        return "", left
    return ".".join([*parts[0][:head], "*", *parts[0][len(parts[0]) - tail :]]), left


def _blocks(
    site: AttentionSite | None, n_heads: int, kept: set[int] | None
) -> list[tuple[int, ...]]:
    """Which heads are drawn as one cell: neighbours that are one unit and have one fate, else
    single heads."""
    if site is None or site.policy != "group" or site.bundles is not None:
        return [(h,) for h in range(n_heads)]
    present = set(site.heads)
    blocks: list[tuple[int, ...]] = []
    for _, heads in groupby(range(n_heads), site.kv_head):
        group = tuple(heads)
        fates = {(h in present, kept is None or h in kept) for h in group}
        blocks += [group] if len(fates) == 1 else [(h,) for h in group]
    return blocks


def heat_map(
    record: RunRecord, scores: HeadScores | None = None, pictures: AttentionPictures | None = None
) -> HeatMap | None:
    """The grid of a record's scores and plan; None if it has neither.

    Args:
        record: The record.
        scores: Other scores of the same sites, in place of the record's own.
        pictures: Say what heads mostly attend to.
    """
    scores, plan = scores or record.scores, record.plan
    if scores is None and plan is None:
        return None
    sites: dict[str, AttentionSite | None] = {s.name: s for s in scores.sites} if scores else {}
    widths = {s.name: s.n_query_heads for s in scores.sites} if scores else {}
    for row in plan.mask.rows if plan else ():
        sites.setdefault(row.site, None)
        widths.setdefault(row.site, row.n_heads)
    planned = set(plan.mask.sites) if plan else set()
    units = {HeadId(u.name, h): u for u in scores.units() for h in u.heads} if scores else {}
    values = [u.value for u in scores.units()] if scores else []
    scale = _Scale.fit(values)
    exponent = _exponent(values)
    ranks = (
        {(u.site, u.unit): i + 1 for i, u in enumerate(reversed(scores.ranked()))} if scores else {}
    )

    def cell(name: str, block: tuple[int, ...], kept: set[int] | None) -> HeatCell:
        site, unit = sites[name], units.get(HeadId(name, block[0]))
        gone = site is not None and block[0] not in site.heads
        state: State = "gone" if gone else "kept" if kept is None or block[0] in kept else "removed"
        level = scale.level(unit.value) if unit else None
        words = [_heads_text(name, block), *_score_words(unit, ranks)]
        words += _habits(name, block, pictures)
        if plan is not None or gone:
            words.append(_WORD[state])
        return HeatCell(
            heads=block,
            state=state,
            step=None if level is None else min(int(level * N_STEPS), N_STEPS - 1),
            bar=0.0 if level is None else round(100 * level, 1),
            value=fixed(unit.value / 10.0**exponent, 2) if unit else "",
            score=unit.value if unit else None,
            title=", ".join(words),
        )

    def row_of(name: str, label: str) -> HeatRow:
        kept = set(plan.mask.kept(name)) if plan and name in planned else None
        cells = tuple(cell(name, block, kept) for block in _blocks(sites[name], widths[name], kept))
        stays = sum(len(c.heads) for c in cells if c.state == "kept")
        present = sum(len(c.heads) for c in cells if c.state != "gone")
        return HeatRow(name, label, cells, widths[name], stays, present)

    groups = []
    for title, names in by_kind({name: site.kind if site else "" for name, site in sites.items()}):
        pattern, labels = short_names(names)
        groups.append(HeatGroup(title, pattern, tuple(map(row_of, names, labels))))
    return HeatMap(
        scorer=scores.scorer if scores else "",
        groups=tuple(groups),
        n_columns=max(widths.values(), default=0),
        unit="" if exponent == 0 else f"× {power(exponent)}",
        low=("≤ " if scale.logarithmic and min(values) < scale.low else "")
        + significant(scale.low, 3),
        high=significant(scale.high, 3),
        logarithmic=scale.logarithmic,
        scored=bool(values),
        planned=plan is not None,
        grouped=any(s is not None and s.group_size > 1 for s in sites.values()),
        any_gone=any(
            c.state == "gone" for group in groups for row in group.rows for c in row.cells
        ),
    )


def by_kind(sites: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Names of sites by kind of attention, each kind with a title; one untitled group where there
    is one kind.

    Args:
        sites: The kind of every site, by its name; empty where it is not known.
    """
    kinds: dict[str, list[str]] = {}
    for name, kind in sites.items():
        kinds.setdefault(kind, []).append(name)
    if len(kinds) == 1:
        return [("", list(sites))]
    named = _TOWERS if "cross" in kinds else _KINDS
    return [(named.get(kind, "Other attention"), names) for kind, names in kinds.items()]


def _exponent(values: Sequence[float]) -> int:
    """The power of ten that brings the largest score to 1..999, a multiple of three; 0 where none
    is needed."""
    largest = max((abs(v) for v in values), default=0.0)
    if largest == 0 or 0.1 <= largest < 1000:
        return 0
    return 3 * math.floor(math.log10(largest) / 3)


def _heads_text(site: str, block: tuple[int, ...]) -> str:
    if len(block) == 1:
        return f"{site}, head {block[0]}"
    return f"{site}, heads {block[0]}–{block[-1]} (one key/value group)"


def _habits(site: str, block: tuple[int, ...], pictures: AttentionPictures | None) -> list[str]:
    """What the heads of a cell mostly attend to; of several it is said whose habit it is."""
    found = {h: pictures.pattern(HeadId(site, h)) for h in block} if pictures else {}
    return [
        f"{f'head {h} ' if len(block) > 1 else ''}mostly {pattern}"
        for h, pattern in found.items()
        if pattern
    ]


def _score_words(unit: ScoredUnit | None, ranks: dict[tuple[int, int], int]) -> list[str]:
    if unit is None:
        return []
    error = (
        ""
        if unit.standard_error is None
        else f" ± {significant(unit.standard_error, 2)} (standard error)"
    )
    return [
        f"score {significant(unit.value)}{error}",
        f"rank {ranks[unit.site, unit.unit]} of {len(ranks)}",
    ]
