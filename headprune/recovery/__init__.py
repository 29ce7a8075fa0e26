"""Recovery of what a cut cost. One file is one method; the file's name is the registered name.

``hp.recovery.registry.names()`` lists them, ``hp.recovery.MeanFold`` is the class of
``mean_fold.py``. Another package adds a method by deriving from `Recovery` and naming the class
under the entry point ``headprune.recoveries``.
"""

from __future__ import annotations

from typing import Any

from headprune.core.registry import Registry
from headprune.recovery._base import Job, Outcome, Recovery, RecoveryReport

__all__ = ["Job", "Outcome", "Recovery", "RecoveryReport", "registry"]

registry = Registry("recovery", "headprune.recovery", "headprune.recoveries")


def __getattr__(name: str) -> Any:
    return registry.class_named(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *map(registry.attribute, registry)])
