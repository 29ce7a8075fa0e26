"""Feed-forward of T5, and those of Switch Transformers that are no experts: `wi` and `wo`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_t5", down="wo", up={"wi": "head"})
