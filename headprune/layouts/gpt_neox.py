"""GPT-NeoX (Pythia): fused `query_key_value` head by head."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import decoder

FAMILIES = (
    (
        "gpt_neox",
        decoder(
            "GPTNeoXForCausalLM",
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=24,
            rotary_pct=0.5,
            max_position_embeddings=64,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="gpt_neox",
    gate="dense",
    slabs=(
        HeadSlab("query_key_value", "out", ("query", "key", "value"), "grouped"),
        HeadSlab("dense", "in", "context"),
    ),
    head_dim="head_size",
    kind="causal",
    requires=("head_size", "rotary_ndims", "layer_idx"),
    absent=("norm_factor",),  # the Japanese one returns its bias apart
    empty=without_heads("dense"),
    families=FAMILIES,
)
