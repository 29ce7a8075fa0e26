"""Feed-forward of ALBERT: `ffn` and `ffn_output`, in the layer itself."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward(
    "feed_forward_albert",
    down="ffn_output",
    up={"ffn": "head"},
    untouched=("attention", "full_layer_layer_norm"),
)
