"""diffusers' `Attention`: `to_q to_k to_v to_out.0`, computed by a processor that the module holds.

The processor is code that can be exchanged, so it is proved: on a small stand-in it must compute
scaled dot-product attention for any number of heads. Joint attention (`add_k_proj`) and norms
across heads are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._once import once
from headprune.layouts._tiny import TinyModule

if TYPE_CHECKING:
    from headprune.core.heads import Kind

_NORMS = ("spatial_norm", "group_norm", "norm_q", "norm_k", "norm_cross")


@once
def _is_attention(module: Any) -> bool:
    """Whether its processor computes scaled dot-product attention for any number of heads."""
    from torch.nn import Dropout, ModuleList

    from headprune.layouts._proofs import WIDTH, added, is_attention, seen
    from headprune.layouts._stand_in import stand_in

    def build(n: int, ways: Any) -> Any:
        parts = dict(zip(("to_q", "to_k", "to_v"), ways, strict=False))
        parts |= {"to_out": ModuleList([ways[3], Dropout(0.0)])} | {
            k: None for k in _NORMS if k in module._modules
        }
        sizes = {
            "heads": n,
            "sliceable_head_dim": n,
            "inner_dim": n * WIDTH,
            "inner_kv_dim": n * WIDTH,
        }
        return stand_in(
            module,
            parts,
            **sizes,
            scale=WIDTH**-0.5,
            residual_connection=False,
            rescale_output_factor=1.0,
        )

    def call(small: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        masked = {} if mask is None else {"attention_mask": mask}
        return small.forward(q, encoder_hidden_states=k, **masked)

    return is_attention(module, build, call, values_are_keys=True, forms=map(added, seen()))


def _head_dim(module: Any) -> int:
    """The width of a head, once the module has proved what it computes."""
    if not _is_attention(module):
        must = "scaled dot-product attention for any number of heads by its processor"
        raise UnsupportedModel(type(module).__name__, must, type(module.processor).__name__)
    return int(getattr(module.to_q, "out_features", 0)) // int(module.heads)


def _kind(module: Any, name: str) -> Kind:
    return "cross" if module.is_cross_attention else "self"


LAYOUT = AttentionLayout(
    name="diffusers",
    gate="to_out.0",
    slabs=(
        HeadSlab("to_q", "out", "query"),
        HeadSlab("to_k", "out", "key"),
        HeadSlab("to_v", "out", "value"),
        HeadSlab("to_out.0", "in", "context"),
    ),
    head_dim=_head_dim,
    kind=_kind,
    requires=("heads", "processor", "inner_dim", "is_cross_attention", "rescale_output_factor"),
    untouched=("spatial_norm", "group_norm", "norm_cross"),
    per_head=("norm_q", "norm_k"),
    counts=(
        ("heads", "n_query_heads"),
        ("sliceable_head_dim", "n_query_heads"),
        ("inner_dim", "query_width"),
        ("inner_kv_dim", "query_width"),
    ),
    empty="refuse",  # processors divide by the number of heads
    proves=True,
    families=(("diffusers-style", TinyModule("_tiny_textbook", "Processed")),),
)
