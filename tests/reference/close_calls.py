"""Close calls by all pairs of units; an oracle, slow on purpose."""

from __future__ import annotations

import math
from typing import Any


def close(swaps: Any, units: list[Any], others: list[Any]) -> list[Any]:
    """The units of one side that are a close call with one of the other side."""
    return [unit for unit in units if any(_close(swaps, unit, other) for other in others)]


def _close(swaps: Any, unit: Any, other: Any) -> bool:
    near = abs(other.level - unit.level) <= math.hypot(unit.error, other.error)
    return near and bool(swaps._possible(*swaps._pair(unit, other)))
