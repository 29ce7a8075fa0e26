"""ModernBERT: queries, keys and values fused in `Wqkv`; output in `Wo`."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import TEXT_SIZES, encoder

FAMILIES = (
    (
        "modernbert",
        encoder(
            "ModernBertForSequenceClassification",
            **TEXT_SIZES,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            local_attention=4,  # shorter than the 7 tokens of a batch
            attention_bias=True,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="modernbert",
    gate="Wo",
    slabs=(
        # All queries, then all keys, then all values.
        HeadSlab("Wqkv", "out", ("query", "key", "value")),
        HeadSlab("Wo", "in", "context"),
    ),
    head_dim="head_dim",
    requires=("layer_idx", "out_drop"),
    empty=without_heads("Wo"),
    families=FAMILIES,
)
