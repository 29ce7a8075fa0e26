"""HeadScores: how important each head is, how sure we are, where the numbers come from, and what
each unit costs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headprune.core.choice import Choice
from headprune.core.codec import LATER, FrozenDict, Value
from headprune.core.display import (
    Cell,
    Row,
    clean,
    html_grid,
    html_text,
    levels,
    rich_grid,
    text_grid,
)
from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.files import atomic_paths
from headprune.core.heads import AttentionSite, HeadId, places
from headprune.core.samples import Curvature, Samples, if_there
from headprune.core.uncertainty import Stability, half_width, lowest_shares, rank_bounds, stability

if TYPE_CHECKING:
    from pandas import DataFrame
    from typing_extensions import Self

_T = TypeVar("_T")


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
    """The whole model's cost and that of every unit, unit by unit in the order of
    ``AttentionSite.units``.

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
    """Tells models apart: ``structure`` (class, sites, head counts; a cut leaves it) and
    ``weights``."""

    structure: str
    weights: str


@dataclass(frozen=True)
class ScoredUnit:
    """A prune unit with its score; ``site`` and ``unit`` are positions in HeadScores.sites and
    AttentionSite.units."""

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
        samples: The numbers of single examples, for ranks and their intervals; None where nothing
            was sampled.
        notes: What the user should know.
        curvature: How the loss bends when several units go together (``fisher``, ``ggn``), for the
            selector ``quadratic``; None where the scorer has none.
        choice: How ``auto`` chose this scorer; None where it was asked for by name.
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
    samples: Samples | None = None
    notes: tuple[str, ...] = ()
    curvature: Curvature | None = None
    choice: Choice | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        shape = [len(s.units) for s in self.sites]
        costs = None if self.costs is None else self.costs.units
        for name, rows in (
            ("values", self.values),
            ("standard_errors", self.standard_errors),
            ("costs.units", costs),
        ):
            if rows is not None and [len(r) for r in rows] != shape:
                raise InvalidValue(
                    f"HeadScores.{name}", f"one entry a unit, {shape}", [len(r) for r in rows]
                )
        for site, row in zip(self.sites, self.values, strict=True):
            for unit, value in zip(site.units, row, strict=True):
                if not math.isfinite(value):
                    where = f"score of {site.name}{list(unit)}"
                    raise InvalidValue(
                        where,
                        "finite",
                        value,
                        "Look at the scorer's input for NaN or infinite values.",
                    )
        if self.samples is not None and self.samples.units != sum(shape):
            raise InvalidValue(
                "HeadScores.samples", f"one column a unit, {sum(shape)}", self.samples.units
            )
        if self.curvature is not None and self.curvature.units != sum(shape):
            raise InvalidValue(
                "HeadScores.curvature",
                f"one row and column a unit, {sum(shape)}",
                self.curvature.units,
            )

    def save(self, path: str | Path) -> Path:
        """Writes the JSON form, and beside it what there is of samples and curvature; returns the
        path.

        They become ``<name>.samples.safetensors`` and ``<name>.curvature.safetensors``; what cannot
        be read is left out with a warning.
        """
        with atomic_paths() as beside:
            place = beside(
                path
            )  # it takes its place first: what a kill leaves of the others is found by its hash
            for stored, what in (
                (self.samples, "per-example numbers"),
                (self.curvature, "curvature"),
            ):
                if stored is not None:
                    try:
                        stored.write(path, beside)
                    except InvalidValue as error:
                        warnings.warn(f"{path} is written without {what}: {error}", stacklevel=2)
            place.write_bytes(self.to_json().encode())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what ``save`` wrote; samples and curvature are looked for when they are first
        needed.

        Raises:
            InvalidValue: the file cannot be read or holds no HeadScores.
        """
        return super().load(path).beside(path)

    def beside(self, path: str | Path) -> Self:
        """These scores, with samples and a curvature that are looked for beside a file."""
        samples = None if self.samples is None else self.samples.beside(path)
        curvature = None if self.curvature is None else self.curvature.beside(path)
        return replace(self, samples=samples, curvature=curvature)

    def of(self, sites: str) -> HeadScores:
        """The scores of some sites alone; the costs are still beside those of the whole model.

        Args:
            sites: A kind of attention (``self``, ``causal``, ``cross``: an encoder-decoder's
                encoder, decoder and cross attention), a site's name, or a pattern over names.

        Raises:
            UnknownName: no such site.
        """
        those = places(self.sites, sites)
        if not those:
            kinds = dict.fromkeys(site.kind for site in self.sites)
            hint = did_you_mean(sites, [*kinds, *(s.name for s in self.sites)])
            hint = (
                hint
                if hint.startswith("Did")
                else f"The scored sites are of kind {' and '.join(kinds)}."
            )
            raise UnknownName(
                "HeadScores.of", "a kind or a pattern of the scored sites", repr(sites), hint
            )
        costs = (
            None
            if self.costs is None
            else replace(self.costs, units=_chosen(self.costs.units, those))
        )
        units = [i for i, unit in enumerate(self.units()) if unit.site in those]
        samples, lost = (
            (None, ()) if self.samples is None else if_there(partial(self.samples.columns, units))
        )
        curvature, gone = (
            (None, ()) if self.curvature is None else if_there(partial(self.curvature.part, units))
        )
        return replace(
            self,
            sites=_chosen(self.sites, those),
            values=_chosen(self.values, those),
            standard_errors=(
                None if self.standard_errors is None else _chosen(self.standard_errors, those)
            ),
            costs=costs,
            samples=samples,
            notes=(*self.notes, *lost, *gone),
            curvature=curvature,
        )

    def units(self) -> Iterator[ScoredUnit]:
        """Every prune unit in model order."""
        for s, site in enumerate(self.sites):
            for u, heads in enumerate(site.units):
                error = None if self.standard_errors is None else self.standard_errors[s][u]
                cost = None if self.costs is None else self.costs.units[s][u]
                yield ScoredUnit(s, u, site.name, heads, self.values[s][u], error, cost)

    def ranked(self) -> list[ScoredUnit]:
        """Units from least to most important; ties go to the later site and the later head
        first."""
        return sorted(self.units(), key=lambda u: (u.value, -u.site, -u.unit))

    def to_frame(self) -> DataFrame:
        """The scores as a pandas DataFrame, one row a head that is present, in model order.

        Columns: ``site``, ``kind``, ``head`` (original index), ``kv_head``, ``unit`` (heads of a
        site with one number go together), ``score``, ``standard_error`` and ``rank`` (1 is the most
        important) of the unit, and what the unit costs: ``params``, ``macs`` (of an example as long
        as the scored ones), ``kv_bytes`` (a token); NaN where a scorer has none.
        """
        from headprune.core.frames import scores_frame

        return scores_frame(self)

    def __getitem__(self, head: HeadId) -> float:
        return self._find(head).value

    def standard_error(self, head: HeadId) -> float | None:
        """Standard error of a head's score, None where the scorer has none."""
        return self._find(head).standard_error

    def interval(self, head: HeadId, confidence: float = 0.95) -> tuple[float, float]:
        """The score's confidence interval: value ± t · standard error.

        t is the quantile of Student's distribution with one degree of freedom less than there are
        samples (examples, or blocks of them). The interval is for the mean over all data that these
        examples are a random part of.

        Raises:
            InvalidValue: the scores have no standard errors; the message says why.
        """
        unit = self._find(head)
        width = half_width(self, unit.standard_error, confidence)
        return unit.value - width, unit.value + width

    def rank_interval(
        self, confidence: float = 0.95, draws: int = 1000, seed: int = 0
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every unit, in the shape of ``values``, the lowest and the highest rank it plausibly
        has.

        Rank 1 is the most important. The interval is the central part of the unit's ranks over
        ``draws`` resamples of the examples (Hall and Miller 2009, "Using the bootstrap to quantify
        the authority of an empirical ranking"); units that are tied with others get somewhat short
        intervals, as there.

        Raises:
            InvalidValue: no samples, or one example only.
        """
        return self._rows(rank_bounds(self, confidence, draws, seed))

    def lowest(self, k: int, draws: int = 1000, seed: int = 0) -> tuple[tuple[float, ...], ...]:
        """For every unit, in the shape of ``values``, the probability that it is among the ``k``
        least important.

        The share of ``draws`` resamples of the examples in which it is; the probabilities sum to
        ``k``.

        Raises:
            InvalidValue: no samples, one example only, or a ``k`` that does not split the units.
        """
        return self._rows(lowest_shares(self, k, draws, seed))

    def stable(
        self, k: int, confidence: float = 0.95, draws: int = 1000, seed: int = 0
    ) -> Stability:
        """Whether the set of the ``k`` least important would be another with other examples.

        Returns:
            A Stability: the share of ``draws`` resamples in which the set is exactly this one
            (``probability``), the units that are surely in or out, and the undecided ones; true in
            a condition when the set is settled.

        Raises:
            InvalidValue: no samples, one example only, or a ``k`` that does not split the units.
        """
        return stability(self, k, confidence, draws, seed)

    def _rows(self, flat: list[_T]) -> tuple[tuple[_T, ...], ...]:
        left = iter(flat)
        return tuple(tuple(next(left) for _ in row) for row in self.values)

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
            level = {
                h: (lv, v)
                for unit, lv, v in zip(site.units, flat, values, strict=False)
                for h in unit
            }
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
        chosen = "" if self.choice is None else ", chosen by auto"
        return (
            f"{self.scorer}{chosen} over {self.n_examples} examples: {of}, darker or taller is more"
            " important"
        )

    def __str__(self) -> str:
        lines = [
            text_grid(f"HeadScores: {self.title}", self.rows()),
            *(f"  note: {note}" for note in self.notes),
        ]
        return clean("\n".join(lines))

    def __rich__(self) -> str:
        from rich.markup import escape

        notes = ["  note: " + escape(clean(note)) for note in self.notes]
        return "\n".join([rich_grid(f"HeadScores: {self.title}", self.rows()), *notes])

    def _repr_html_(self) -> str:
        return html_grid(self.title, self.rows()) + "".join(
            f"<p>{html_text(note)}</p>" for note in self.notes
        )


def _chosen(rows: tuple[_T, ...], places: tuple[int, ...]) -> tuple[_T, ...]:
    return tuple(rows[i] for i in places)
