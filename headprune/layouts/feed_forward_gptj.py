"""Feed-forward of GPT-J: `fc_in` and `fc_out`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_gptj", down="fc_out", up={"fc_in": "head"})
