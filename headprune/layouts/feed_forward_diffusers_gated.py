"""Gated feed-forward of diffusers: `net.0.proj`, values before their gates, and `net.2`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward(
    "feed_forward_diffusers_gated", down="net.2", up={"net.0.proj": ("head", "head")}
)
