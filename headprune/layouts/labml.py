"""labml.ai's attention: sequence first; `query`, `key`, `value` each project and split into heads;
`output`."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import textbook_without_heads
from headprune.layouts._once import check_proved, once
from headprune.layouts._tiny import TinyModule

_WAYS = ("query", "key", "value")


@once
def _is_attention(module: Any) -> bool:
    """Whether it computes scaled dot-product attention for any number of heads."""
    from torch.nn import Module

    from headprune.layouts._proofs import WIDTH, is_attention, seen
    from headprune.layouts._stand_in import stand_in

    def build(n: int, ways: Any) -> Any:
        made = {
            name: stand_in(getattr(module, name), {"linear": way}, heads=n, d_k=WIDTH)
            for name, way in zip(_WAYS, ways, strict=False)
        }
        return stand_in(module, {**made, "output": ways[3]}, heads=n, d_k=WIDTH, scale=WIDTH**-0.5)

    def call(small: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        rows = dict(zip(_WAYS, (x.transpose(0, 1) for x in (q, k, v)), strict=True))
        masked = {} if mask is None else {"mask": mask}
        return small.forward(**rows, **masked).transpose(0, 1)

    parts = [getattr(module, name) for name in _WAYS]
    split = all(isinstance(part, Module) and hasattr(part, "linear") for part in parts)
    forms = [mask.permute(1, 2, 0) for mask in seen()]  # [queries, keys, examples]
    return split and is_attention(module, build, call, forms=forms)


def _head_dim(module: Any) -> int:
    """The width of a head, once the module has proved what it computes."""
    must = (
        "scaled dot-product attention for any number of heads, called with query=, key=, value=,"
        " sequence first"
    )
    check_proved(module, _is_attention(module), must)
    return int(module.d_k)


LAYOUT = AttentionLayout(
    name="labml",
    gate="output",
    slabs=(
        HeadSlab("query.linear", "out", "query"),
        HeadSlab("key.linear", "out", "key"),
        HeadSlab("value.linear", "out", "value"),
        HeadSlab("output", "in", "context"),
    ),
    head_dim=_head_dim,
    requires=("heads", "d_k", "scale", "query.heads", "key.heads", "value.heads"),
    counts=tuple((f"{path}heads", "n_query_heads") for path in ("", "query.", "key.", "value.")),
    batch_axis=1,
    empty=textbook_without_heads(
        "output", "attn", ("queries", "keys", "batch", "heads"), batch_axis=1
    ),
    proves=True,
    families=(("labml", TinyModule("_tiny_textbook", "Prepared")),),
)
