"""Text for numbers, durations and nested values, used by both reports so that they agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headprune.core.codec import leaves

_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
#: Longer lists show their first six and last two values.
_LONGEST_LIST = 12
#: Units of sizes from ten million, the largest first.
_UNITS = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6}


def fixed(value: float, digits: int) -> str:
    """Format a number with ``digits`` decimals, a true minus sign and no negative zero.

    >>> fixed(-0.25, 1), fixed(-0.001, 2)
    ('−0.2', '0.00')
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{digits}f}"
    # Small negative numbers round to "-0.00".
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")


def signed(value: float, digits: int) -> str:
    """Format as `fixed` does, with a sign before every number but zero."""
    text = fixed(value, digits)
    # A number that rounds to zero has no sign.
    if math.isfinite(value) and value > 0 and float(text) != 0:
        return f"+{text}"
    return text


def significant(value: float, digits: int = 4) -> str:
    """Format a number of any size with ``digits`` significant digits.

    >>> significant(0.25), significant(-3.14159e-7, 3)
    ('0.25', '−3.14×10⁻⁷')
    """
    if not math.isfinite(value):
        return fixed(value, 0)
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    # A negative zero keeps its hyphen.
    if value < 0:
        mantissa = mantissa.replace("-", "−")
    if exponent:
        return f"{mantissa}×{power(int(exponent))}"
    return mantissa


def count(value: float) -> str:
    """Format a size: with separators below ten million, with a unit above.

    >>> count(4385920), count(109482240.0), count(12.5)
    ('4,385,920', '109.5 M', '12.5')
    """
    if not math.isfinite(value):
        return fixed(value, 0)
    for unit, factor in _UNITS.items():
        if abs(value) >= max(factor, 1e7):
            return f"{value / factor:.4g} {unit}".replace("-", "−")
    text = f"{value:,.0f}"
    # Means over draws are no whole numbers.
    if value != int(value):
        text = f"{value:,.4g}"
    return text.replace("-", "−")


def counts(before: float, after: float) -> tuple[str, str]:
    """Format two sizes in one unit, that of the larger.

    >>> counts(14_120_000, 5_882_880), counts(512, 0)
    (('14.12 M', '5.883 M'), ('512', '0'))
    """
    unit = count(max(before, after)).rpartition(" ")[2]
    if unit not in _UNITS:
        return count(before), count(after)
    factor = _UNITS[unit]
    return f"{before / factor:.4g} {unit}", f"{after / factor:.4g} {unit}"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with about three significant digits."""
    value = 1000 * seconds
    if value < 1:
        return fixed(value, 3)
    if value < 10:
        return fixed(value, 2)
    if value < 100:
        return fixed(value, 1)
    return fixed(value, 0)


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds.

    >>> duration(3.21), duration(125), duration(7260)
    ('3.2 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 1:
        return f"{fixed(seconds, 3)} s"
    if not math.isfinite(seconds) or seconds < 60:
        return f"{fixed(seconds, 1)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def times(ratio: float) -> str:
    """Format a ratio with two decimals."""
    # A third one where two would show 1.00 for a ratio that is not 1.
    digits = 3 if ratio != 1 and fixed(ratio, 2) == "1.00" else 2
    return f"{fixed(ratio, digits)}×"


def power(exponent: int) -> str:
    """Format a power of ten: ``10⁻³``."""
    return f"10{str(exponent).translate(_SUPERSCRIPT)}"


def flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """List nested data as pairs of a dotted key and a text; long lists are shortened."""
    return [(name, scalar(value)) for name, value in leaves(data, prefix)]


def scalar(value: Any) -> str:
    """Format one stored value."""
    if value is None:
        return "none"
    # Before numbers: a bool is an int.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return significant(value, 6)
    if isinstance(value, (list, tuple)):
        shown = list(map(scalar, value))
        if len(shown) > _LONGEST_LIST:
            shown = [*shown[:6], "…", *shown[-2:], f"({len(value)} in all)"]
        return ", ".join(shown) or "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {scalar(v)}" for k, v in value.items()) or "none"
    return str(value)
