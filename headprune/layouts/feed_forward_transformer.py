"""Feed-forward of `TransformerForTranslation`: the first and the last of four modules in a row."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward(
    "feed_forward_transformer",
    down="3",
    up={"0": "head"},
    requires=("is_feed_forward",),
)
