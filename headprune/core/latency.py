"""LatencyTable: the time of a model, and of each site by its number of heads or neurons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headprune.core.codec import LATER, SPARSE, Value
from headprune.core.errors import InvalidValue, UnknownName, check_count, did_you_mean
from headprune.core.heads import AttentionSite, HeadMask

#: Among the metrics of a run's record: how many times as much a cut saves as the table measured.
SAVINGS_FACTOR = "savings_factor"
#: Begins the note of a table whose times of the whole model differ much.
BUSY = "The machine was busy"
_ANEW = "Measure the model as it is now."
# Models whose parameters differ by at most this fraction are about as fast.
_SAME_SIZE = 0.01


@dataclass(frozen=True)
class SiteLatency:
    """Time of one site: an attention, or the neurons of a feed-forward.

    Args:
        site: The site's name.
        seconds: ``seconds[n]`` with n heads or neurons; None where n was not measured. Of neurons,
            it is the time beyond the same module without any.
        neurons: Whether ``seconds`` counts neurons.
    """

    site: str
    seconds: tuple[float | None, ...] = field(metadata=SPARSE)
    neurons: bool = field(default=False, metadata=LATER)

    @property
    def noun(self) -> str:
        """What its units are called: ``head`` or ``neuron``."""
        return "neuron" if self.neurons else "head"

    @property
    def whole(self) -> float:
        """Seconds with all units that are present."""
        return self.seconds[-1] or 0.0


@dataclass(frozen=True)
class LatencyTable(Value):
    """Latency of a model by the heads and neurons of its sites, on one device and input shape.

    The predicted time of a pruned model is the whole model's time, less the time that the removed
    heads and neurons take: ``whole - sum over sites of (seconds[present] - seconds[kept])``.

    Args:
        whole: Seconds per call of the uncut model.
        sites: For every site, its seconds by the number of kept heads or neurons.
        batch_size: Examples per call.
        length: Tokens per example.
        device: The device's name.
        dtype: The number format of the model's weights.
        notes: Messages for the user.
        n_parameters: Of the model; None where they were not counted.

    >>> table = LatencyTable(1.0, (SiteLatency("a", (0.1, 0.3, 0.4)),), 8, 128, "CPU", "float32")
    >>> round(table.predict(HeadMask.from_keep({"a": [1]}, {"a": 2})), 3)
    0.9
    >>> print(table)
    LatencyTable: 1000 ms, of which 400 ms in attention (batch 8 of 128 tokens, float32, CPU)
      a  2 heads 400 ms, 1 head 300 ms, 0 heads 100 ms
    """

    whole: float
    sites: tuple[SiteLatency, ...]
    batch_size: int
    length: int
    device: str
    dtype: str
    notes: tuple[str, ...] = ()
    n_parameters: int | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        _check_seconds("LatencyTable.whole", self.whole)
        for name in ("batch_size", "length"):
            check_count(f"LatencyTable.{name}", getattr(self, name))
        names = [row.site for row in self.sites]
        if not names or len(set(names)) < len(names):
            raise InvalidValue("LatencyTable.sites", "one row per site, at least one", names)
        for row in self.sites:
            if not row.seconds or row.seconds[-1] is None:
                must = f"measured with all {row.noun}s that are present"
                raise InvalidValue(f"LatencyTable row {row.site}", must, row.seconds)
            for n, seconds in enumerate(row.seconds):
                if seconds is not None:
                    # Attention without heads may take no time at all.
                    where = f"LatencyTable row {row.site}, {n} {row.noun}s"
                    _check_seconds(where, seconds, least=0.0)

    def with_savings(self, factor: float) -> LatencyTable:
        """A table in which every cut saves ``factor`` times as much time; no entry falls below 0.

        >>> table = LatencyTable(1.0, (SiteLatency("a", (0.1, 0.4)),), 8, 128, "CPU", "float32")
        >>> table.with_savings(0.5).row("a")
        (0.25, 0.4)
        """
        rows = []
        for row in self.sites:
            seconds: list[float | None] = []
            for entry in row.seconds:
                if entry is None:
                    seconds.append(None)
                    continue
                saved = factor * (row.whole - entry)
                seconds.append(max(0.0, row.whole - saved))
            rows.append(replace(row, seconds=tuple(seconds)))
        return replace(self, sites=tuple(rows))

    def row(self, site: str) -> tuple[float | None, ...]:
        """Seconds of one site by its number of heads or neurons.

        Raises:
            UnknownName: no such site.
        """
        return self._row(site).seconds

    def _row(self, site: str) -> SiteLatency:
        for row in self.sites:
            if row.site == site:
                return row
        hint = did_you_mean(site, [r.site for r in self.sites])
        raise UnknownName("LatencyTable", "measured at this site", repr(site), hint)

    def check(self, sites: Iterable[AttentionSite], n_parameters: int | None = None) -> None:
        """Refuse a table of another model than this one, or one measured before it was cut.

        Args:
            sites: Sites of the model.
            n_parameters: Of the model, where they are known.

        Raises:
            UnknownName: a site that it lacks.
            InvalidValue: a site with another number of heads, a model of another size, or sites
                that take longer than the model.
        """
        no_neurons = not any(row.neurons for row in self.sites)
        for site in sites:
            if site.is_feed_forward and no_neurons:
                must = "measured with the feed-forwards of the scores"
                hint = "Measure it with sites=hp.find_sites(model, feed_forward=True)."
                raise InvalidValue("LatencyTable", must, "a table of heads alone", hint)
            n_heads = len(self.row(site.name)) - 1
            if n_heads != len(site.heads):
                must = f"measured with the {len(site.heads)} {site.noun}s of {site.name}"
                got = f"a row for {n_heads} {site.noun}s"
                raise InvalidValue("LatencyTable", must, got, _ANEW)
        # fsum: the check must not fail by the rounding of many small numbers.
        in_sites = math.fsum(row.whole for row in self.sites)
        if in_sites > self.whole * (1 + 1e-6):  # beyond rounding
            must = "one whose sites together take no longer than the whole model"
            got = f"{_ms(in_sites)} in the sites, {_ms(self.whole)} in the model"
            raise InvalidValue("LatencyTable", must, got, _ANEW)
        # A deeper model may have all of these sites. Another output layer hardly changes the speed.
        if self.n_parameters is None or n_parameters is None:
            return
        if not math.isclose(self.n_parameters, n_parameters, rel_tol=_SAME_SIZE):
            must = f"measured on a model of about {n_parameters:,} parameters"
            raise InvalidValue("LatencyTable", must, f"{self.n_parameters:,}", _ANEW)

    def alone(self, sites: Iterable[str]) -> LatencyTable:
        """The table of a model that consists of these sites."""
        rows = tuple(self._row(name) for name in sites)
        whole = sum(row.whole for row in rows)
        return replace(self, sites=rows, whole=whole, n_parameters=None)

    def predict(self, kept: HeadMask | Mapping[str, int]) -> float:
        """Predict the seconds per call of the model with some heads kept.

        Args:
            kept: The kept heads and neurons, or how many per site; sites that it lacks keep all.

        Raises:
            UnknownName: a site that was not measured.
            InvalidValue: a number of heads that a site cannot have.
        """
        if isinstance(kept, HeadMask):
            kept = {row.site: len(row.kept) for row in kept.rows}
        total = self.whole
        for site, count in kept.items():
            row = self._row(site)
            # A negative count would index from the end.
            after = row.seconds[count] if 0 <= count < len(row.seconds) else None
            if after is None:
                known = [n for n, seconds in enumerate(row.seconds) if seconds is not None]
                must = f"a measured number of {row.noun}s, one of {known}"
                raise InvalidValue(f"LatencyTable row {site}", must, count)
            total -= row.whole - after
        return total

    def speedup(self, kept: HeadMask | Mapping[str, int]) -> float:
        """How many times as fast as the whole model a cut is predicted to be; see ``predict``."""
        return self.whole / max(self.predict(kept), 1e-9)  # it may predict no time at all

    @property
    def caveat(self) -> str:
        """Why the times may be wrong; empty where the table says nothing of it."""
        return next((note for note in self.notes if note.startswith(BUSY)), "")

    def __str__(self) -> str:
        parts = f"{_ms(sum(row.whole for row in self.sites if not row.neurons))} in attention"
        if any(row.neurons for row in self.sites):
            neurons = sum(row.whole for row in self.sites if row.neurons)
            parts += f" and {_ms(neurons)} in feed-forwards"
        at = f"batch {self.batch_size} of {self.length} tokens, {self.dtype}, {self.device}"
        lines = [f"LatencyTable: {_ms(self.whole)}, of which {parts} ({at})"]
        width = max(len(row.site) for row in self.sites)
        lines += [f"  {row.site:<{width}}  {', '.join(_cells(row))}" for row in self.sites]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _cells(row: SiteLatency) -> Iterator[str]:
    """The time of every measured number of units, from all of them down to none."""
    for count in reversed(range(len(row.seconds))):
        seconds = row.seconds[count]
        if seconds is not None:
            plural = "" if count == 1 else "s"
            yield f"{count:,} {row.noun}{plural} {_ms(seconds)}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"


def corrected(table: LatencyTable, metrics: Mapping[str, Any]) -> LatencyTable:
    """The table by which a run chose: its savings scaled, where the run scaled them.

    Args:
        table: As it was measured.
        metrics: Of the run's record.
    """
    factor = metrics.get(SAVINGS_FACTOR)
    if isinstance(factor, float) and 0 < factor < math.inf:
        return table.with_savings(factor)
    return table


def _check_seconds(where: str, value: float, least: float = 5e-324) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        raise InvalidValue(where, "a time in seconds", repr(value))
