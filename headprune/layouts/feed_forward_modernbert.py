"""Feed-forward of ModernBERT: `Wi`, values before their gates, and `Wo`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_modernbert", down="Wo", up={"Wi": ("head", "head")})
