"""Feed-forward of BERT-style layers: `intermediate.dense` and `output.dense`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward(
    "feed_forward_bert",
    down="output.dense",
    up={"intermediate.dense": "head"},
    untouched=(
        "attention",
        "crossattention",
        "output.LayerNorm",
        "LayerNorm",
        # Swin v2.
        "layernorm_before",
        "layernorm_after",
    ),
)
