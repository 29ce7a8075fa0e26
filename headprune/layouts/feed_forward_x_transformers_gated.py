"""Gated feed-forward of x-transformers: `ff.0.proj`, values before their gates, and `ff.2`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward(
    "feed_forward_x_transformers_gated", down="ff.2", up={"ff.0.proj": ("head", "head")}
)
