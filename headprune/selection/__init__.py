"""Selectors: which heads stay under a budget. One file is one selector; its name is the registered name.

``hp.selection.registry.names()`` lists them, ``hp.selection.GlobalTopk`` is the class of ``global_topk.py``. Another
package adds one by deriving from `Selector` and naming it under the entry point ``headprune.selectors``.
"""

from __future__ import annotations

from typing import Any

from headprune.core.errors import did_you_mean
from headprune.core.registry import Registry
from headprune.selection._base import Position, Problem, Selector

__all__ = ["Position", "Problem", "Selector", "registry"]

registry = Registry("selector", "headprune.selection", "headprune.selectors")


def __getattr__(name: str) -> Any:
    if not name[:1].isupper():  # modules and dunders are none of the registry's business
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    classes = {registry.attribute(entry): entry for entry in registry}
    if name not in classes:
        raise AttributeError(f"module {__name__!r} has no selector {name!r}. {did_you_mean(name, classes)}")
    return registry.get(classes[name])


def __dir__() -> list[str]:
    return sorted([*__all__, *map(registry.attribute, registry)])
