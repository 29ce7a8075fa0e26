"""Attention of "The Annotated Transformer": four `linears`; the last is the output projection."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, separate_projections
from headprune.layouts._empty import textbook_without_heads
from headprune.layouts._once import check_proved, once
from headprune.layouts._tiny import TinyModule


@once
def _is_attention(module: Any) -> bool:
    """Return whether it computes scaled dot-product attention for any number of heads."""
    from torch.nn import ModuleList

    from headprune.layouts._proofs import HEAD_DIM, is_attention, visible_keys
    from headprune.layouts._stand_in import stand_in

    def build(n_heads: int, projections: Any) -> Any:
        children = {"linears": ModuleList(projections)}
        return stand_in(module, children, h=n_heads, d_k=HEAD_DIM)

    def call(small: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return small.forward(q, k, v, mask)

    # Other code may have more projections, or none that are modules.
    if not isinstance(module.linears, ModuleList) or len(module.linears) != 4:
        return False
    return is_attention(module, build, call, forms=visible_keys())


def _head_dim(module: Any) -> int:
    """Return the width of a head, or refuse code that computes something else."""
    must = (
        "scaled dot-product attention for any number of heads, called with (query, key, value,"
        " mask)"
    )
    check_proved(module, _is_attention(module), must)
    return int(module.d_k)


LAYOUT = AttentionLayout(
    name="annotated",
    gate="linears.3",
    slabs=separate_projections("linears.0", "linears.1", "linears.2", "linears.3"),
    head_dim=_head_dim,
    requires=("h", "d_k"),
    counts=(("h", "n_query_heads"),),
    # Its code keeps its attention weights in ``attn``.
    empty=textbook_without_heads("linears.3", "attn", ("batch", "heads", "queries", "keys")),
    proves=True,
    families=(("annotated transformer", TinyModule("_tiny_textbook", "Annotated")),),
)
