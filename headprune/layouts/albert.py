"""ALBERT: `query`, `key`, `value`, `dense` and a norm in one module that all layers share.

A removed head is removed from every layer that shares the module.
"""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, separate_projections
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import TEXT_SIZES, encoder

_SIZES: dict[str, Any] = {**TEXT_SIZES, "embedding_size": 8}

FAMILIES = (
    # One module for all layers.
    ("albert", encoder("AlbertForSequenceClassification", **_SIZES)),
    # Two groups of layers, each with two modules.
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
    slabs=separate_projections("query", "key", "value", "dense"),
    head_dim="attention_head_size",
    # The last two tell it from BERT's inner module.
    requires=("num_attention_heads", "output_dropout", "LayerNorm"),
    untouched=("LayerNorm",),  # of the model's width
    counts=(("num_attention_heads", "n_query_heads"), ("all_head_size", "query_width")),
    # Its code adds the residual and normalises.
    empty=without_heads("dense", kind="_transformers.NormedWithoutHeads"),
    families=FAMILIES,
)
