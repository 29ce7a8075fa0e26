"""Layouts in words: where the gate is, which tensors are cut, what else a cut changes. For tables,
not for code."""

from __future__ import annotations

import inspect
from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab

_COUNTS = {
    "n_query_heads": "query heads",
    "n_kv_heads": "key/value heads",
    "group_size": "query heads a key/value head",
    "query_width": "width of all queries",
    "value_width": "width of all values",
}
_UNITS = {
    "query": "queries",
    "gated_query": "queries and their gates",
    "key": "keys",
    "value": "values",
    "context": "the heads' outputs",
    "head": "one number a head",
    "kv_head": "one number a key/value head",
}


def slab_words(slab: HeadSlab) -> str:
    """One slab: what is cut, and what lies on it.

    >>> slab_words(HeadSlab("qkv", "out", ("query", "key"), "grouped"))
    'rows of `qkv` (queries, keys; head by head)'
    """
    axis = {"out": "rows of ", "in": "columns of ", "list": "modules of "}.get(
        str(slab.axis), f"axis {slab.axis} of "
    )
    packing = ""
    if len(slab.units) > 1:
        packing = "; head by head" if slab.packing == "grouped" else "; one after the other"
    some = " where there is one" if slab.optional else ""
    return f"{axis}`{slab.path}` ({', '.join(_UNITS[u] for u in slab.units)}{packing}){some}"


def gate_words(layout: AttentionLayout) -> str:
    """Where the gates are."""
    return f"input of `{layout.gate}`" if layout.gate else "output of the module"


def patch_words(layout: AttentionLayout) -> list[str]:
    """Everything a cut changes besides weights: attributes, and code through ``adapt`` and
    ``exposed``."""
    counts = [f"`{path}` ({_COUNTS[count]})" for path, count in layout.counts]
    found = [f"kept true: {', '.join(counts)}"] if counts else []
    found += [_first(layout.adapt)] if layout.adapt is not None else []
    return found + ([_first(layout.exposed)] if layout.exposed is not None else [])


def _first(documented: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    text = inspect.getdoc(getattr(documented, "func", documented)) or str(
        getattr(documented, "__name__", "")
    )
    return " ".join(text.partition("\n\n")[0].split())
