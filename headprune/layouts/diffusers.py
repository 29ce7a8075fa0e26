"""diffusers' `Attention`: `to_q`, `to_k`, `to_v`, `to_out.0`, computed by its processor.

Users can exchange the processor. So it must prove on a small stand-in that it computes scaled
dot-product attention for any number of heads. Joint attention (`add_k_proj`) and norms across heads
are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, separate_projections
from headprune.layouts._once import once
from headprune.layouts._tiny import TinyModule

if TYPE_CHECKING:
    from headprune.core.heads import Kind

#: Parts that a stand-in leaves out: they change the input, or each head by itself.
_NORMS = ("spatial_norm", "group_norm", "norm_q", "norm_k", "norm_cross")


@once
def _is_attention(module: Any) -> bool:
    """Return whether its processor computes scaled dot-product attention."""
    from torch.nn import Dropout, ModuleList

    from headprune.layouts._proofs import HEAD_DIM, is_attention, score_bias, visible_keys
    from headprune.layouts._stand_in import stand_in

    def build(n_heads: int, projections: Any) -> Any:
        query, key, value, out = projections
        parts = {
            "to_q": query,
            "to_k": key,
            "to_v": value,
            "to_out": ModuleList([out, Dropout(0.0)]),
        }
        parts |= {name: None for name in _NORMS if name in module._modules}
        return stand_in(
            module,
            parts,
            heads=n_heads,
            sliceable_head_dim=n_heads,
            inner_dim=n_heads * HEAD_DIM,
            inner_kv_dim=n_heads * HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            # Neither depends on the heads.
            residual_connection=False,
            rescale_output_factor=1.0,
        )

    def call(small: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        # Some processors do not take a mask.
        masked = {} if mask is None else {"attention_mask": mask}
        return small.forward(q, encoder_hidden_states=k, **masked)

    forms = map(score_bias, visible_keys())
    return is_attention(module, build, call, values_are_keys=True, forms=forms)


def _head_dim(module: Any) -> int:
    """Return the width of a head, or refuse a processor that computes something else."""
    if not _is_attention(module):
        must = "scaled dot-product attention for any number of heads by its processor"
        raise UnsupportedModel(type(module).__name__, must, type(module.processor).__name__)
    return int(getattr(module.to_q, "out_features", 0)) // int(module.heads)


def _kind(module: Any, name: str) -> Kind:
    return "cross" if module.is_cross_attention else "self"


LAYOUT = AttentionLayout(
    name="diffusers",
    gate="to_out.0",
    slabs=separate_projections("to_q", "to_k", "to_v", "to_out.0"),
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
