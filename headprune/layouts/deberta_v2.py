"""DeBERTa v2 and v3: `query_proj`, `key_proj`, `value_proj`; projections of relative positions."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import TEXT_SIZES, encoder


def _products(module: Any) -> tuple[int, int]:
    """Return multiply-adds per query token and per key token with relative positions."""
    inner = module.self
    if not inner.relative_attention:
        return 0, 0
    # One product with each relative position, before and after the token.
    per_token = 2 * inner.pos_ebd_size * inner.attention_head_size
    content_to_position = per_token * ("c2p" in inner.pos_att_type)
    position_to_content = per_token * ("p2c" in inner.pos_att_type)
    return content_to_position, position_to_content


_SIZES: dict[str, Any] = {
    **TEXT_SIZES,
    "relative_attention": True,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["p2c", "c2p"],
}

FAMILIES = (
    ("deberta-v2", encoder("DebertaV2ForSequenceClassification", **_SIZES)),
    # Positions use the projections of queries and keys.
    ("deberta-v3", encoder("DebertaV2ForSequenceClassification", **_SIZES, share_att_key=True)),
)

LAYOUT = AttentionLayout(
    name="deberta_v2",
    gate="output.dense",
    slabs=(
        HeadSlab("self.query_proj", "out", "query"),
        HeadSlab("self.key_proj", "out", "key"),
        HeadSlab("self.value_proj", "out", "value"),
        # Only where positions do not share the projections above.
        HeadSlab("self.pos_query_proj", "out", "query", optional=True),
        HeadSlab("self.pos_key_proj", "out", "key", optional=True),
        HeadSlab("output.dense", "in", "context"),
    ),
    head_dim="self.attention_head_size",
    requires=("self.num_attention_heads", "self.pos_att_type"),
    untouched=("output.LayerNorm",),
    counts=(("self.num_attention_heads", "n_query_heads"), ("self.all_head_size", "query_width")),
    products=_products,
    empty=without_heads(None, "self"),
    families=FAMILIES,
)
