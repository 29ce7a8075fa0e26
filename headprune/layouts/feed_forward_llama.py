"""Feed-forward of Llama-style decoders: `gate_proj` (not in DINOv3), `up_proj` and `down_proj`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward(
    "feed_forward_llama",
    "down_proj",
    {"gate_proj": "head", "up_proj": "head"},
    optional=("gate_proj",),
)
