"""Feed-forward of BART, ViT, CLIP, OPT and others: `fc1` and `fc2`, in an MLP or in the layer."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward(
    "feed_forward_bart",
    down="fc2",
    up={"fc1": "head"},
    untouched=(
        "self_attn",
        "self_attn_layer_norm",
        "encoder_attn",
        "encoder_attn_layer_norm",
        "final_layer_norm",
    ),
    # FSMT takes its input sequence first, where no gate per example fits.
    absent=("self_attn.cache_key",),
)
