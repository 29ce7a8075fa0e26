"""Swin: `q_proj`, `k_proj`, `v_proj`, `o_proj`, a position-bias table; windows are batch rows."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab, projections
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import images

FAMILIES = (
    (
        "swin",
        images(
            "SwinForImageClassification",
            size=16,
            patch_size=2,
            embed_dim=12,
            depths=[2, 1],
            num_heads=[3, 4],  # per stage; the width doubles between them
            window_size=2,
            mlp_ratio=1.5,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="swin",
    gate="o_proj",
    slabs=(
        *projections("q_proj", "k_proj", "v_proj", "o_proj"),
        # [distances, heads]
        HeadSlab("relative_position_bias.relative_position_bias_table", 1, "head"),
    ),
    head_dim="head_dim",
    requires=("relative_position_bias.window_area",),
    counts=(("num_attention_heads", "n_query_heads"),),
    windows=True,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
