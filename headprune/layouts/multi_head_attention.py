"""headprune's `MultiHeadAttention`: `W_q`, `W_k`, `W_v`, `W_o`, grouped queries, any value width.

Its kind is the argument ``kind`` of its constructor, by default ``self``. Causality and the cache
are arguments of a call, which no layout sees. So ``keep_kv`` counts the modules that were built as
``causal``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import AttentionLayout, separate_projections

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def _kind(module: Any, name: str) -> Kind:
    # Modules from older pickles have no such attribute.
    kind: Kind = getattr(module, "kind", "self")
    return kind


def tiny(seed: int) -> tuple[Any, Any]:
    """Make a tiny model and a batch; values are wider than queries."""
    import torch
    from torch import nn

    from headprune.attention.multi_head import MultiHeadAttention
    from headprune.attention.transformer import FeedForward

    class Layer(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.attention = MultiHeadAttention(16, 4, n_kv_heads=2, head_dim=5, value_dim=6)
            self.causal = causal
            self.norm = nn.LayerNorm(16)
            self.feed_forward = FeedForward(16, 24, 0.0)

        def forward(self, x: torch.Tensor, valid_lens: torch.Tensor | None) -> torch.Tensor:
            heads = self.attention(x, valid_lens=valid_lens, causal=self.causal)
            x = self.norm(x + heads)
            out: torch.Tensor = x + self.feed_forward(x)
            return out

    class TwoLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(causal=False), Layer(causal=True)])
            self.head = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor, valid_lens: torch.Tensor | None = None) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, valid_lens)
            # The first token is never padding; a mean would include it.
            pooled = x.mean(1) if valid_lens is None else x[:, 0]
            out: torch.Tensor = self.head(pooled)
            return out

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TwoLayers(), {"x": torch.randn(3, 7, 16), "valid_lens": torch.tensor([7, 4, 2])}


LAYOUT = AttentionLayout(
    name="multi_head_attention",
    gate="W_o",
    slabs=separate_projections("W_q", "W_k", "W_v", "W_o"),
    head_dim="head_dim",
    value_dim="value_dim",
    kind=_kind,
    requires=("n_heads", "n_kv_heads", "head_dim", "value_dim"),
    untouched=("compatibility",),  # the score function, which all heads share
    policies=("group", "balanced", "free"),
    counts=(("n_heads", "n_query_heads"), ("n_kv_heads", "n_kv_heads")),
    families=(("multi_head_attention", tiny),),
)
