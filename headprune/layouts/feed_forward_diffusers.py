"""Feed-forward of diffusers without a gate: `net.0.proj` and `net.2`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_diffusers", down="net.2", up={"net.0.proj": "head"})
