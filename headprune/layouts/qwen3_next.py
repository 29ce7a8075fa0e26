"""Qwen3-Next's full attention: `q_proj` holds a query and a gate per head.

Its layers with linear attention are not sites.
"""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._grouped import GROUPED, SIZES, repeat_keys, without_heads
from headprune.layouts._tiny import decoder

FAMILIES = (
    (
        "qwen3_next",
        decoder(
            "Qwen3NextForCausalLM",
            **SIZES,
            head_dim=8,
            layer_types=["full_attention", "linear_attention", "full_attention"],
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            num_experts=0,  # a plain feed-forward layer
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="qwen3_next",
    gate="o_proj",
    slabs=(
        # A query and a gate of head 0, then of head 1, ...
        HeadSlab("q_proj", "out", "gated_query"),
        HeadSlab("k_proj", "out", "key"),
        HeadSlab("v_proj", "out", "value"),
        HeadSlab("o_proj", "in", "context"),
    ),
    head_dim="head_dim",
    requires=("num_key_value_groups", "head_dim", "layer_idx"),
    per_head=("q_norm", "k_norm"),
    **GROUPED,
    adapt=repeat_keys,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
