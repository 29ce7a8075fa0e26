"""Layouts as text for tables: where the gate is, which tensors are cut, what else changes."""

from __future__ import annotations

import inspect
from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab

#: What a count attribute of a module counts.
_COUNTS = {
    "n_query_heads": "query heads",
    "n_kv_heads": "key/value heads",
    "group_size": "query heads per key/value head",
    "query_width": "width of all queries",
    "value_width": "width of all values",
}
#: What is on the axis of a slab.
_UNITS = {
    "query": "queries",
    "gated_query": "queries and their gates",
    "key": "keys",
    "value": "values",
    "context": "the heads' outputs",
    "head": "one number per head",
    "kv_head": "one number per key/value head",
}
_UNITS_OF_NEURONS = {"context": "the neurons", "head": "one number per neuron"}
#: The axis of a slab; other axes are numbers.
_AXES = {"out": "rows of ", "in": "columns of ", "list": "modules of "}


def slab_words(slab: HeadSlab, is_feed_forward: bool = False) -> str:
    """Describe one slab: what is cut, and what is on its axis.

    >>> slab_words(HeadSlab("qkv", "out", ("query", "key"), "grouped"))
    'rows of `qkv` (queries, keys; head by head)'
    """
    axis = _AXES.get(str(slab.axis), f"axis {slab.axis} of ")
    packing = ""
    if len(slab.units) > 1:  # several kinds of units on one axis: in which order
        packing = "; one after the other"
        if slab.packing == "grouped":
            packing = "; head by head"
    units = ", ".join(_UNITS[unit] for unit in slab.units)
    if is_feed_forward:
        units = ", ".join(_UNITS_OF_NEURONS[unit] for unit in slab.units)
    condition = " where there is one" if slab.optional else ""
    return f"{axis}`{slab.path}` ({units}{packing}){condition}"


def gate_words(layout: AttentionLayout) -> str:
    """Describe where the gates are."""
    return f"input of `{layout.gate}`" if layout.gate else "output of the module"


def patch_words(layout: AttentionLayout) -> list[str]:
    """Describe what a cut changes besides weights: attributes, and code.

    Code changes through ``adapt`` and ``exposed``.
    """
    words = []
    if layout.counts:
        counts = [f"`{path}` ({_COUNTS[count]})" for path, count in layout.counts]
        words.append(f"updated: {', '.join(counts)}")
    if layout.adapt is not None:
        words.append(_first_paragraph(layout.adapt))
    if layout.exposed is not None:
        words.append(_first_paragraph(layout.exposed))
    return words


def _first_paragraph(documented: Any) -> str:
    """The first paragraph of a docstring, on one line; else the name."""
    # The function inside a functools.partial has the docstring.
    text = inspect.getdoc(getattr(documented, "func", documented))
    if not text:
        text = str(getattr(documented, "__name__", ""))
    return " ".join(text.partition("\n\n")[0].split())
