"""How numbers, durations and nested values are spelt; the one place, so that both reports agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headprune.core.codec import leaves

_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


_UNITS = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6}


def fixed(value: float, digits: int) -> str:
    """A number with ``digits`` decimals, a true minus sign and no negative zero.

    >>> fixed(-0.25, 1), fixed(-0.001, 2)
    ('−0.2', '0.00')
    """
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")


def signed(value: float, digits: int) -> str:
    """The same with a sign before every number but zero."""
    text = fixed(value, digits)
    return f"+{text}" if math.isfinite(value) and value > 0 and float(text) != 0 else text


def significant(value: float, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, for scores and tolerances of any size.

    >>> significant(0.25), significant(-3.14159e-7, 3)
    ('0.25', '−3.14×10⁻⁷')
    """
    if not math.isfinite(value):
        return fixed(value, 0)
    mantissa, _, exponent = f"{value:.{digits}g}".replace(
        "-", "−", 1 if value < 0 else 0
    ).partition("e")
    return f"{mantissa}×{power(int(exponent))}" if exponent else mantissa


def count(value: float) -> str:
    """A size: with separators below ten million, with a unit above.

    >>> count(4385920), count(109482240.0), count(12.5)
    ('4,385,920', '109.5 M', '12.5')
    """
    if not math.isfinite(value):
        return fixed(value, 0)
    for unit, factor in _UNITS.items():
        if abs(value) >= max(factor, 1e7):
            return f"{value / factor:.4g} {unit}".replace("-", "−")
    return (f"{value:,.0f}" if value == int(value) else f"{value:,.4g}").replace("-", "−")


def counts(before: float, after: float) -> tuple[str, str]:
    """Two sizes in one unit, that of the larger.

    >>> counts(14_120_000, 5_882_880), counts(512, 0)
    (('14.12 M', '5.883 M'), ('512', '0'))
    """
    unit = count(max(before, after)).rpartition(" ")[2]
    if unit not in _UNITS:
        return count(before), count(after)
    first, second = (f"{value / _UNITS[unit]:.4g} {unit}" for value in (before, after))
    return first, second


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with about three significant digits."""
    value = 1000 * seconds
    return fixed(value, 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0)


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(3.21), duration(125), duration(7260)
    ('3.2 s', '2 min 5 s', '2 h 1 min')
    """
    if not math.isfinite(seconds) or seconds < 60:
        return f"{fixed(seconds, 1 if seconds >= 1 else 3)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def times(ratio: float) -> str:
    """A ratio; with a third decimal where two would say 1.00 of something that is not 1."""
    digits = 3 if ratio != 1 and fixed(ratio, 2) == "1.00" else 2
    return f"{fixed(ratio, digits)}×"


def power(exponent: int) -> str:
    """Ten to an exponent: ``10⁻³``."""
    return f"10{str(exponent).translate(_SUPERSCRIPT)}"


def flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested data as pairs of a dotted key and a text; long lists are shortened and counted."""
    return [(name, scalar(value)) for name, value in leaves(data, prefix)]


def scalar(value: Any) -> str:
    """One stored value in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return significant(value, 6)
    if isinstance(value, (list, tuple)):
        shown = [scalar(v) for v in value]
        if len(shown) > 12:
            shown = [*shown[:6], "…", *shown[-2:], f"({len(value)} in all)"]
        return ", ".join(shown) or "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {scalar(v)}" for k, v in value.items()) or "none"
    return str(value)
