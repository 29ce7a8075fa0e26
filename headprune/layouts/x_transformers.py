"""x-transformers' `Attention`: `to_q to_k to_v to_out`; query head h shares key/value head h mod
kv_heads.

Only the policy ``group`` is allowed: its code finds a query head's key/value head by the place the
query head is in, h mod kv_heads, which goes on to hold only where whole groups leave.

Its kind is ``causal`` by its own flag and ``self`` otherwise: cross-attention is the same module
with a context. What passes from one layer's heads to another's (value residuals, residual
attention) and biases for all heads that a parent hands out (ALiBi, relative positions) are refused,
as are latents, talking heads and gates over several heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._tiny import TinyModule

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def _head_dim(module: Any) -> int:
    if module.rotate_num_heads != module.heads:
        raise UnsupportedModel(
            type(module).__name__,
            "one that rotates all heads",
            f"{module.rotate_num_heads} of them",
        )
    return int(module.to_q.weight.shape[0]) // int(module.heads)


def _kind(module: Any, name: str) -> Kind:
    return "causal" if module.causal else "self"


def _adapt(module: Any, model: Any) -> None:
    """Rebuilds the split into heads; refuses parents that hand scores, values or biases from heads
    to heads."""
    for name, parent in model.named_modules():
        shared = [
            a
            for a in ("rel_pos", "residual_attn", "cross_residual_attn", "add_value_residual")
            if _on(parent, a)
        ]
        if shared and any(part is module for part in parent.modules()):
            where = name or type(parent).__name__
            raise UnsupportedModel(
                where, "one whose layers share nothing between heads", f"{', '.join(shared)}"
            )
    old = module.split_q_heads
    module.split_q_heads = type(old)(old.pattern, **{**old.axes_lengths, "h": module.heads})


def _on(parent: Any, attribute: str) -> bool:
    found = getattr(parent, attribute, None)
    return found is not None and found is not False


LAYOUT = AttentionLayout(
    name="x_transformers",
    gate="to_out",
    slabs=(
        HeadSlab("to_q", "out", "query"),
        HeadSlab("to_k", "out", "key"),
        HeadSlab("to_v", "out", "value"),
        HeadSlab("to_out", "in", "context"),
        HeadSlab("to_v_head_gate", "out", "head", optional=True),
        HeadSlab("head_scale_params", 1, "head", optional=True),
        HeadSlab("q_rmsnorm.gamma", 0, "head", optional=True),
        HeadSlab("k_rmsnorm.gamma", 0, "kv_head", optional=True),
        HeadSlab("value_rmsnorm.gamma", 0, "kv_head", optional=True),
        HeadSlab("attend.head_attn_sink", 0, "head", optional=True),
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
