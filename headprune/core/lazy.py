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
        package: Its ``__name__``; it must have ``__all__``.
        home: The module that defines each public name.
        modules: Names that are modules themselves.

    >>> import headprune.choice
    >>> load, names = lazy("headprune.choice", {"Auto": "headprune.choice.auto"}, {"maths": "math"})
    >>> load("maths").sqrt(4.0), names()
    (2.0, ['Auto', 'Ladder'])
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
        return sorted(sys.modules[package].__all__)

    return load, names
