"""Feed-forward of T5: `wi` and `wo`; one expert of Switch Transformers."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_t5", "wo", {"wi": "head"})
