"""Swin: `q_proj`, `k_proj`, `v_proj`, `o_proj`, a position-bias table; windows are batch rows."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab, separate_projections
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import SWIN_SIZES, images

FAMILIES = (("swin", images("SwinForImageClassification", **SWIN_SIZES)),)

LAYOUT = AttentionLayout(
    name="swin",
    gate="o_proj",
    slabs=(
        *separate_projections("q_proj", "k_proj", "v_proj", "o_proj"),
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
