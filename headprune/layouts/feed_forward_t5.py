"""Feed-forward of T5: `wi` and `wo`. An expert of Switch Transformers is not taken."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_t5", "wo", {"wi": "head"})
