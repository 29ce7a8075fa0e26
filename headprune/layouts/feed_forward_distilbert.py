"""Feed-forward of DistilBERT: `lin1` and `lin2`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_distilbert", down="lin2", up={"lin1": "head"})
