"""Our own MultiHeadAttention, in any model: W_q, W_k, W_v and W_o, grouped queries, separate value
width.

Its kind is what it was built with (``kind=``, by default ``self``), because causality and the cache
are arguments of a call; so ``keep_kv`` counts the modules that were built as ``causal``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import AttentionLayout, HeadSlab

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def _kind(module: Any, name: str) -> Kind:
    kind: Kind = getattr(module, "kind", "self")  # older ones have no such attribute
    return kind


def tiny(seed: int) -> tuple[Any, Any]:
    """Two layers of 4 query heads in 2 groups with value width 6 instead of 5, mean pooled, three
    classes."""
    import torch
    from torch import nn

    from headprune.attention.multi_head import MultiHeadAttention

    class Layer(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.attention = MultiHeadAttention(16, 4, n_kv_heads=2, head_dim=5, value_dim=6)
            self.causal = causal
            self.norm = nn.LayerNorm(16)

        def forward(self, x: torch.Tensor, valid_lens: torch.Tensor | None) -> torch.Tensor:
            out: torch.Tensor = self.norm(
                x + self.attention(x, valid_lens=valid_lens, causal=self.causal)
            )
            return out

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(causal=False), Layer(causal=True)])
            self.head = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor, valid_lens: torch.Tensor | None = None) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, valid_lens)
            out: torch.Tensor = self.head(x.mean(1) if valid_lens is None else x[:, 0])
            return out

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tiny(), {"x": torch.randn(3, 7, 16), "valid_lens": torch.tensor([7, 4, 2])}


LAYOUT = AttentionLayout(
    name="multi_head_attention",
    gate="W_o",
    slabs=(
        HeadSlab("W_q", "out", "query"),
        HeadSlab("W_k", "out", "key"),
        HeadSlab("W_v", "out", "value"),
        HeadSlab("W_o", "in", "context"),
    ),
    head_dim="head_dim",
    value_dim="value_dim",
    kind=_kind,
    requires=("n_heads", "n_kv_heads", "head_dim", "value_dim"),
    untouched=("compatibility",),
    policies=("group", "balanced", "free"),
    counts=(("n_heads", "n_query_heads"), ("n_kv_heads", "n_kv_heads")),
    families=(("multi_head_attention", tiny),),
)
