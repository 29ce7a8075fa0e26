"""`torch.nn.MultiheadAttention` with all options, alone and in PyTorch's transformer layers.

PyTorch's code never calls the output projection: it passes the weight to a function or, in an
encoder layer, everything to one native operation. ``Exposed`` calls it, also in encoder layers.
Causality is an argument of a call, so the kind is ``self`` even in a decoder. It is ``cross`` by
name or by keys of another width. A cut module returns the attention weights of its kept heads, or
their average.
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
    """Put in front of ``nn.MultiheadAttention``: call its output projection as a module."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # An encoder layer asks for this before it runs its native operation.
        return False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from headprune.layouts._torch_multi_head import attend

        return attend(self, *args, **kwargs)


def _head_dim(module: Any) -> int:
    """Return the width of a head; refuse subclasses whose code ``Exposed`` would hide."""
    from torch.nn import MultiheadAttention

    kind = original_class(module)
    if getattr(kind, "forward", None) is not MultiheadAttention.forward or has_own_forward(module):
        hint = "Describe it with a layout of your own whose 'exposed' computes the same."
        raise UnsupportedModel(
            f"{kind.__name__}.forward", "that of torch.nn.MultiheadAttention", "another one", hint
        )
    return int(module.head_dim)


def _kind(module: Any, name: str) -> Kind:
    attribute = name.rpartition(".")[2]
    # Keys or values of another width come from elsewhere.
    if (module.kdim, module.vdim) != (module.embed_dim, module.embed_dim):
        return "cross"
    # The names in PyTorch's and fairseq's decoder layers.
    if "cross" in attribute or attribute in ("multihead_attn", "encoder_attn"):
        return "cross"
    return "self"


def _projections(module: Any) -> tuple[int, int]:
    """Return multiply-adds per query token and per key token to project them."""
    return module.head_dim * module.embed_dim, module.head_dim * (module.kdim + module.vdim)


LAYOUT = AttentionLayout(
    name="torch_multi_head",
    gate="out_proj",
    slabs=(
        # One fused tensor, or three separate ones.
        HeadSlab("in_proj_weight", 0, ("query", "key", "value"), optional=True),
        HeadSlab("q_proj_weight", 0, "query", optional=True),
        HeadSlab("k_proj_weight", 0, "key", optional=True),
        HeadSlab("v_proj_weight", 0, "value", optional=True),
        HeadSlab("in_proj_bias", 0, ("query", "key", "value"), optional=True),
        # An added key and value, [1, 1, width].
        HeadSlab("bias_k", 2, "key", optional=True),
        HeadSlab("bias_v", 2, "value", optional=True),
        HeadSlab("out_proj", "in", "context"),
    ),
    head_dim=_head_dim,
    kind=_kind,
    requires=("num_heads", "_qkv_same_embed_dim", "batch_first", "add_zero_attn", "kdim", "vdim"),
    counts=(("num_heads", "n_query_heads"),),
    products=_projections,  # bare tensors and no modules, so nothing else counts them
    exposed=Exposed,
    families=(
        ("torch.nn.MultiheadAttention", TinyModule("_tiny_torch_multi_head", "Mixed")),
        ("torch.nn.TransformerEncoder", TinyModule("_tiny_torch_multi_head", "EncoderLayers")),
        ("torch.nn.TransformerDecoder", TinyModule("_tiny_torch_multi_head", "Decoder")),
    ),
)
