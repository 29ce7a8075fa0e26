"""The generation table: tokens per second and cache size, before and after the cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headprune.core.record import RunRecord, SpeedRow
from headprune.report.formats import count, fixed, times


@dataclass(frozen=True)
class DecodingLine:
    """One formatted row; pairs are before and after the cut."""

    batch: str  # examples
    prompt: str  # tokens
    prefill: tuple[str, str]  # tokens per second
    decode: tuple[str, str]  # tokens per second
    ratio: str  # of decoding: above 1 is faster
    interval: str  # 95 %
    cache: tuple[str, str]  # bytes


def decoding_lines(record: RunRecord) -> tuple[DecodingLine, ...]:
    """Format the decoding rows of a run; empty where that metric has another form."""
    # The run stores rows of `bench.compare_decoding` under this key, but users may, too.
    rows = record.metrics.get("decoding", ())
    try:
        return tuple(map(_line, rows))
    except (KeyError, TypeError, ValueError):
        return ()


def _line(row: Any) -> DecodingLine:
    decode = SpeedRow(**row["decode"])
    speed = row["tokens_per_second"]
    return DecodingLine(
        batch=f"{decode.batch:,}",
        prompt=f"{decode.length:,}",
        prefill=(fixed(speed["original_prefill"], 0), fixed(speed["pruned_prefill"], 0)),
        decode=(fixed(speed["original_decode"], 0), fixed(speed["pruned_decode"], 0)),
        ratio=times(decode.ratio),
        interval=f"{fixed(decode.low, 3)} to {fixed(decode.high, 3)}",
        cache=(count(row["original_bytes"]), count(row["pruned_bytes"])),
    )
