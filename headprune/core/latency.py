"""LatencyTable: how long a model takes, and what each site's attention adds to that at every number
of heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from headprune.core.codec import Value
from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.heads import AttentionSite, HeadMask


@dataclass(frozen=True)
class SiteLatency:
    """What one site's attention takes: ``seconds[n]`` with n heads, None where it cannot have n
    heads."""

    site: str
    seconds: tuple[float | None, ...]


@dataclass(frozen=True)
class LatencyTable(Value):
    """Latency of a model by the heads of its sites, on one device, at one batch size and length.

    A pruned model is predicted to take what the whole one takes, less what each site's attention no
    longer does: ``whole - sum over sites of (seconds[present] - seconds[kept])``.

    Args:
        whole: Seconds of one call of the uncut model.
        sites: For every site, the seconds of its attention with 0, 1, ... all of the heads that are
            present.
        batch_size: Examples in a call.
        length: Tokens an example.
        device: The device in words.
        dtype: The number format of the model's weights.
        notes: What the user should know.

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

    def __post_init__(self) -> None:
        _check_seconds("LatencyTable.whole", self.whole)
        for name in ("batch_size", "length"):
            if type(count := getattr(self, name)) is not int or count < 1:
                raise InvalidValue(f"LatencyTable.{name}", "a count >= 1", repr(count))
        names = [row.site for row in self.sites]
        if not names or len(set(names)) < len(names):
            raise InvalidValue("LatencyTable.sites", "one row a site, at least one", names)
        for row in self.sites:
            if not row.seconds or row.seconds[-1] is None:
                must = "measured with all heads that are present"
                raise InvalidValue(f"LatencyTable row {row.site}", must, row.seconds)
            for n, seconds in enumerate(row.seconds):
                if seconds is not None:
                    _check_seconds(f"LatencyTable row {row.site}, {n} heads", seconds, least=0.0)

    def row(self, site: str) -> tuple[float | None, ...]:
        """Seconds by number of heads of one site.

        Raises:
            UnknownName: no such site.
        """
        for row in self.sites:
            if row.site == site:
                return row.seconds
        hint = did_you_mean(site, [r.site for r in self.sites])
        raise UnknownName("LatencyTable", "measured at this site", repr(site), hint)

    def check(self, sites: Iterable[AttentionSite]) -> None:
        """Refuses a table that was measured on other sites than these, or before heads of them were
        cut.

        Raises:
            UnknownName: a site that it lacks.
            InvalidValue: a site with another number of heads, or attention that takes longer than
                the model.
        """
        for site in sites:
            if (heads := len(self.row(site.name)) - 1) != len(site.heads):
                must = f"measured with the {len(site.heads)} heads of {site.name}"
                raise InvalidValue(
                    "LatencyTable",
                    must,
                    f"a row for {heads} heads",
                    "Measure the model as it is now.",
                )
        attention = math.fsum(row.seconds[-1] or 0.0 for row in self.sites)
        if attention > self.whole * (1 + 1e-6):  # beyond rounding
            got = f"{_ms(attention)} in attention of {_ms(self.whole)} in all"
            raise InvalidValue(
                "LatencyTable", "of a model that takes longer than its attention", got
            )

    def alone(self, sites: Iterable[str]) -> LatencyTable:
        """The table of a model that has nothing but the attention of these sites."""
        rows = tuple(SiteLatency(name, self.row(name)) for name in sites)
        return replace(self, sites=rows, whole=sum(row.seconds[-1] or 0.0 for row in rows))

    def predict(self, kept: HeadMask | Mapping[str, int]) -> float:
        """Seconds of the model with these heads, or with so many heads a site.

        Raises:
            UnknownName: a site that was not measured.
            InvalidValue: a number of heads that a site cannot have.
        """
        counts = {r.site: len(r.kept) for r in kept.rows} if isinstance(kept, HeadMask) else kept
        total = self.whole
        for site, count in counts.items():
            row = self.row(site)
            after = row[count] if 0 <= count < len(row) else None
            if after is None:
                known = [n for n, seconds in enumerate(row) if seconds is not None]
                raise InvalidValue(
                    f"LatencyTable row {site}", f"asked for one of {known} heads", count
                )
            total -= (row[-1] or 0.0) - after
        return total

    def __str__(self) -> str:
        attention = sum(row.seconds[-1] or 0.0 for row in self.sites)
        at = f"batch {self.batch_size} of {self.length} tokens, {self.dtype}, {self.device}"
        lines = [f"LatencyTable: {_ms(self.whole)}, of which {_ms(attention)} in attention ({at})"]
        width = max(len(row.site) for row in self.sites)
        for row in self.sites:
            known = [(n, s) for n, s in enumerate(row.seconds) if s is not None][::-1]
            cells = [f"{n} head{'' if n == 1 else 's'} {_ms(s)}" for n, s in known]
            lines.append(f"  {row.site:<{width}}  {', '.join(cells)}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"


def _check_seconds(where: str, value: float, least: float = 5e-324) -> None:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not (math.isfinite(value) and value >= least)
    ):
        raise InvalidValue(where, "a time in seconds", repr(value))
