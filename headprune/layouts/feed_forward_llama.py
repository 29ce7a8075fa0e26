"""Feed-forward of Llama-style decoders: `gate_proj` (not in DINOv3), `up_proj` and `down_proj`."""

from __future__ import annotations

from typing import Any

from headprune.core.errors import UnsupportedModel
from headprune.layouts._feed_forward import ELEMENTWISE, feed_forward


def _check(module: Any) -> None:
    """Refuse Gemma 3n's sparse layers: a threshold over all neurons decides which of them act."""
    sparsity = getattr(module, "activation_sparsity", 0.0)
    if sparsity > 0:
        got = f"activation_sparsity={sparsity}"
        raise UnsupportedModel(type(module).__name__, ELEMENTWISE, got)


LAYOUT = feed_forward(
    "feed_forward_llama",
    down="down_proj",
    up={"gate_proj": "head", "up_proj": "head"},
    optional=("gate_proj",),
    check=_check,
)
