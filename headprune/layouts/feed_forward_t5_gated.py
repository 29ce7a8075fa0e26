"""Gated feed-forward of mT5 and UMT5: `wi_0` (gate), `wi_1` and `wo`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_t5_gated", down="wo", up={"wi_0": "head", "wi_1": "head"})
