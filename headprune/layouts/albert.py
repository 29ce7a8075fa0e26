"""ALBERT: query, key, value, dense and the norm in one module, which all layers share: a head
leaves all of them."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import encoder

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "embedding_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}

FAMILIES = (
    ("albert", encoder("AlbertForSequenceClassification", **_SIZES)),
    (
        "albert-groups",
        encoder(
            "AlbertForSequenceClassification", **_SIZES, num_hidden_groups=2, inner_group_num=2
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="albert",
    gate="dense",
    slabs=(
        HeadSlab("query", "out", "query"),
        HeadSlab("key", "out", "key"),
        HeadSlab("value", "out", "value"),
        HeadSlab("dense", "in", "context"),
    ),
    head_dim="attention_head_size",
    requires=("num_attention_heads", "output_dropout", "LayerNorm"),
    untouched=("LayerNorm",),
    counts=(("num_attention_heads", "n_query_heads"), ("all_head_size", "query_width")),
    empty=without_heads("dense", kind="_transformers.NormedWithoutHeads"),
    families=FAMILIES,
)
