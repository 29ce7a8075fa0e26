"""DistilBERT: `q_lin`, `k_lin`, `v_lin` and `out_lin` in one module."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, separate_projections
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import encoder

FAMILIES = (
    (
        "distilbert",
        encoder(
            "DistilBertForSequenceClassification",
            dim=16,
            n_layers=3,
            n_heads=4,
            hidden_dim=24,
            max_position_embeddings=32,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="distilbert",
    gate="out_lin",
    slabs=separate_projections("q_lin", "k_lin", "v_lin", "out_lin"),
    head_dim="attention_head_size",
    requires=("n_heads",),
    counts=(("n_heads", "n_query_heads"),),
    empty=without_heads("out_lin"),
    families=FAMILIES,
)
