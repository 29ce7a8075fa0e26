"""Feed-forward of GPT-2, GPT-Neo and StarCoder 2: `c_fc` and `c_proj`, linear or Conv1D."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward("feed_forward_gpt2", down="c_proj", up={"c_fc": "head"})
