"""A list of separate heads, `heads`, whose outputs side by side go through an output projection,
`proj`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import textbook_without_heads
from headprune.layouts._once import check_proved
from headprune.layouts._tiny import TinyModule

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def head_width(module: Any, projection: str) -> int:
    """The width of a head of a module that puts its heads' outputs side by side, and nothing
    else."""
    from torch.nn import ModuleList

    from headprune.layouts._proofs import is_concatenation, value_width

    listed = isinstance(module.heads, ModuleList) and len(module.heads) > 0
    through = f", through {projection!r}" if projection else ""
    must = f"the outputs of `heads`, each called with x, side by side{through}"
    check_proved(module, listed and is_concatenation(module, projection), must)
    return value_width(module.heads)


def kind(module: Any, name: str) -> Kind:
    """``causal`` where the heads hold a triangular mask."""
    return (
        "causal"
        if any("tril" in n or "mask" in n for n, _ in module.heads.named_buffers())
        else "self"
    )


LAYOUT = AttentionLayout(
    name="head_list",
    gate="proj",
    slabs=(HeadSlab("heads", "list", "query"), HeadSlab("proj", "in", "context")),
    head_dim=lambda module: head_width(module, "proj"),
    kind=kind,
    empty=textbook_without_heads("proj"),
    proves=True,
    families=(("list of heads", TinyModule("_tiny_textbook", "Projected")),),
)
