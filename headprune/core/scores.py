"""HeadScores: the importance of each head, its sampling error, its source, and its cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from headprune.core.choice import Choice
from headprune.core.codec import LATER, FrozenDict, Value
from headprune.core.display import Row, clean, html_grid, html_text, rich_grid, text_grid
from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.files import atomic_paths
from headprune.core.frames import scores_frame
from headprune.core.grids import score_rows
from headprune.core.heads import AttentionSite, HeadCounts, HeadId, places
from headprune.core.ladders import SiteLadder
from headprune.core.samples import Curvature, Samples, if_there
from headprune.core.uncertainty import Stability, half_width, lowest_shares, rank_bounds, stability
from headprune.core.units import Cost, CostTable, ScoredUnit, by_site

if TYPE_CHECKING:
    from pandas import DataFrame
    from typing_extensions import Self

__all__ = ["Cost", "CostTable", "HeadScores", "ModelFingerprint", "ScoredUnit"]

_T = TypeVar("_T")

#: How the score of a bundle of neurons follows from theirs: scores that add up, as rises of the
#: loss do; a mean over channels, as of z-scores or ranks; a norm over channels.
Bundling: TypeAlias = Literal["sum", "mean", "norm"]


@dataclass(frozen=True)
class ModelFingerprint:
    """Hashes that tell models apart.

    Args:
        structure: Of the class, the sites and their head counts; a cut does not change it.
        weights: Of the weights.
    """

    structure: str
    weights: str


@dataclass(frozen=True)
class HeadScores(Value):
    """Importance of every prune unit; higher is more important.

    ``scores[HeadId(site, head)]`` is the score of the unit that holds the head.

    Args:
        sites: The scored sites.
        values: For every site, one value per unit.
        standard_errors: The same shape; None where the scorer has none.
        scorer: Registered name of the scorer.
        settings: Its settings.
        n_examples: Examples behind the scores.
        model: Fingerprint of the scored model.
        data: Digest of the examples; None where none were used.
        seed: Of the scorer; None where it draws nothing.
        costs: Of each unit; None where no batch was given to measure the model.
        samples: Numbers of single examples, for ranks and intervals.
        notes: Messages for the user.
        curvature: How the loss bends when several units are removed, for ``quadratic``.
        choice: How ``auto`` chose the scorer; None where the user did.
        ladders: For every site, the measured price of keeping fewer units; None where the scorer
            measures none.
        bundling: How the score of several neurons follows from theirs.
    """

    # The numbers.
    sites: tuple[AttentionSite, ...]
    values: tuple[tuple[float, ...], ...]
    standard_errors: tuple[tuple[float, ...], ...] | None
    # Their source.
    scorer: str
    settings: FrozenDict
    n_examples: int
    model: ModelFingerprint
    data: str | None = None
    seed: int | None = None
    # What selectors, intervals and reports use besides the numbers.
    costs: CostTable | None = None
    samples: Samples | None = None
    notes: tuple[str, ...] = ()
    curvature: Curvature | None = None
    choice: Choice | None = field(default=None, metadata=LATER)
    ladders: tuple[SiteLadder, ...] | None = field(default=None, metadata=LATER)
    bundling: Bundling = field(default="sum", metadata=LATER)

    def __post_init__(self) -> None:
        self._check_shapes()
        # NaN has no place in an order, and infinite scores have no mean.
        for site, row in zip(self.sites, self.values, strict=True):
            for unit, value in zip(site.units, row, strict=True):
                if not math.isfinite(value):
                    where = f"score of {site.name}{list(unit)}"
                    hint = "Look at the scorer's input for NaN or infinite values."
                    raise InvalidValue(where, "finite", value, hint)

    def _check_shapes(self) -> None:
        """Refuse values, costs and matrices of another number of units."""
        shape = [len(site.units) for site in self.sites]
        _check_rows("values", list(map(len, self.values)), shape)
        if self.standard_errors is not None:
            _check_rows("standard_errors", list(map(len, self.standard_errors)), shape)
        if self.costs is not None:
            _check_rows("costs.units", list(map(len, self.costs.units)), shape)
        if self.ladders is not None:
            names = [site.name for site in self.sites]
            if [ladder.site for ladder in self.ladders] != names:
                raise InvalidValue("HeadScores.ladders", f"one per site, {names}", self.ladders)
        n_units = sum(shape)
        if self.samples is not None and self.samples.units != n_units:
            must = f"one column per unit, {n_units}"
            raise InvalidValue("HeadScores.samples", must, self.samples.units)
        if self.curvature is not None and self.curvature.units != n_units:
            must = f"one row and column per unit, {n_units}"
            raise InvalidValue("HeadScores.curvature", must, self.curvature.units)

    def save(self, path: str | Path) -> Path:
        """Write the JSON form, with samples and curvature as files beside it.

        They become ``<name>.samples.safetensors`` and ``<name>.curvature.safetensors``. A matrix
        that cannot be read is not written, and a warning says so.

        Returns:
            The path.
        """
        matrices = ((self.samples, "per-example numbers"), (self.curvature, "curvature"))
        with atomic_paths() as temporary_of:
            # The JSON file is put in place first. If a kill leaves matrices under temporary names,
            # its hashes find them.
            temporary = temporary_of(path)
            for matrix, what in matrices:
                if matrix is None:
                    continue
                try:
                    matrix.write(path, temporary_of)
                except InvalidValue as error:
                    warnings.warn(f"{path} is written without {what}: {error}", stacklevel=2)
            temporary.write_bytes(self.to_json().encode())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote; samples and curvature are read when first needed.

        Raises:
            InvalidValue: the file cannot be read or holds no HeadScores.
        """
        return super().load(path).stored_with(path)

    def stored_with(self, path: str | Path) -> Self:
        """These scores, with samples and curvature to be read from beside a file."""
        samples = None if self.samples is None else self.samples.stored_with(path)
        curvature = None if self.curvature is None else self.curvature.stored_with(path)
        return replace(self, samples=samples, curvature=curvature)

    def of(self, sites: str) -> HeadScores:
        """The scores of some sites; the total cost is still that of the whole model.

        Args:
            sites: A kind (``self``, ``causal``, ``cross``: an encoder-decoder's encoder, decoder
                and cross attention; ``feed_forward``), a site's name, or a pattern over names.

        Raises:
            UnknownName: no such site.
        """
        wanted = places(self.sites, sites)
        if not wanted:
            raise _no_such_sites(self.sites, sites)
        return self.of_places(wanted)

    def without_neurons(self) -> HeadScores:
        """The scores of attention alone; themselves where there are no feed-forwards."""
        wanted = [i for i, site in enumerate(self.sites) if not site.is_feed_forward]
        return self if len(wanted) == len(self.sites) else self.of_places(tuple(wanted))

    def of_places(self, wanted: tuple[int, ...]) -> HeadScores:
        """The scores of the sites at these places, in their order in the model."""
        # 1. Numbers and costs, site by site.
        errors, costs = self.standard_errors, self.costs
        if errors is not None:
            errors = _chosen(errors, wanted)
        if costs is not None:
            costs = replace(costs, units=_chosen(costs.units, wanted))
        ladders = None if self.ladders is None else _chosen(self.ladders, wanted)

        # 2. Matrices, column by column. One whose file is missing becomes a note.
        columns: list[int] = []
        if self.samples is not None or self.curvature is not None:
            columns = [i for i, unit in enumerate(self.units()) if unit.site in wanted]
        samples, curvature, notes = None, None, self.notes
        if self.samples is not None:
            samples, missing = if_there(partial(self.samples.columns, columns))
            notes += missing
        if self.curvature is not None:
            curvature, missing = if_there(partial(self.curvature.part, columns))
            notes += missing
        return replace(
            self,
            sites=_chosen(self.sites, wanted),
            values=_chosen(self.values, wanted),
            standard_errors=errors,
            costs=costs,
            samples=samples,
            notes=notes,
            curvature=curvature,
            ladders=ladders,
        )

    def units(self) -> Iterator[ScoredUnit]:
        """Every prune unit in model order."""
        for s, site in enumerate(self.sites):
            for u, heads in enumerate(site.units):
                error = None if self.standard_errors is None else self.standard_errors[s][u]
                cost = None if self.costs is None else self.costs.units[s][u]
                yield ScoredUnit(s, u, site.name, heads, self.values[s][u], error, cost)

    def ranked(self) -> list[ScoredUnit]:
        """Units from least to most important; of ties the later site and head come first."""
        return sorted(self.units(), key=lambda unit: (unit.value, -unit.site, -unit.unit))

    def to_frame(self) -> DataFrame:
        """The scores as a pandas DataFrame, one row per present head, in model order.

        Columns: ``site``, ``kind``, ``head`` (original index), ``kv_head``, ``unit`` (heads of a
        site with one number are one unit); ``score``, ``standard_error`` and ``rank`` (1 is the
        most important) of the unit; and its cost: ``params``, ``macs`` (per example as long as the
        scored ones), ``kv_bytes`` (per token). NaN where a scorer has none.
        """
        # Rank 1 is the most important unit, which comes last in ``ranked``.
        ranks = {}
        for rank, unit in enumerate(reversed(self.ranked()), start=1):
            ranks[unit.site, unit.unit] = rank
        length = None if self.costs is None else self.costs.length
        return scores_frame(self.sites, self.units(), ranks, length)

    def __getitem__(self, head: HeadId) -> float:
        return self._unit_of(head).value

    def standard_error(self, head: HeadId) -> float | None:
        """Standard error of a head's score; None where the scorer has none."""
        return self._unit_of(head).standard_error

    def interval(self, head: HeadId, confidence: float = 0.95) -> tuple[float, float]:
        """The score's confidence interval: value ± t · standard error.

        t is the quantile of Student's distribution with one degree of freedom less than there are
        samples (examples, or blocks of them). The interval is for the mean over all data that these
        examples are a random part of.

        Raises:
            InvalidValue: the scores have no standard errors; the message says why.
        """
        unit = self._unit_of(head)
        width = half_width(self, unit.standard_error, confidence)
        return unit.value - width, unit.value + width

    def rank_interval(
        self, confidence: float = 0.95, draws: int = 1000, seed: int = 0
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The lowest and the highest plausible rank of every unit; rank 1 is the most important.

        The interval is the central part of the unit's ranks over ``draws`` resamples of the
        examples (Hall and Miller 2009, "Using the bootstrap to quantify the authority of an
        empirical ranking"). As there, units that are tied get somewhat short intervals.

        Returns:
            Pairs in the shape of ``values``.

        Raises:
            InvalidValue: no samples, or one example only.
        """
        return by_site(rank_bounds(self, confidence, draws, seed), map(len, self.values))

    def lowest(self, k: int, draws: int = 1000, seed: int = 0) -> tuple[tuple[float, ...], ...]:
        """The probability that each unit is among the ``k`` least important.

        It is the share of ``draws`` resamples of the examples; the probabilities sum to ``k``.

        Returns:
            Numbers in the shape of ``values``.

        Raises:
            InvalidValue: no samples, one example only, or a ``k`` that does not split the units.
        """
        return by_site(lowest_shares(self, k, draws, seed), map(len, self.values))

    def stable(
        self, k: int, confidence: float = 0.95, draws: int = 1000, seed: int = 0
    ) -> Stability:
        """Whether other examples would change the set of the ``k`` least important.

        Returns:
            A Stability: the share of ``draws`` resamples in which the set is exactly this one
            (``probability``), the units that are settled in or out, and the undecided ones. It is
            true in a condition when the set is settled.

        Raises:
            InvalidValue: no samples, one example only, or a ``k`` that does not split the units.
        """
        return stability(self, self.ranked(), k, confidence, draws, seed)

    def _unit_of(self, head: HeadId) -> ScoredUnit:
        if not isinstance(head, HeadId):
            must = "a HeadId: the site's name and the head's original index"
            raise InvalidValue("head", must, repr(head))
        for unit in self.units():
            if unit.name == head.site and head.head in unit.heads:
                return unit
        hint = did_you_mean(head.site, [site.name for site in self.sites])
        raise UnknownName("head", "one of the scored heads", str(head), hint)

    @property
    def counts(self) -> HeadCounts:
        """Heads and neurons that are present and scored."""
        return HeadCounts.present(self.sites)

    @property
    def n_heads(self) -> int:
        """Heads that are present and scored."""
        return self.counts.heads

    def rows(self, kept: frozenset[HeadId] | None = None) -> list[Row]:
        """The grid that draws the scores; heads outside ``kept`` are drawn as removed."""
        return score_rows(self.sites, self.values, kept)

    @property
    def summary(self) -> str:
        """Scorer, examples and how many heads and neurons are scored, on one line."""
        # With shared key/value heads a unit may hold several heads.
        attention = [site for site in self.sites if not site.is_feed_forward]
        n_units = sum(len(site.units) for site in attention)
        of = f"{self.n_heads} heads"
        if n_units != self.n_heads:
            of += f" in {n_units} groups"
        if self.counts.neurons is not None:
            of += f" and {self.counts.neurons:,} neurons"
        scorer = self.scorer if self.choice is None else f"{self.choice.chosen}, chosen by auto,"
        return f"{scorer} over {self.n_examples} examples: {of}"

    @property
    def title(self) -> str:
        return f"{self.summary}, darker or taller is more important"

    def __str__(self) -> str:
        lines = [text_grid(f"HeadScores: {self.title}", self.rows())]
        lines += [f"  note: {note}" for note in self.notes]
        return clean("\n".join(lines))

    def __rich__(self) -> str:
        from rich.markup import escape

        lines = [rich_grid(f"HeadScores: {self.title}", self.rows())]
        lines += ["  note: " + escape(clean(note)) for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        notes = [f"<p>{html_text(note)}</p>" for note in self.notes]
        return html_grid(self.title, self.rows()) + "".join(notes)


def _check_rows(name: str, lengths: list[int], shape: list[int]) -> None:
    if lengths != shape:
        raise InvalidValue(f"HeadScores.{name}", f"one entry per unit, {shape}", lengths)


def _chosen(rows: tuple[_T, ...], wanted: tuple[int, ...]) -> tuple[_T, ...]:
    return tuple(rows[i] for i in wanted)


def _no_such_sites(sites: Sequence[AttentionSite], wanted: str) -> UnknownName:
    """The error of ``HeadScores.of``: it names close names, or else the kinds there are."""
    kinds = list(dict.fromkeys(site.kind for site in sites))
    hint = did_you_mean(wanted, [*kinds, *(site.name for site in sites)])
    if not hint.startswith("Did"):  # no close name: the list of all sites would be long
        hint = f"The scored sites are of kind {' and '.join(kinds)}."
    must = "a kind or a pattern of the scored sites"
    return UnknownName("HeadScores.of", must, repr(wanted), hint)
