"""Feed-forward of wav2vec 2.0, HuBERT and WavLM: `intermediate_dense` and `output_dense`."""

from __future__ import annotations

from headprune.layouts._feed_forward import feed_forward

LAYOUT = feed_forward(
    "feed_forward_wav2vec2", down="output_dense", up={"intermediate_dense": "head"}
)
