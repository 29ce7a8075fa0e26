"""Packages whose names load when they are first used, so that importing them is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, home: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its ``__name__``.
        home: The module that defines each public name.
        modules: Names that are modules themselves.

    >>> getattr_, dir_ = lazy(__name__, {"Fraction": "fractions"}, {"maths": "math"})
    >>> dir_(), getattr_("maths").sqrt(4.0)
    (['Fraction', 'maths'], 2.0)
    """
    modules = modules or {}

    def load(name: str) -> Any:
        if name in home:
            value = getattr(importlib.import_module(home[name]), name)
            # The next use finds it without a call.
            setattr(sys.modules[package], name, value)
            return value
        if name in modules:
            return importlib.import_module(modules[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted([*home, *modules])

    return load, names
