"""Tiny models with timm's attentions, old and new, in their form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class OlderAttention(nn.Module):
    """In the form of timm's until 1.0.22: the heads' total width is its input's."""

    def __init__(self, dim: int, num_heads: int, norms: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(self.head_dim) if norms else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if norms else nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        out: Tensor = self.proj_drop(self.proj(self.heads(x).reshape(batch, length, width)))
        return out

    def heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = (
            self.qkv(x)
            .reshape(batch, length, 3, self.num_heads, self.head_dim)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = qkv.unbind(0)
        scores = self.q_norm(q) * self.scale @ self.k_norm(k).transpose(-2, -1)
        out: Tensor = self.attn_drop(scores.softmax(-1)) @ v
        return out.transpose(1, 2)


class Attention(OlderAttention):
    """In the form of timm's from 1.0.24 on, with its gate."""

    def __init__(self, dim: int, num_heads: int, norms: bool = False) -> None:
        super().__init__(dim, num_heads, norms)
        self.attn_dim = dim
        self.gate = nn.Linear(dim, dim) if norms else None

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(x).reshape(*x.shape[:2], self.attn_dim)
        heads = heads if self.gate is None else heads * self.gate(x).sigmoid()
        out: Tensor = self.proj_drop(self.proj(heads))
        return out


class AttentionRope(Attention):
    """In the form of timm's with separate projections, of which two query heads share a key and a
    value."""

    def __init__(self, dim: int, num_heads: int, norms: bool = False) -> None:
        super().__init__(dim, num_heads, norms)
        self.num_kv_groups = 2
        self.num_kv_heads = num_heads // self.num_kv_groups
        self.qkv: Any = None
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj, self.v_proj = (
            nn.Linear(dim, self.num_kv_heads * self.head_dim) for _ in range(2)
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = (
            way(x).reshape(*x.shape[:2], n, self.head_dim).transpose(1, 2)
            for way, n in zip((self.q_proj, self.k_proj, self.v_proj), counts, strict=True)
        )
        k, v = (y.repeat_interleave(self.num_kv_groups, 1) for y in (self.k_norm(k), v))
        heads = scaled_dot_product_attention(self.q_norm(q), k, v, attn_mask)
        heads = heads.transpose(1, 2).reshape(*x.shape[:2], self.attn_dim)
        heads = heads if self.gate is None else heads * self.gate(x).sigmoid()
        out: Tensor = self.proj_drop(self.proj(heads))
        return out


class Tiny(nn.Module):
    def __init__(self, kind: type[OlderAttention]) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(kind(16, 4, norms) for norms in (False, True, True))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def tiny(name: str) -> tuple[Any, Any]:
    return Tiny(globals()[name]), {"x": torch.randn(3, 7, 16)}
