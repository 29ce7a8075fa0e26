"""A list of separate `heads`; their concatenated outputs pass an output projection, `proj`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import textbook_without_heads
from headprune.layouts._once import check_proved
from headprune.layouts._tiny import TinyModule

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def head_width(module: Any, projection: str) -> int:
    """Return the width of a head; refuse modules that do more than concatenate their heads.

    Args:
        module: The module with ``heads``.
        projection: Name of the output projection; empty where there is none.
    """
    from torch.nn import ModuleList

    from headprune.layouts._proofs import is_concatenation, value_width

    listed = isinstance(module.heads, ModuleList) and len(module.heads) > 0
    through = f", through {projection!r}" if projection else ""
    must = f"the outputs of `heads`, each called with x, side by side{through}"
    check_proved(module, listed and is_concatenation(module, projection), must)
    return value_width(module.heads)


def kind(module: Any, name: str) -> Kind:
    """Return ``causal`` where the heads hold a triangular mask."""
    # Nothing else shows it: the mask is the usual way to write such heads.
    for name, _ in module.heads.named_buffers():
        if "tril" in name or "mask" in name:
            return "causal"
    return "self"


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
