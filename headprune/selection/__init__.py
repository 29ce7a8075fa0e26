"""Selectors: which heads are kept under a budget.

One file is one selector; the file's name is the registered name.
``hp.selection.registry.names()`` lists them, ``hp.selection.GlobalTopk`` is the class of
``global_topk.py``. Another package adds one by deriving from `Selector` and naming it under the
entry point ``headprune.selectors``.
"""

from __future__ import annotations

from typing import Any

from headprune.core.registry import Registry
from headprune.selection._base import Position, Problem, Selector

__all__ = ["Position", "Problem", "Selector", "registry"]

registry = Registry("selector", "headprune.selection", "headprune.selectors")


def __getattr__(name: str) -> Any:
    return registry.class_named(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *map(registry.attribute, registry)])
