"""Tiny models of x-transformers, which must be installed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

_OPTIONS: dict[str, dict[str, Any]] = {
    "Encoder": {
        "attn_qk_norm": True,
        "attn_qk_norm_dim_scale": True,
        "attn_gate_value_heads": True,
    },
    "Decoder": {"attn_num_mem_kv": 2, "attn_head_scale": True},
}


class Tiny(nn.Module):
    """Two layers of 6 query heads in 3 groups, of which every third shares a key/value head."""

    def __init__(self, name: str) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # its imports compile with torch.jit, which PyTorch is about to drop
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
    """A model, and a batch; without padding, because x-transformers' masks need fp32."""
    return Tiny(name), {"x": torch.randn(3, 7, 16)}
