"""Measurements: size, speed and quality of a pruned model and of the original."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprune.core.lazy import lazy

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
__getattr__, __dir__ = lazy(__name__, _HOME)

if TYPE_CHECKING:
    from headprune.bench.decoding import compare_decoding as compare_decoding
    from headprune.bench.latency import compare_latency as compare_latency
    from headprune.bench.latency import shaped_batch as shaped_batch
    from headprune.bench.latency_tables import latency_table as latency_table
    from headprune.bench.quality import evaluate as evaluate
    from headprune.bench.size import sizes as sizes
    from headprune.bench.translation import evaluate_translation as evaluate_translation
    from headprune.bench.translation import translate as translate
