"""What the tests of scorers share: families, losses, batches of a size, and scores as one tensor."""

from contextlib import contextmanager

import torch
from torch import nn

import headprune as hp
from headprune.model.double import Doubled
from headprune.model.losses import default_loss
from headprune.model.running import batch_size, call, outputs

EXACT = {"rtol": 1e-10, "atol": 1e-12}
#: BERT-like, GPT-2-like, grouped queries, encoder-decoder with cross-attention, our own attention.
FAMILIES = ["bert", "gpt2", "llama", "t5", "multi_head_attention"]


class Stack(nn.Module):
    """Two layers of our attention, each added to its input, and classes of the mean token."""

    def __init__(self, width, heads, classes):
        super().__init__()
        self.layers = nn.ModuleList(hp.MultiHeadAttention(width, heads) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


def own_loss(model, batch):
    """For a model without a Transformers head."""
    first = next(out for out in outputs(call(model, batch)) if out.ndim > 1)
    return first.logsumexp(-1).square().reshape(batch_size(batch), -1).mean(1)


def wide_loss(model, batch):
    """The model's own loss, with every step in fp64."""
    with Doubled():
        return default_loss(model, batch)


def loss_of(subject):
    return default_loss if hasattr(subject.model, "config") else own_loss


def score(subject, scorer, batches=None, **options):
    """``hp.score`` with the subject's batch and loss."""
    given = {"loss": loss_of(subject), "progress": False, **options}
    return hp.score(subject.model, batches or [subject.batch], scorer, **given)


def split(batch, size):
    n = len(next(iter(batch.values())))
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, n, size)]


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def flat(scores):
    """All values, ``[units]``."""
    return wide([v for row in scores.values for v in row])


def flat_errors(scores):
    return wide([v for row in scores.standard_errors for v in row])


@contextmanager
def counted_runs(model):
    """A list that has one entry for every forward pass of a model."""
    runs = []
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    try:
        yield runs
    finally:
        handle.remove()
