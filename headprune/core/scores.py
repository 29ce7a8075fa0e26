"""HeadScores: how important each head is, how sure we are, where the numbers come from, and what each unit costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass

from headprune.core.codec import FrozenDict, Value
from headprune.core.display import Cell, Row, html_grid, levels, rich_grid, text_grid
from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.heads import AttentionSite, HeadId


@dataclass(frozen=True)
class Cost:
    """What a part of a model costs, for any sequence length.

    Args:
        params: Parameters.
        macs_fixed: Multiply-adds an example, whatever its length.
        macs_per_token: Multiply-adds a token.
        macs_per_pair: Multiply-adds a pair of a query token and a key token.
        kv_bytes: Bytes of KV cache a token.
    """

    params: int
    macs_fixed: int
    macs_per_token: int
    macs_per_pair: int
    kv_bytes: int

    def macs(self, length: int) -> int:
        """Multiply-adds of one example of ``length`` tokens."""
        return self.macs_fixed + self.macs_per_token * length + self.macs_per_pair * length**2

    @classmethod
    def sum(cls, costs: Iterable[Cost]) -> Cost:
        """What several parts cost together."""
        return cls(*map(sum, zip((0, 0, 0, 0, 0), *map(astuple, costs), strict=True)))


@dataclass(frozen=True)
class CostTable:
    """The whole model's cost and that of every unit, unit by unit in the order of ``AttentionSite.units``.

    Args:
        total: The whole model.
        units: For every site, what each of its units costs.
        length: Tokens an example had where the total was measured.
    """

    total: Cost
    units: tuple[tuple[Cost, ...], ...]
    length: int


@dataclass(frozen=True)
class ModelFingerprint:
    """Tells models apart: ``structure`` (class, sites, head counts; a cut leaves it) and ``weights``."""

    structure: str
    weights: str


@dataclass(frozen=True)
class ScoredUnit:
    """A prune unit with its score; ``site`` and ``unit`` are positions in HeadScores.sites and AttentionSite.units."""

    site: int
    unit: int
    name: str
    heads: tuple[int, ...]
    value: float
    standard_error: float | None
    cost: Cost | None


@dataclass(frozen=True)
class HeadScores(Value):
    """Importance of every prune unit; higher is more important.

    ``scores[HeadId(site, head)]`` is the score of the unit that the head belongs to.

    Args:
        sites: The scored sites.
        values: For every site, one value a unit.
        standard_errors: The same shape, or None where the scorer has none.
        scorer: Registered name of the scorer.
        settings: The scorer's settings.
        n_examples: Examples that the scores rest on.
        model: Fingerprint of the scored model.
        data: Digest of the examples, None where none were used.
        seed: Seed of the scorer, None where it draws nothing.
        costs: What each unit costs; None where no batch was given to measure the model on.
    """

    sites: tuple[AttentionSite, ...]
    values: tuple[tuple[float, ...], ...]
    standard_errors: tuple[tuple[float, ...], ...] | None
    scorer: str
    settings: FrozenDict
    n_examples: int
    model: ModelFingerprint
    data: str | None = None
    seed: int | None = None
    costs: CostTable | None = None

    def __post_init__(self) -> None:
        shape = [len(s.units) for s in self.sites]
        costs = None if self.costs is None else self.costs.units
        for name, rows in (("values", self.values), ("standard_errors", self.standard_errors), ("costs.units", costs)):
            if rows is not None and [len(r) for r in rows] != shape:
                raise InvalidValue(f"HeadScores.{name}", f"one entry a unit, {shape}", [len(r) for r in rows])
        for site, row in zip(self.sites, self.values, strict=True):
            for unit, value in zip(site.units, row, strict=True):
                if not math.isfinite(value):
                    where = f"score of {site.name}{list(unit)}"
                    raise InvalidValue(where, "finite", value, "Look at the scorer's input for NaN or infinite values.")

    def units(self) -> Iterator[ScoredUnit]:
        """Every prune unit in model order."""
        for s, site in enumerate(self.sites):
            for u, heads in enumerate(site.units):
                error = None if self.standard_errors is None else self.standard_errors[s][u]
                cost = None if self.costs is None else self.costs.units[s][u]
                yield ScoredUnit(s, u, site.name, heads, self.values[s][u], error, cost)

    def ranked(self) -> list[ScoredUnit]:
        """Units from least to most important; ties go to the later site and the later head first."""
        return sorted(self.units(), key=lambda u: (u.value, -u.site, -u.unit))

    def __getitem__(self, head: HeadId) -> float:
        return self._find(head).value

    def standard_error(self, head: HeadId) -> float | None:
        """Standard error of a head's score, None where the scorer has none."""
        return self._find(head).standard_error

    def _find(self, head: HeadId) -> ScoredUnit:
        for unit in self.units():
            if unit.name == head.site and head.head in unit.heads:
                return unit
        hint = did_you_mean(head.site, [s.name for s in self.sites])
        raise UnknownName("head", "one of the scored heads", str(head), hint)

    @property
    def n_heads(self) -> int:
        """Heads that are present and scored."""
        return sum(len(s.heads) for s in self.sites)

    def rows(self, kept: frozenset[HeadId] | None = None) -> list[Row]:
        """The grid of cells that shows the scores, and what stays of ``kept``."""
        flat = iter(levels([v for row in self.values for v in row]))
        several = len({site.kind for site in self.sites}) > 1
        rows = []
        for site, values in zip(self.sites, self.values, strict=True):
            level = {h: (lv, v) for unit, lv, v in zip(site.units, flat, values, strict=False) for h in unit}
            cells = []
            for head in range(site.n_query_heads):
                lv, value = level.get(head, (None, None))
                stays = head in site.heads and (kept is None or HeadId(site.name, head) in kept)
                word = "already removed" if value is None else f"{value:.4g}"
                cells.append(Cell(head, lv, stays, f"{site.name}[{head}]: {word}"))
            rows.append(Row(site.name, tuple(cells), site.kind if several else ""))
        return rows

    @property
    def title(self) -> str:
        groups = sum(len(s.units) for s in self.sites)
        of = f"{self.n_heads} heads" + (f" in {groups} groups" if groups != self.n_heads else "")
        return f"{self.scorer} over {self.n_examples} examples: {of}, darker or taller is more important"

    def __str__(self) -> str:
        return text_grid(f"HeadScores: {self.title}", self.rows())

    def __rich__(self) -> str:
        return rich_grid(f"HeadScores: {self.title}", self.rows())

    def _repr_html_(self) -> str:
        return html_grid(self.title, self.rows())
