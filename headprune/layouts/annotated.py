"""The attention of "The Annotated Transformer": four `linears`, the last of which is the output
projection."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import textbook_without_heads
from headprune.layouts._once import check_proved, once
from headprune.layouts._tiny import TinyModule


@once
def _is_attention(module: Any) -> bool:
    """Whether it computes scaled dot-product attention for any number of heads."""
    from torch.nn import ModuleList

    from headprune.layouts._proofs import WIDTH, is_attention, seen
    from headprune.layouts._stand_in import stand_in

    return (
        isinstance(module.linears, ModuleList)
        and len(module.linears) == 4
        and is_attention(
            module,
            lambda n, ways: stand_in(module, {"linears": ModuleList(ways)}, h=n, d_k=WIDTH),
            lambda small, q, k, v, mask: small.forward(q, k, v, mask),
            forms=seen(),
        )
    )


def _head_dim(module: Any) -> int:
    """The width of a head, once the module has proved what it computes."""
    must = (
        "scaled dot-product attention for any number of heads, called with (query, key, value,"
        " mask)"
    )
    check_proved(module, _is_attention(module), must)
    return int(module.d_k)


LAYOUT = AttentionLayout(
    name="annotated",
    gate="linears.3",
    slabs=(
        HeadSlab("linears.0", "out", "query"),
        HeadSlab("linears.1", "out", "key"),
        HeadSlab("linears.2", "out", "value"),
        HeadSlab("linears.3", "in", "context"),
    ),
    head_dim=_head_dim,
    requires=("h", "d_k"),
    counts=(("h", "n_query_heads"),),
    empty=textbook_without_heads("linears.3", "attn", ("batch", "heads", "queries", "keys")),
    proves=True,
    families=(("annotated transformer", TinyModule("_tiny_textbook", "Annotated")),),
)
