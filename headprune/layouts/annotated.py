"""The attention of "The Annotated Transformer": four `linears`, the last of which is the output projection."""

from __future__ import annotations

from typing import Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import mix_in
from headprune.layouts._tiny import TinyModule


def _head_dim(module: Any) -> int:
    """The width of a head of a module that computes scaled dot-product attention for any number of heads."""
    from torch.nn import ModuleList

    from headprune.layouts._stand_in import stand_in
    from headprune.layouts._textbook import WIDTH, is_attention

    proved = (
        isinstance(module.linears, ModuleList)
        and len(module.linears) == 4
        and is_attention(
            module,
            lambda n, ways: stand_in(module, {"linears": ModuleList(ways)}, h=n, d_k=WIDTH),
            lambda small, q, k, v: small.forward(q, k, v, None),
        )
    )
    if not proved or "forward" in module.__dict__:
        must = "scaled dot-product attention for any number of heads, called with (query, key, value, mask)"
        raise UnsupportedModel(f"{type(module).__name__}.forward", must, "something else")
    return int(module.d_k)


def _without_heads(module: Any) -> None:
    from headprune.layouts._textbook import WithoutHeads

    mix_in(module, WithoutHeads)
    module.headprune_gate = "linears.3"


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
    empty=_without_heads,
    families=(("annotated transformer", TinyModule("_textbook", "Annotated")),),
)
