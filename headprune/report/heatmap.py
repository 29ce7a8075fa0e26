"""The grid of layers by heads: which heads share a cell, its colour and its text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from statistics import median
from typing import Literal

from headprune.core.heads import AttentionSite, HeadId
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores, ScoredUnit
from headprune.maps.pictures import AttentionPictures
from headprune.report.formats import fixed, power, significant

#: Steps of the colour ramp; `style.css.j2` has one class for each, for light and for dark.
N_STEPS = 9

State = Literal["kept", "removed", "absent"]
_STATE_TEXT = {"kept": "kept", "removed": "removed", "absent": "removed before this run"}
_KINDS = {"self": "Self-attention", "causal": "Causal self-attention", "cross": "Cross-attention"}
#: Titles in a model with cross-attention, whose kinds tell encoder and decoder apart.
_TOWERS = {
    "self": "Encoder: self-attention",
    "causal": "Decoder: causal self-attention",
    "cross": "Cross-attention",
}


@dataclass(frozen=True)
class HeatCell:
    """One prune unit: a head, or a key/value group whose heads are removed together.

    Args:
        heads: Original indices.
        state: ``kept``, ``removed``, or ``absent`` where it was removed before the run.
        step: Step of the colour ramp, 0 to 8; None without a score.
        bar: Length of the bar in percent, so that the grid reads without colour.
        value: The score divided by the map's common power of ten, formatted.
        score: The score itself, to sort by; None without one.
        title: Site, heads, score, rank and state as one text.
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

    site: str  # name of the attention module
    label: str
    cells: tuple[HeatCell, ...]
    n_heads: int  # query heads, absent ones included
    n_kept: int  # heads in state `kept`
    n_present: int  # heads that are not absent


@dataclass(frozen=True)
class HeatGroup:
    """The sites of one kind of attention.

    Args:
        title: The kind; empty where the model has only one.
        pattern: The parts of their names that the sites share.
        rows: One per site.
    """

    title: str
    pattern: str
    rows: tuple[HeatRow, ...]


@dataclass(frozen=True)
class HeatMap:
    """The whole grid, and the values of its legend."""

    scorer: str  # empty without scores
    groups: tuple[HeatGroup, ...]
    n_columns: int  # heads of the widest site
    unit: str  # such as `× 10⁻³`; empty for plain scores
    low: str  # label of the palest colour
    high: str  # label of the darkest colour
    logarithmic: bool  # scale of the colours
    scored: bool  # whether scores are shown
    planned: bool  # whether a plan is shown
    grouped: bool  # whether some heads share a key/value head

    @property
    def rows(self) -> tuple[HeatRow, ...]:
        """Every site, group by group."""
        return tuple(chain.from_iterable(group.rows for group in self.groups))

    @property
    def any_absent(self) -> bool:
        """Whether a head was removed before the run."""
        return any(row.n_present < row.n_heads for row in self.rows)

    def label_width(self, most: float) -> float:
        """Width of the row labels in rem, ``most`` at most; longer labels break at their dots."""
        longest = max((len(row.label) for row in self.rows), default=0)
        return round(min(max(0.5 * longest + 0.8, 1.6), most), 2)


@dataclass(frozen=True)
class _ColourScale:
    """Map scores to 0..1, on a logarithmic scale where a few heads would make all others pale.

    ``clipped``: scores below ``low`` exist, and have its colour.
    """

    low: float
    high: float
    logarithmic: bool = False
    clipped: bool = False

    @classmethod
    def fit(cls, values: Sequence[float]) -> _ColourScale:
        low, high = min(values, default=0.0), max(values, default=0.0)
        if low > 0 and high > 8 * median(values):
            # Three decades at most: below that no difference could be seen.
            floor = high / 1000
            return cls(max(low, floor), high, logarithmic=True, clipped=low < floor)
        return cls(low, high)

    def level(self, value: float) -> float:
        if not self.high > self.low:
            return 0.5
        if self.logarithmic:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class _MapSource:
    """The values that the cells of one map are made from.

    Args:
        plan: The record's plan.
        pictures: What heads attend to.
        sites: Sites by name; None where only the plan knows the site.
        widths: Heads per site, absent ones included.
        units: The scored unit of every present head.
        ranks: Rank per unit, 1 for the most important; keys are (site index, unit index).
        scale: Score to colour.
        exponent: Scores are shown in units of ten to this power.
    """

    plan: PruningPlan | None
    pictures: AttentionPictures | None
    sites: dict[str, AttentionSite | None]
    widths: dict[str, int]
    units: dict[HeadId, ScoredUnit]
    ranks: dict[tuple[int, int], int]
    scale: _ColourScale
    exponent: int

    def kept(self, site: str) -> set[int] | None:
        """Heads that the plan keeps; None where no plan covers the site."""
        if self.plan is None or site not in self.plan.mask.sites:
            return None
        return set(self.plan.mask.kept(site))


def heat_map(
    record: RunRecord, scores: HeadScores | None = None, pictures: AttentionPictures | None = None
) -> HeatMap | None:
    """Lay out a record's scores and plan as a grid; None if it has neither.

    Args:
        record: The record.
        scores: Other scores of the same sites, in place of the record's own.
        pictures: Add to each cell what its heads mostly attend to.
    """
    if scores is None:
        scores = record.scores
    if scores is None and record.plan is None:
        return None
    if scores is not None:
        scores = scores.without_neurons()  # see `headprune.report.neurons`
    source = _map_source(scores, record.plan, pictures)
    scale = source.scale
    below = "≤ " if scale.clipped else ""
    return HeatMap(
        scorer="" if scores is None else scores.scorer,
        groups=_groups(source),
        n_columns=max(source.widths.values(), default=0),
        unit="" if source.exponent == 0 else f"× {power(source.exponent)}",
        low=below + significant(scale.low, 3),
        high=significant(scale.high, 3),
        logarithmic=scale.logarithmic,
        scored=bool(source.units),
        planned=source.plan is not None,
        grouped=any(site is not None and site.group_size > 1 for site in source.sites.values()),
    )


def _map_source(
    scores: HeadScores | None, plan: PruningPlan | None, pictures: AttentionPictures | None
) -> _MapSource:
    """Index scores and plan by site and head."""
    sites: dict[str, AttentionSite | None] = {}
    widths: dict[str, int] = {}
    units: dict[HeadId, ScoredUnit] = {}
    ranks: dict[tuple[int, int], int] = {}
    values: list[float] = []
    if scores is not None:
        for site in scores.sites:
            sites[site.name] = site
            widths[site.name] = site.n_query_heads
        for unit in scores.units():
            values.append(unit.value)
            for head in unit.heads:
                units[HeadId(unit.name, head)] = unit
        # `ranked` begins with the least important unit.
        for rank, unit in enumerate(reversed(scores.ranked()), start=1):
            ranks[unit.site, unit.unit] = rank
    if plan is not None:
        for row in plan.mask.rows:
            if not row.neurons:
                sites.setdefault(row.site, None)
                widths.setdefault(row.site, row.n_heads)
    scale = _ColourScale.fit(values)
    return _MapSource(plan, pictures, sites, widths, units, ranks, scale, _exponent(values))


def _groups(source: _MapSource) -> tuple[HeatGroup, ...]:
    """Rows of every site, by kind of attention."""
    kinds = {}
    for name, site in source.sites.items():
        kinds[name] = "" if site is None else site.kind
    groups = []
    for title, names in by_kind(kinds):
        pattern, labels = short_names(names)
        rows = []
        for name, label in zip(names, labels, strict=True):
            rows.append(_heat_row(source, name, label))
        groups.append(HeatGroup(title, pattern, tuple(rows)))
    return tuple(groups)


def _heat_row(source: _MapSource, name: str, label: str) -> HeatRow:
    kept = source.kept(name)
    cells = []
    # Heads per state.
    numbers = {"kept": 0, "removed": 0, "absent": 0}
    for heads in _cell_heads(source.sites[name], source.widths[name], kept):
        cell = _heat_cell(source, name, heads, kept)
        cells.append(cell)
        numbers[cell.state] += len(heads)
    present = numbers["kept"] + numbers["removed"]
    return HeatRow(name, label, tuple(cells), source.widths[name], numbers["kept"], present)


def _cell_heads(
    site: AttentionSite | None, n_heads: int, kept: set[int] | None
) -> list[tuple[int, ...]]:
    """List the heads of each cell: a key/value group that shares one state, else one head."""
    if site is None or site.policy != "group" or site.bundles is not None:
        return [(head,) for head in range(n_heads)]
    present = set(site.heads)
    blocks: list[tuple[int, ...]] = []
    # `groupby` joins neighbours only: interleaved groups come out as single heads.
    for _, members in groupby(range(n_heads), site.kv_head):
        group = tuple(members)
        fates = {(head in present, kept is None or head in kept) for head in group}
        if len(fates) == 1:
            blocks.append(group)
        else:
            blocks += zip(group, strict=True)
    return blocks


def _heat_cell(
    source: _MapSource, name: str, heads: tuple[int, ...], kept: set[int] | None
) -> HeatCell:
    site = source.sites[name]
    # All heads of a cell share one state.
    state: State = "kept"
    if site is not None and heads[0] not in site.heads:
        state = "absent"
    elif kept is not None and heads[0] not in kept:
        state = "removed"
    unit = source.units.get(HeadId(name, heads[0]))
    # Everything about the cell as one text: it is the tooltip, and what screen readers read.
    words = [_heads_text(name, heads)]
    if unit is not None:
        words += _score_words(unit, source.ranks)
    words += _pattern_words(name, heads, source.pictures)
    if source.plan is not None or state == "absent":
        words.append(_STATE_TEXT[state])
    title = ", ".join(words)
    if unit is None:
        return HeatCell(heads, state, None, 0.0, "", None, title)
    level = source.scale.level(unit.value)  # 0 to 1
    return HeatCell(
        heads=heads,
        state=state,
        # The highest score would begin a step of its own.
        step=min(int(level * N_STEPS), N_STEPS - 1),
        bar=round(100 * level, 1),
        value=_cell_value(unit.value / 10.0**source.exponent),
        score=unit.value,
        title=title,
    )


def _cell_value(value: float) -> str:
    """A score in a few characters; one that two decimals show as 0 gets its power of ten.

    >>> _cell_value(12.345), _cell_value(0.0000514), _cell_value(0.0)
    ('12.35', '5e−5', '0.00')
    """
    if not 0 < abs(value) < 0.005:
        return fixed(value, 2)
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


def short_names(names: Sequence[str]) -> tuple[str, list[str]]:
    """Split dotted names into the parts that all share and the parts that differ.

    Returns:
        The shared parts with ``*`` for the others, empty where none are shared; and every name
        without them.

    >>> short_names(["layer.0.self", "layer.1.self"])
    ('layer.*.self', ['0', '1'])
    """
    if len(names) < 2:
        return "", list(names)
    parts = [name.split(".") for name in names]
    # One part of every name remains, so that no label is empty.
    most = min(map(len, parts)) - 1
    head = _n_shared(parts, most)
    # Parts from the end, of those that remain.
    tail = _n_shared([name[::-1] for name in parts], most - head)
    labels = [".".join(name[head : len(name) - tail]) for name in parts]
    if not head and not tail:
        return "", labels
    first = parts[0]
    return ".".join([*first[:head], "*", *first[len(first) - tail :]]), labels


def _n_shared(names: Sequence[Sequence[str]], most: int) -> int:
    """Count the parts with which all names begin, ``most`` at most."""
    shared = 0
    while shared < most and len({name[shared] for name in names}) == 1:
        shared += 1
    return shared


def by_kind(sites: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Group names of sites by kind of attention.

    Args:
        sites: The kind of every site, by its name; empty where it is not known.

    Returns:
        A title and the names of its sites per kind; the title is empty where there is one kind.
    """
    kinds: dict[str, list[str]] = {}
    for name, kind in sites.items():
        kinds.setdefault(kind, []).append(name)
    if len(kinds) == 1:
        return [("", list(sites))]
    titles = _TOWERS if "cross" in kinds else _KINDS
    return [(titles.get(kind, "Other attention"), names) for kind, names in kinds.items()]


def _exponent(values: Sequence[float]) -> int:
    """Choose the power of ten, a multiple of three, that brings the largest score to 1..999."""
    largest = max(map(abs, values), default=0.0)
    if largest == 0 or 0.1 <= largest < 1000:
        return 0
    return 3 * math.floor(math.log10(largest) / 3)


def _heads_text(site: str, heads: tuple[int, ...]) -> str:
    if len(heads) == 1:
        return f"{site}, head {heads[0]}"
    return f"{site}, heads {heads[0]}–{heads[-1]} (one key/value group)"


def _pattern_words(
    site: str, heads: tuple[int, ...], pictures: AttentionPictures | None
) -> list[str]:
    """Say what the heads of a cell mostly attend to; with several heads, which head does."""
    words: list[str] = []
    if pictures is None:
        return words
    for head in heads:
        pattern = pictures.pattern(HeadId(site, head))
        if pattern and len(heads) > 1:
            words.append(f"head {head} mostly {pattern}")
        elif pattern:
            words.append(f"mostly {pattern}")
    return words


def _score_words(unit: ScoredUnit, ranks: dict[tuple[int, int], int]) -> list[str]:
    score = f"score {significant(unit.value)}"
    if unit.standard_error is not None:
        score += f" ± {significant(unit.standard_error, 2)} (standard error)"
    return [score, f"rank {ranks[unit.site, unit.unit]} of {len(ranks)}"]
