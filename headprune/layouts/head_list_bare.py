"""A list of separate `heads`; their concatenated outputs are the module's, without a projection."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import mix_in
from headprune.layouts._tiny import TinyModule
from headprune.layouts.head_list import head_width, kind


def _adapt(module: Any, model: Any) -> None:
    """Put zeros where removed heads had their outputs, which keeps the module's width."""
    from headprune.layouts._textbook import Placed

    mix_in(module, Placed)


LAYOUT = AttentionLayout(
    name="head_list_bare",
    gate="",  # the module's own output is gated
    slabs=(HeadSlab("heads", "list", "query"),),
    head_dim=lambda module: head_width(module, ""),
    kind=kind,
    absent=("proj",),  # the layout head_list
    adapt=_adapt,
    proves=True,
    families=(("list of heads without output", TinyModule("_tiny_textbook", "SideBySide")),),
)
