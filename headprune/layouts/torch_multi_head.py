"""`torch.nn.MultiheadAttention`, alone and in PyTorch's transformer layers, with all of its
options.

PyTorch's code hands the output projection's weight to a function or, in an encoder layer,
everything to one native operation; neither calls the projection. ``Exposed`` does, and takes the
layer off the native operation. Causality is an argument of a call, so the kind is ``self`` also in
a decoder, and ``cross`` by name or by keys of another width. Weights that a cut module returns are
of the heads that are left; averaged, of those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import Mixin, has_own_forward, original_class
from headprune.layouts._tiny import TinyModule

if TYPE_CHECKING:
    from headprune.core.heads import Kind


class Exposed(Mixin):
    """Put in front of ``nn.MultiheadAttention``: the same attention, with its output projection
    called as a module."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        return False  # what an encoder layer asks before it takes its native operation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from headprune.layouts._torch_multi_head import attend

        return attend(self, *args, **kwargs)


def _head_dim(module: Any) -> int:
    """The width of a head of a module that runs PyTorch's own code: no other code can be replaced
    by ours."""
    from torch.nn import MultiheadAttention

    kind = original_class(module)
    if getattr(kind, "forward", None) is not MultiheadAttention.forward or has_own_forward(module):
        hint = "Describe it with a layout of your own whose 'exposed' computes the same."
        raise UnsupportedModel(
            f"{kind.__name__}.forward", "that of torch.nn.MultiheadAttention", "another one", hint
        )
    return int(module.head_dim)


def _kind(module: Any, name: str) -> Kind:
    called = name.rpartition(".")[2]
    elsewhere = (module.kdim, module.vdim) != (module.embed_dim, module.embed_dim)
    return (
        "cross"
        if elsewhere or "cross" in called or called in ("multihead_attn", "encoder_attn")
        else "self"
    )


def _projecting(module: Any) -> tuple[int, int]:
    return module.head_dim * module.embed_dim, module.head_dim * (module.kdim + module.vdim)


LAYOUT = AttentionLayout(
    name="torch_multi_head",
    gate="out_proj",
    slabs=(
        HeadSlab("in_proj_weight", 0, ("query", "key", "value"), optional=True),
        HeadSlab("q_proj_weight", 0, "query", optional=True),
        HeadSlab("k_proj_weight", 0, "key", optional=True),
        HeadSlab("v_proj_weight", 0, "value", optional=True),
        HeadSlab("in_proj_bias", 0, ("query", "key", "value"), optional=True),
        HeadSlab("bias_k", 2, "key", optional=True),
        HeadSlab("bias_v", 2, "value", optional=True),
        HeadSlab("out_proj", "in", "context"),
    ),
    head_dim=_head_dim,
    kind=_kind,
    requires=("num_heads", "_qkv_same_embed_dim", "batch_first", "add_zero_attn", "kdim", "vdim"),
    counts=(("num_heads", "n_query_heads"),),
    products=_projecting,  # the projections of the input are no modules
    exposed=Exposed,
    families=(
        ("torch.nn.MultiheadAttention", TinyModule("_tiny_torch_multi_head", "Mixed")),
        ("torch.nn.TransformerEncoder", TinyModule("_tiny_torch_multi_head", "Encoder")),
        ("torch.nn.TransformerDecoder", TinyModule("_tiny_torch_multi_head", "Decoder")),
    ),
)
