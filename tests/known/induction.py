"""The task of the known answer: continue a random sequence that has begun to repeat.

``BOS x1 .. xp x1 .. xp x1 ..``: x1 .. xp are p different tokens in random order, and p differs from
example to example. From the p-th token on, the next token is the one that followed the present
token's earlier occurrence. No token follows from another one in general and no fixed distance leads
to the answer, so attention alone can find it, and needs two
layers: one head tells every position which token came before it, a later one looks for the position
whose previous token is the present one (Olsson et al. 2022, "In-context Learning and Induction
Heads").
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from headprune import MultiHeadAttention

N_TOKENS = 16  # without BOS, whose id is N_TOKENS
PERIODS = (8, 9, 10, 11, 12)
LENGTH = 25
IGNORED = -100

Batch = dict[str, Tensor]


def examples(n: int, seed: int) -> Batch:
    """``input_ids`` and ``labels``, ``[n, LENGTH]``; a label is the next token, or IGNORED where it
    does not follow."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(n, N_TOKENS, generator=generator).argsort(1)
    period = torch.tensor(PERIODS)[torch.randint(len(PERIODS), (n, 1), generator=generator)]
    text = order.gather(1, torch.arange(LENGTH) % period)
    ids = torch.cat([torch.full((n, 1), N_TOKENS), text[:, :-1]], 1)
    known = torch.arange(LENGTH) > period  # the token here, number p + 1 or later, is a repetition
    return {"input_ids": ids, "labels": text.masked_fill(~known, IGNORED)}


class AttentionOnly(nn.Module):
    """Token and position embeddings, layers of causal attention, each added to the residual stream,
    an unembedding.

    Args:
        width: Of the residual stream.
        n_heads: Heads of each layer.
        head_dim: Width of queries and keys.
        value_dim: Width of values; None is ``head_dim``.
        bias: Whether the output projections have a bias.
    """

    def __init__(
        self,
        width: int,
        n_heads: tuple[int, ...],
        head_dim: int,
        value_dim: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(N_TOKENS + 1, width)
        self.position = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            MultiHeadAttention(
                width, n, head_dim=head_dim, value_dim=value_dim, bias=False, output_bias=bias
            )
            for n in n_heads
        )
        self.unembed = nn.Linear(width, N_TOKENS, bias=False)

    def residual(self, input_ids: Tensor) -> Tensor:
        """The residual stream after the last layer, ``[batch, tokens, width]``."""
        x: Tensor = self.token(input_ids) + self.position.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + layer(x, causal=True)
        return x

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits ``[batch, tokens, N_TOKENS]``; BOS is never predicted."""
        logits: Tensor = self.unembed(self.residual(input_ids))
        return logits


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each example, the mean over the tokens that follow, ``[batch]``."""
    labels = batch["labels"]
    each = functional.cross_entropy(
        model(batch["input_ids"]).transpose(1, 2), labels, reduction="none"
    )
    counted = labels != IGNORED
    return (each * counted).sum(1) / counted.sum(1)


@torch.no_grad()
def predictions(model: nn.Module, batch: Batch) -> Tensor:
    """The likeliest token wherever one follows, ``[tokens that follow]``."""
    found: Tensor = model(batch["input_ids"]).argmax(-1)[batch["labels"] != IGNORED]
    return found


def accuracy(model: nn.Module, batch: Batch) -> float:
    """Share of the tokens that follow which are predicted."""
    labels = batch["labels"]
    return float((predictions(model, batch) == labels[labels != IGNORED]).double().mean())
