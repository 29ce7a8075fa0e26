"""Attention of "Dive into Deep Learning": `W_q`, `W_k`, `W_v`, `W_o`, masks by valid lengths.

Lazy projections must have run once. Code that only looks alike is refused: see ``_stand_in.py``.
"""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, separate_projections
from headprune.layouts._empty import textbook_without_heads
from headprune.layouts._once import check_proved, once
from headprune.layouts._tiny import TinyModule


@once
def _is_attention(module: Any) -> bool:
    """Return whether it computes scaled dot-product attention for any number of heads."""
    from headprune.layouts._proofs import is_attention, valid_lengths
    from headprune.layouts._stand_in import stand_in

    def build(n_heads: int, projections: Any) -> Any:
        children = dict(zip(("W_q", "W_k", "W_v", "W_o"), projections, strict=True))
        return stand_in(module, children, num_heads=n_heads)

    def call(small: Any, q: Any, k: Any, v: Any, valid_lens: Any) -> Any:
        return small.forward(q, k, v, valid_lens)

    return is_attention(module, build, call, forms=valid_lengths())


def _head_dim(module: Any) -> int:
    """Return the width of a head, or refuse code that computes something else."""
    must = (
        "scaled dot-product attention for any number of heads, called with (queries, keys, values,"
        " valid_lens)"
    )
    check_proved(module, _is_attention(module), must)
    return int(getattr(module.W_q, "out_features", 0)) // int(module.num_heads)


LAYOUT = AttentionLayout(
    name="d2l",
    gate="W_o",
    slabs=separate_projections("W_q", "W_k", "W_v", "W_o"),
    head_dim=_head_dim,
    requires=("num_heads", "attention.dropout"),
    absent=("n_heads",),  # the layout multi_head_attention
    counts=(("num_heads", "n_query_heads"),),
    # Examples and heads share an axis there, so without heads it is empty.
    empty=textbook_without_heads(
        "W_o", "attention.attention_weights", ("heads", "queries", "keys")
    ),
    proves=True,
    families=(("d2l", TinyModule("_tiny_textbook", "D2l")),),
)
