"""Measurements: size, speed and quality of a pruned model and of the original."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "compare_decoding": "headprune.bench.decoding",
    "compare_latency": "headprune.bench.latency",
    "latency_table": "headprune.bench.latency_tables",
    "evaluate": "headprune.bench.quality",
    "evaluate_translation": "headprune.bench.translation",
    "shaped_batch": "headprune.bench.latency",
    "sizes": "headprune.bench.size",
    "translate": "headprune.bench.translation",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from headprune.bench.decoding import compare_decoding as compare_decoding
    from headprune.bench.latency import compare_latency as compare_latency
    from headprune.bench.latency import shaped_batch as shaped_batch
    from headprune.bench.latency_tables import latency_table as latency_table
    from headprune.bench.quality import evaluate as evaluate
    from headprune.bench.size import sizes as sizes
    from headprune.bench.translation import evaluate_translation as evaluate_translation
    from headprune.bench.translation import translate as translate
