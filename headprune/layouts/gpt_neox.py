"""GPT-NeoX (Pythia): `query_key_value` fused head by head."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import SIZES, decoder

FAMILIES = (
    (
        "gpt_neox",
        decoder(
            "GPTNeoXForCausalLM",
            **SIZES,
            rotary_pct=0.5,  # half of each head is rotated
            max_position_embeddings=64,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="gpt_neox",
    gate="dense",
    slabs=(
        # A query, a key and a value of head 0, then of head 1, ...
        HeadSlab("query_key_value", "out", ("query", "key", "value"), "grouped"),
        HeadSlab("dense", "in", "context"),
    ),
    head_dim="head_size",
    kind="causal",
    requires=("head_size", "rotary_ndims", "layer_idx"),
    # GPT-NeoX-Japanese returns the output projection's bias separately.
    absent=("norm_factor",),
    # No counts: its code takes the number of heads from the projection's width.
    empty=without_heads("dense"),
    families=FAMILIES,
)
