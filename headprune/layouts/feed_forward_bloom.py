"""Feed-forward of BLOOM, Falcon and GPT-NeoX: `dense_h_to_4h` and `dense_4h_to_h`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward(
    "feed_forward_bloom",
    down="dense_4h_to_h",
    up={"dense_h_to_4h": "head"},
    absent=("slow_but_exact",),  # then BLOOM's code never calls the projection down
)
