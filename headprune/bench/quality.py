"""How good a model is on given batches: accuracy, perplexity or error, and the mean per-example loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.batches import EMPTY, Batches
from headprune.model.losses import (
    Loss,
    check_finite,
    is_causal_lm,
    logits_of,
    losses_of,
    predict,
    problem_type,
    shaped_losses,
    token_losses,
)
from headprune.model.mistakes import explained
from headprune.model.own_loss import Reading, is_default, reading_of
from headprune.model.running import device_of, to_device, undisturbed
from headprune.model.transfers import in_fp64, in_main_memory


@dataclass(frozen=True)
class Quality:
    """One evaluation.

    Args:
        metric: ``accuracy`` (single-label classification of sequences, images or tokens), ``perplexity`` (causal
            language models, over all counted tokens) or ``bits_per_character`` (its logarithm to base 2), ``mse``
            (regression), ``bleu`` (``evaluate_translation``), ``f1`` (``evaluate_answers``), or ``loss``.
        value: The metric.
        loss: Mean per-example loss.
        n_examples: Examples.
        losses: Per-example losses, in data order, for paired comparisons.
        amounts, counts: What the metric adds up and divides by, example by example: ``value`` is
            ``sum(amounts) / sum(counts)``, and its exponential for perplexity; for BLEU see ``headprune.core.bleu``.
        more: Other metrics of the same answers, by name.
    """

    metric: str
    value: float
    loss: float
    n_examples: int
    losses: tuple[float, ...]
    amounts: tuple[Any, ...]
    counts: tuple[float, ...]
    more: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Totals:
    """What the metric adds up and what it is divided by, one number an example."""

    metric: str = "loss"
    amounts: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    unread: list[Tensor] = field(default_factory=list)  # [2, examples], amounts and counts of a batch, where they are

    def add(self, metric: str, amounts: Tensor, counts: Tensor | None = None) -> None:
        self.metric = metric
        counts = torch.ones_like(amounts, dtype=torch.float64) if counts is None else counts
        self.unread.append(torch.stack([in_fp64(amounts), in_fp64(counts)]))

    def read(self) -> None:
        """Reads the numbers of all batches at once."""
        unread, self.unread = self.unread, []
        for amounts, counts in in_main_memory(unread):
            self.amounts += amounts.tolist()
            self.counts += counts.tolist()


def evaluate(model: nn.Module, batches: Iterable[Any], loss: Loss | None = None, *, bits: bool = False) -> Quality:
    """Evaluates a model; it is left as it was found.

    Args:
        model: The model.
        batches: Batches with labels.
        loss: Your own per-example loss; the metric is then the mean loss. The default one is compared with the model's
            own on the first batch.
        bits: For causal language models whose tokens are characters: bits per character in place of perplexity.

    Raises:
        InvalidValue: no batch, no labels, a loss that is not finite; a default loss that is not the model's own.
    """
    totals, losses = _Totals(), []
    reading: Reading | None = None
    device, batches = device_of(model), Batches.of(batches)
    with undisturbed(model, packed=True), torch.no_grad(), explained(model, batches):
        for number, batch in enumerate(batches):
            batch = to_device(batch, device)
            if loss is not None and not is_default(loss):
                losses.append(shaped_losses(loss, model, batch, number))
                continue
            if reading is None:
                reading = reading_of(model, batch)
                reading.check()
            of_batch = _Answered(predict(model, batch), reading.shifted)
            losses.append(shaped_losses(of_batch.losses, model, batch, number))
            _count(totals, model, batch, of_batch, bits)
    if not losses:
        raise InvalidValue(*EMPTY)
    losses = in_main_memory(losses)  # once, at the end: every copy waits for an accelerator
    check_finite(enumerate(losses))
    flat = torch.cat(losses).double()
    mean = float(flat.mean())
    totals.read()
    if not sum(totals.counts):
        totals = _Totals("loss", flat.tolist(), [1.0] * len(flat))
    value = math.fsum(totals.amounts) / math.fsum(totals.counts)
    if totals.metric == "perplexity":
        value = math.exp(min(value, 700.0))
    per_example = (tuple(flat.tolist()), tuple(totals.amounts), tuple(totals.counts))
    return Quality(totals.metric, value, mean, len(flat), *per_example)


@dataclass(frozen=True)
class _Answered:
    """A model's output, and whether labels of tokens are those of the next token."""

    output: Any
    shifted: bool

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return losses_of(model, batch, self.output, self.shifted)


def _count(totals: _Totals, model: nn.Module, batch: Mapping[str, Any], found: _Answered, bits: bool) -> None:
    """Adds a batch to the metric that fits the model; leaves the metric at the loss where none does."""
    if "start_positions" in batch:
        return
    logits = logits_of(found.output)
    if logits.ndim == 3:
        losses, counted = token_losses(model, batch, logits, found.shifted)
        if found.shifted or is_causal_lm(model):
            name, unit = ("bits_per_character", math.log(2)) if bits else ("perplexity", 1.0)
            totals.add(name, (losses.double() * counted).sum(1) / unit, counted.sum(1))
        else:
            right = (logits.argmax(-1) == batch["labels"]) & counted.bool()
            totals.add("accuracy", right.sum(1), counted.sum(1))
        return
    labels = batch["labels"]
    kind = problem_type(model, labels, logits)
    if kind == "single_label_classification":
        totals.add("accuracy", logits.argmax(-1) == labels.reshape(-1))
    elif kind == "regression":
        totals.add("mse", found.losses(model, batch))
