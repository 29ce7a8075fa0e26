"""UMT5: as T5, but every self-attention has its own table of position biases."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab, separate_projections
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import encoder_decoder
from headprune.layouts.t5 import SIZES, kind_of

LAYOUT = AttentionLayout(
    name="umt5",
    gate="o",
    slabs=(
        *separate_projections("q", "k", "v", "o"),
        # [buckets, heads]; cut too, because no other layer reads it.
        HeadSlab("relative_attention_bias.weight", 1, "head", optional=True),
    ),
    head_dim="key_value_proj_dim",
    kind=kind_of,
    requires=("compute_bias", "is_decoder", "_shape"),  # T5 has no `_shape`
    counts=(
        ("n_heads", "n_query_heads"),
        ("inner_dim", "query_width"),
        ("relative_attention_bias.embedding_dim", "n_query_heads"),
    ),
    empty=without_heads("o", attends=kind_of),
    families=(("umt5", encoder_decoder("UMT5ForConditionalGeneration", **SIZES)),),
)
