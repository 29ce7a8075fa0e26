"""labml.ai's attention: sequence first; `query`, `key`, `value` project and split into heads."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, separate_projections
from headprune.layouts._empty import textbook_without_heads
from headprune.layouts._once import check_proved, once
from headprune.layouts._tiny import TinyModule

_INPUTS = ("query", "key", "value")


@once
def _is_attention(module: Any) -> bool:
    """Return whether it computes scaled dot-product attention for any number of heads."""
    from torch.nn import Module

    from headprune.layouts._proofs import HEAD_DIM, is_attention, visible_keys
    from headprune.layouts._stand_in import stand_in

    def build(n_heads: int, projections: Any) -> Any:
        children = {"output": projections[3]}
        for name, projection in zip(_INPUTS, projections[:3], strict=True):
            part = getattr(module, name)
            children[name] = stand_in(part, {"linear": projection}, heads=n_heads, d_k=HEAD_DIM)
        return stand_in(module, children, heads=n_heads, d_k=HEAD_DIM, scale=HEAD_DIM**-0.5)

    def call(small: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        # [batch, length, width] -> [length, batch, width]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        # Some versions do not take a mask.
        masked = {} if mask is None else {"mask": mask}
        return small.forward(query=q, key=k, value=v, **masked).transpose(0, 1)

    for name in _INPUTS:
        part = getattr(module, name)
        if not isinstance(part, Module) or not hasattr(part, "linear"):
            return False
    forms = [mask.permute(1, 2, 0) for mask in visible_keys()]  # [queries, keys, examples]
    return is_attention(module, build, call, forms=forms)


def _head_dim(module: Any) -> int:
    """Return the width of a head, or refuse code that computes something else."""
    must = (
        "scaled dot-product attention for any number of heads, called with query=, key=, value=,"
        " sequence first"
    )
    check_proved(module, _is_attention(module), must)
    return int(module.d_k)


LAYOUT = AttentionLayout(
    name="labml",
    gate="output",
    slabs=separate_projections("query.linear", "key.linear", "value.linear", "output"),
    head_dim=_head_dim,
    requires=("heads", "d_k", "scale", "query.heads", "key.heads", "value.heads"),
    # Its parts split into heads by counts of their own.
    counts=(
        ("heads", "n_query_heads"),
        ("query.heads", "n_query_heads"),
        ("key.heads", "n_query_heads"),
        ("value.heads", "n_query_heads"),
    ),
    batch_axis=1,  # sequence first
    empty=textbook_without_heads(
        "output", "attn", ("queries", "keys", "batch", "heads"), batch_axis=1
    ),
    proves=True,
    families=(("labml", TinyModule("_tiny_textbook", "Prepared")),),
)
