"""Feed-forward of Phi-3: `gate_up_proj`, gates before values, and `down_proj`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_phi3", down="down_proj", up={"gate_up_proj": ("head", "head")})
