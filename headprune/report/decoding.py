"""The generation table: tokens a second in prompt and decoding, and the cache's bytes, before and
after the cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headprune.core.record import RunRecord, SpeedRow
from headprune.report.formats import count, fixed, times


@dataclass(frozen=True)
class DecodingLine:
    """One formatted row; pairs are before and after the cut."""

    batch: str
    prompt: str
    prefill: tuple[str, str]
    decode: tuple[str, str]
    ratio: str
    interval: str
    cache: tuple[str, str]


def decoding_lines(record: RunRecord) -> tuple[DecodingLine, ...]:
    """The rows that ``bench.compare_decoding`` left in a record's metrics; none where something
    else has that name."""
    rows = record.metrics.get("decoding", ())
    try:
        return tuple(_line(row) for row in rows)
    except (KeyError, TypeError, ValueError):
        return ()


def _line(row: Any) -> DecodingLine:
    decode, speed = SpeedRow(**row["decode"]), row["tokens_per_second"]
    return DecodingLine(
        batch=f"{decode.batch:,}",
        prompt=f"{decode.length:,}",
        prefill=(fixed(speed["original_prefill"], 0), fixed(speed["pruned_prefill"], 0)),
        decode=(fixed(speed["original_decode"], 0), fixed(speed["pruned_decode"], 0)),
        ratio=times(decode.ratio),
        interval=f"{fixed(decode.low, 3)} to {fixed(decode.high, 3)}",
        cache=(count(row["original_bytes"]), count(row["pruned_bytes"])),
    )
