"""Tiny models with attentions in the form of timm's, old and new."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class OlderAttention(nn.Module):
    """In the form of timm's until 1.0.22: the heads' total width is the input's."""

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
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [batch, heads, length, head_dim]
        scores = self.q_norm(q) * self.scale @ self.k_norm(k).transpose(-2, -1)
        out: Tensor = self.attn_drop(scores.softmax(-1)) @ v
        return out.transpose(1, 2)  # [batch, length, heads, head_dim]


class Attention(OlderAttention):
    """In the form of timm's from 1.0.24 on, with its gate."""

    def __init__(self, dim: int, num_heads: int, norms: bool = False) -> None:
        super().__init__(dim, num_heads, norms)
        self.attn_dim = dim
        self.gate = nn.Linear(dim, dim) if norms else None

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(x).reshape(*x.shape[:2], self.attn_dim)
        if self.gate is not None:
            heads = heads * self.gate(x).sigmoid()
        out: Tensor = self.proj_drop(self.proj(heads))
        return out


class AttentionRope(Attention):
    """In the form of timm's with separate projections; two query heads share a key and value."""

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
        # [batch, heads, length, head_dim]
        q = self._split(self.q_proj(x), self.num_heads)
        k = self._split(self.k_proj(x), self.num_kv_heads)
        v = self._split(self.v_proj(x), self.num_kv_heads)
        # One key and value per query head.
        k = self.k_norm(k).repeat_interleave(self.num_kv_groups, 1)
        v = v.repeat_interleave(self.num_kv_groups, 1)
        heads = scaled_dot_product_attention(self.q_norm(q), k, v, attn_mask)
        heads = heads.transpose(1, 2).reshape(*x.shape[:2], self.attn_dim)
        if self.gate is not None:
            heads = heads * self.gate(x).sigmoid()
        out: Tensor = self.proj_drop(self.proj(heads))
        return out

    def _split(self, x: Tensor, n_heads: int) -> Tensor:
        return x.reshape(*x.shape[:2], n_heads, self.head_dim).transpose(1, 2)


class TinyTimm(nn.Module):
    """Three layers of 16 features and 4 heads; the last two have norms and a gate."""

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
    """Make a model with attentions of a class of this file, and a batch."""
    return TinyTimm(globals()[name]), {"x": torch.randn(3, 7, 16)}
