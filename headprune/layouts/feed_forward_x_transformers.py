"""Feed-forward of x-transformers without a gate: `ff.0.0` and `ff.2`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_x_transformers", down="ff.2", up={"ff.0.0": "head"})
