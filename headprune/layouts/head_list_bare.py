"""A list of separate heads, `heads`, whose outputs side by side are the module's: there is no
output projection."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import mix_in
from headprune.layouts._tiny import TinyModule
from headprune.layouts.head_list import head_width, kind


def _adapt(module: Any, model: Any) -> None:
    """Puts zeros where the heads that left had their outputs, so that the module's width stays."""
    from headprune.layouts._textbook import Placed

    mix_in(module, Placed)


LAYOUT = AttentionLayout(
    name="head_list_bare",
    gate="",
    slabs=(HeadSlab("heads", "list", "query"),),
    head_dim=lambda module: head_width(module, ""),
    kind=kind,
    absent=("proj",),
    adapt=_adapt,
    proves=True,
    families=(("list of heads without output", TinyModule("_tiny_textbook", "SideBySide")),),
)
