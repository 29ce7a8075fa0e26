"""What the tests of scorers share: families, losses, batches of a size, and scores as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import headprune as hp
from headprune.model.double import Doubled
from headprune.model.losses import default_loss
from headprune.model.running import batch_size, call, outputs
from tests.laws.support import Subject

EXACT = {"rtol": 1e-10, "atol": 1e-12}
#: BERT-like, GPT-2-like, grouped queries, encoder-decoder with cross-attention, our own attention.
FAMILIES = ["bert", "gpt2", "llama", "t5", "multi_head_attention"]


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """For a model without a Transformers head."""
    first = next(out for out in outputs(call(model, batch)) if out.ndim > 1)
    return first.logsumexp(-1).square().reshape(batch_size(batch), -1).mean(1)


def wide_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss, with every step in fp64."""
    with Doubled():
        return default_loss(model, batch)


def loss_of(subject: Subject) -> Callable[[nn.Module, Any], Tensor]:
    return default_loss if hasattr(subject.model, "config") else own_loss


def score(subject: Subject, scorer: Any, batches: Any = None, **options: Any) -> Any:
    """``hp.score`` with the subject's batch and loss."""
    given = {"loss": loss_of(subject), "progress": False, **options}
    return hp.score(subject.model, batches or [subject.batch], scorer, **given)


def split(batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
    n = len(next(iter(batch.values())))
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, n, size)]


def wide(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flat(scores: Any) -> Tensor:
    """All values, ``[units]``."""
    return wide([v for row in scores.values for v in row])


def flat_errors(scores: Any) -> Tensor:
    return wide([v for row in scores.standard_errors for v in row])


@contextmanager
def counted_runs(model: nn.Module) -> Iterator[list[int]]:
    """A list that has one entry for every forward pass of a model."""
    runs: list[int] = []
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    try:
        yield runs
    finally:
        handle.remove()
