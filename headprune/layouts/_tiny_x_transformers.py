"""Tiny models of x-transformers, which must be installed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

#: Options with parameters that have a row or an entry per head; the decoder's feed-forwards have
#: gates.
_OPTIONS: dict[str, dict[str, Any]] = {
    "Encoder": {
        "attn_qk_norm": True,
        "attn_qk_norm_dim_scale": True,
        "attn_gate_value_heads": True,
    },
    "Decoder": {"attn_num_mem_kv": 2, "attn_head_scale": True, "ff_glu": True},
}


class TinyXTransformers(nn.Module):
    """Two layers of 6 query heads and 3 key/value heads; every third shares one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # Its imports compile with torch.jit, which PyTorch has deprecated.
            warnings.simplefilter("ignore")
            import x_transformers

        self.embedding = nn.Linear(16, 16)
        sizes = {
            "dim": 16,
            "depth": 2,
            "heads": 6,
            "attn_kv_heads": 3,
            "attn_dim_head": 4,
            "ff_mult": 1,
        }
        self.layers = getattr(x_transformers, name)(**sizes, **_OPTIONS[name])
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embedding(x)))
        return out


def tiny(name: str) -> tuple[Any, Any]:
    """Make a model and a batch; without padding, because x-transformers' masks need fp32."""
    return TinyXTransformers(name), {"x": torch.randn(3, 7, 16)}
