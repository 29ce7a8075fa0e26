"""timm's plain attention for any number of heads, and the proof that a class of older code computes the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headprune.core.layout import STATE_ATTRIBUTE
from headprune.core.mixin import Mixin
from headprune.layouts._stand_in import agree, linear, stand_in, wave

_N_HEADS, _WIDTH = 2, 3


class Plain(Mixin, nn.Module):
    """Put in front of older code that takes the heads' total width from its input."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return plain(self, getattr(self, STATE_ATTRIBUTE).widths[0], x, attn_mask, is_causal)


def plain(module: Any, head_dim: int, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, head_dim)).permute(2, 0, 3, 1, 4)
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    dropout = module.attn_drop.p if module.training else 0.0
    heads = scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal, scale=module.scale)
    out: Tensor = module.proj_drop(module.proj(heads.transpose(1, 2).flatten(2)))
    return out


def is_plain(module: nn.Module) -> bool:
    """Whether the ``forward`` of the module's class computes what ``plain`` does: both run on a small stand-in.

    Structure alone does not tell: NesT's attention has the same parts and lays the heads' outputs inside out.
    """
    width = _N_HEADS * _WIDTH
    parts: dict[str, nn.Module] = {"qkv": linear(width, 3 * width), "proj": linear(width, width, 1)}
    for name in ("q_norm", "k_norm"):
        if not isinstance(getattr(module, name, nn.Identity()), nn.Identity):
            parts[name] = nn.LayerNorm(_WIDTH, elementwise_affine=False)
    small = stand_in(module, parts, num_heads=_N_HEADS, head_dim=_WIDTH, scale=_WIDTH**-0.5)
    x = wave(1, 4, width)
    return agree(lambda: plain(small, _WIDTH, x), lambda: small.forward(x))


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
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = self.q_norm(q) * self.scale @ self.k_norm(k).transpose(-2, -1)
        return (self.attn_drop(scores.softmax(-1)) @ v).transpose(1, 2)


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
