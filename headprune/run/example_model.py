"""A user's own model with attention that no layout knows; ``recipes/custom-model.yaml`` uses it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headprune.core.layout import AttentionLayout, HeadSlab


class RowAttention(nn.Module):
    """Attention with one input projection, whose rows are query, key and value of every head."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.heads, self.size = n_heads, width // n_heads
        self.mix = nn.Linear(width, 3 * width)  # queries, keys and values, head by head
        self.end = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over rows; input and output are ``[batch, rows, width]``."""
        batch, rows, _ = x.shape
        mixed = self.mix(x).view(batch, rows, self.heads, 3, self.size)
        q, k, v = mixed.permute(3, 0, 2, 1, 4)  # each [batch, heads, rows, size]
        context = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.end(context.transpose(1, 2).flatten(2))
        return out


#: Where ``RowAttention`` keeps its heads.
LAYOUT = AttentionLayout(
    name="row_attention",
    gate="end",
    slabs=(
        HeadSlab("mix", "out", ("query", "key", "value"), "grouped"),
        HeadSlab("end", "in", "context"),
    ),
    head_dim="size",
    counts=(("heads", "n_query_heads"),),
    empty="refuse",
)


class RowTransformer(nn.Module):
    """A transformer that reads an image row by row and classifies it."""

    def __init__(
        self, width: int, n_heads: int, n_layers: int, n_labels: int, rows: int, columns: int
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(columns, width)
        self.position = nn.Parameter(torch.randn(rows, width) * 0.1)
        self.attentions = nn.ModuleList(RowAttention(width, n_heads) for _ in range(n_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(n_layers))
        self.classify = nn.Linear(width, n_labels)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map images ``[batch, 1, rows, columns]`` to logits ``[batch, labels]``."""
        x = self.embed(pixel_values.squeeze(1)) + self.position  # [batch, rows, width]
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            x = norm(x + attention(x))
        logits: Tensor = self.classify(x.mean(1))
        return logits


def row_transformer(
    width: int = 64,
    n_heads: int = 8,
    n_layers: int = 3,
    n_labels: int = 10,
    rows: int = 8,
    columns: int = 8,
) -> RowTransformer:
    """Build a model for scikit-learn's digits; the recipe's ``model.config`` has these arguments.

    >>> row_transformer(width=8, n_heads=2)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """
    return RowTransformer(width, n_heads, n_layers, n_labels, rows, columns)
