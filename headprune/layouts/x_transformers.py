"""x-transformers' `Attention`: `to_q`, `to_k`, `to_v`, `to_out`; interleaved key/value heads.

Query head h reads key/value head h mod kv_heads. That still holds after a cut only if whole groups
are removed, so the only policy is ``group``.

The kind is ``causal`` by the module's flag and ``self`` otherwise: cross-attention is the same
module with a context. Refused are values and scores that pass between layers (value residuals,
residual attention), biases of all heads from a parent (ALiBi, relative positions), latents, talking
heads and gates over several heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, HeadSlab, separate_projections
from headprune.layouts._tiny import TinyModule

if TYPE_CHECKING:
    from headprune.core.heads import Kind


#: Options of a parent with which heads of several layers depend on each other.
_SHARED = ("rel_pos", "residual_attn", "cross_residual_attn", "add_value_residual")


def _head_dim(module: Any) -> int:
    """Return the width of a head; refuse modules that rotate only the first heads."""
    if module.rotate_num_heads != module.heads:
        got = f"{module.rotate_num_heads} of them"
        raise UnsupportedModel(type(module).__name__, "one that rotates all heads", got)
    return int(module.to_q.weight.shape[0]) // int(module.heads)


def _kind(module: Any, name: str) -> Kind:
    return "causal" if module.causal else "self"


def _adapt(module: Any, model: Any) -> None:
    """Rebuild the split into heads; refuse parents that share scores, values or biases of heads."""
    for name, parent in model.named_modules():
        shared = [option for option in _SHARED if _is_on(parent, option)]
        if shared and any(part is module for part in parent.modules()):
            where = name or type(parent).__name__
            must = "one whose layers share nothing between heads"
            raise UnsupportedModel(where, must, ", ".join(shared))
    # An einops layer with the number of heads in its pattern.
    old = module.split_q_heads
    module.split_q_heads = type(old)(old.pattern, **{**old.axes_lengths, "h": module.heads})


def _is_on(parent: Any, option: str) -> bool:
    """Return whether an option is set; a module counts as set."""
    value = getattr(parent, option, None)
    return value is not None and value is not False


LAYOUT = AttentionLayout(
    name="x_transformers",
    gate="to_out",
    slabs=(
        *separate_projections("to_q", "to_k", "to_v", "to_out"),
        # Options with a row, an entry or an axis per head.
        HeadSlab("to_v_head_gate", "out", "head", optional=True),
        HeadSlab("head_scale_params", 1, "head", optional=True),
        HeadSlab("q_rmsnorm.gamma", 0, "head", optional=True),
        HeadSlab("k_rmsnorm.gamma", 0, "kv_head", optional=True),
        HeadSlab("value_rmsnorm.gamma", 0, "kv_head", optional=True),
        HeadSlab("attend.head_attn_sink", 0, "head", optional=True),
        # Learned keys and values, [kv_heads, memories, width].
        HeadSlab("mem_k", 0, "kv_head", optional=True),
        HeadSlab("mem_v", 0, "kv_head", optional=True),
        HeadSlab("qk_norm_q_scale", 0, "head", optional=True),
        HeadSlab("qk_norm_k_scale", 0, "kv_head", optional=True),
    ),
    head_dim=_head_dim,
    value_dim=lambda module: int(module.to_v.weight.shape[0]) // int(module.kv_heads),
    kind=_kind,
    requires=(
        "heads",
        "kv_heads",
        "groups",
        "rotate_num_heads",
        "split_q_heads.axes_lengths",
        "attend",
    ),
    absent=(
        # Latents, hybrid modules, and projections that mix several heads.
        "use_latent_q",
        "use_latent_kv",
        "attn_on_attn",
        "hybrid_module",
        "orthog_projected_values",
        "orthog_projected_values_per_head",
        "attend.selective",  # one head's scores mask all heads
        "attend.cope",
    ),
    counts=(
        ("heads", "n_query_heads"),
        ("kv_heads", "n_kv_heads"),
        ("groups", "group_size"),
        ("rotate_num_heads", "n_query_heads"),
    ),
    grouping="interleaved",
    adapt=_adapt,
    empty="refuse",
    families=(
        ("x_transformers.Encoder", TinyModule("_tiny_x_transformers", "Encoder")),
        ("x_transformers.Decoder", TinyModule("_tiny_x_transformers", "Decoder")),
    ),
)
