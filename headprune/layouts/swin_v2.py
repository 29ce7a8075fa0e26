"""Swin v2, and Swin in Donut, CLAP, MaskFormer: windows; projections in `self` and `output`.

Position biases are a table, or (v2) come from a small network whose last layer has a row per head.
"""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import SWIN_SIZES, images

FAMILIES = (
    ("swinv2", images("Swinv2ForImageClassification", **SWIN_SIZES)),
    ("donut-swin", images("DonutSwinForImageClassification", **SWIN_SIZES)),
)

LAYOUT = AttentionLayout(
    name="swin_v2",
    gate="output.dense",
    slabs=(
        HeadSlab("self.query", "out", "query"),
        HeadSlab("self.key", "out", "key"),
        HeadSlab("self.value", "out", "value"),
        # Donut, CLAP, MaskFormer: a table, [distances, heads].
        HeadSlab("self.relative_position_bias_table", 1, "head", optional=True),
        # Swin v2: a scale per head, and the last layer of the network.
        HeadSlab("self.logit_scale", 0, "head", optional=True),
        HeadSlab("self.continuous_position_bias_mlp.2", "out", "head", optional=True),
        HeadSlab("output.dense", "in", "context"),
    ),
    head_dim="self.attention_head_size",
    requires=("self.num_attention_heads", "self.window_size", "self.relative_position_index"),
    # The network's first layer, which all heads share.
    untouched=("self.continuous_position_bias_mlp.0",),
    counts=(("self.num_attention_heads", "n_query_heads"), ("self.all_head_size", "query_width")),
    windows=True,
    empty=without_heads(None, "self"),
    families=FAMILIES,
)
