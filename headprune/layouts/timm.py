"""timm's `Attention` and `AttentionRope`: `qkv`, or `q_proj`, `k_proj`, `v_proj`; `gate`; `proj`.

Newer code takes the heads' total width from ``attn_dim``. Older code takes it from its input, which
is wrong after a cut. Such a module continues with headprune's ``forward``, if its class computes
timm's plain attention. Other code (EVA's, BEiT's, Swin's) and norms across heads are refused.
"""

from __future__ import annotations

import inspect
from typing import Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import mix_in, original_class
from headprune.layouts._tiny import TinyModule


def _head_dim(module: Any) -> int:
    """Return the width of a head; refuse older code that ``Plain`` cannot replace."""
    from headprune.layouts._timm import is_plain

    if not _is_older(module):
        return int(module.head_dim)
    kind: Any = original_class(module)
    usual = {"self", "x", "attn_mask", "is_causal"}
    arguments = set(inspect.signature(kind.forward).parameters) - usual
    if arguments or not hasattr(module, "qkv") or not is_plain(module):
        must = "timm's plain attention, because the heads' total width is no attribute 'attn_dim'"
        got = "one that computes something else"
        if arguments:
            got = f"one that takes {', '.join(sorted(arguments))}"
        raise UnsupportedModel(f"{kind.__name__}.forward", must, got)
    return int(getattr(module.qkv, "out_features", 0)) // 3 // int(module.num_heads)


def _adapt(module: Any, model: Any) -> None:
    """Replace older code, which takes the heads' total width from its input."""
    from headprune.layouts._timm import Plain

    if _is_older(module):
        mix_in(module, Plain)


def _is_older(module: Any) -> bool:
    return not hasattr(module, "attn_dim")


LAYOUT = AttentionLayout(
    name="timm",
    gate="proj",
    slabs=(
        HeadSlab("qkv", "out", ("query", "key", "value"), optional=True),
        HeadSlab("q_proj", "out", "query", optional=True),
        HeadSlab("k_proj", "out", "key", optional=True),
        HeadSlab("v_proj", "out", "value", optional=True),
        # Multiplies the output projection's input.
        HeadSlab("gate", "out", "query", optional=True),
        HeadSlab("proj", "in", "context"),
    ),
    head_dim=_head_dim,
    requires=("num_heads", "scale", "attn_drop", "proj_drop"),
    absent=("norm.eps", "norm.normalized_shape"),  # a norm across heads
    per_head=("q_norm", "k_norm"),
    counts=(
        ("num_heads", "n_query_heads"),
        ("num_kv_heads", "n_kv_heads"),
        ("num_kv_groups", "group_size"),
        ("attn_dim", "query_width"),
    ),
    policies=("group", "balanced"),
    adapt=_adapt,
    proves=_is_older,
    families=(
        ("timm.Attention", TinyModule("_tiny_timm", "Attention")),
        ("timm.Attention before 1.0.24", TinyModule("_tiny_timm", "OlderAttention")),
        ("timm.AttentionRope", TinyModule("_tiny_timm", "AttentionRope")),
    ),
)
