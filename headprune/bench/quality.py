"""How good a model is on given batches: accuracy, perplexity or error, and the mean per-example
loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.core.matthews import matthews
from headprune.core.metrics import MATTHEWS
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

#: Metrics of single-label classification.
ClassMetric: TypeAlias = Literal["accuracy", "matthews"]
CLASS_METRICS: tuple[str, ...] = get_args(ClassMetric)


@dataclass(frozen=True)
class Quality:
    """One evaluation.

    Args:
        metric: ``accuracy`` or ``matthews`` (single-label classification of sequences, images or
            tokens), ``perplexity`` (causal language models, over all counted tokens) or
            ``bits_per_character`` (its logarithm to base 2), ``mse`` (regression), ``bleu``
            (``evaluate_translation``), ``f1`` (``evaluate_answers``), or ``loss``.
        value: The metric.
        loss: Mean per-example loss.
        n_examples: Examples.
        losses: Per-example losses, in data order, for paired comparisons.
        amounts, counts: What the metric adds up and divides by, example by example: ``value`` is
            ``sum(amounts) / sum(counts)``, and its exponential for perplexity; for BLEU and
            Matthews correlation see ``headprune.core.bleu`` and ``headprune.core.matthews``.
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
    """What the metric adds up and what it is divided by, for every example."""

    metric: str = "loss"
    amounts: list[Any] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    unread: list[Tensor] = field(
        default_factory=list
    )  # [examples, amounts and a count] of a batch, where they are

    def add(self, metric: str, amounts: Tensor, counts: Tensor | None = None) -> None:
        self.metric = metric
        rows = in_fp64(amounts if amounts.ndim == 2 else amounts[:, None])
        counts = torch.ones_like(rows[:, 0]) if counts is None else in_fp64(counts)
        self.unread.append(torch.cat([rows, counts[:, None]], 1))

    def read(self) -> None:
        """Reads the numbers of all batches at once."""
        unread, self.unread = self.unread, []
        for rows in in_main_memory(unread):
            amounts = rows[:, :-1].tolist()
            self.amounts += [tuple(row) if len(row) > 1 else row[0] for row in amounts]
            self.counts += rows[:, -1].tolist()

    @property
    def value(self) -> float:
        """The metric of the sums."""
        if self.metric == MATTHEWS:
            return float(matthews(np.array(self.amounts).sum(0), math.fsum(self.counts)))
        value = math.fsum(self.amounts) / math.fsum(self.counts)
        return math.exp(min(value, 700.0)) if self.metric == "perplexity" else value


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    bits: bool = False,
    metric: ClassMetric | None = None,
) -> Quality:
    """Evaluates a model; it is left as it was found.

    Args:
        model: The model.
        batches: Batches with labels.
        loss: Your own per-example loss; the metric is then the mean loss. The default one is
            compared with the model's own on the first batch.
        bits: For causal language models whose tokens are characters: bits per character in place of
            perplexity.
        metric: Of single-label classification: ``accuracy``, the default, or ``matthews`` for
            Matthews correlation; ``Quality.more`` has the accuracy then.

    Raises:
        InvalidValue: no batch, no labels, a loss that is not finite; a default loss that is not the
            model's own; a metric of classification where the model does something else.
    """
    _check_metric(metric, loss)
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
            _count(totals, model, batch, of_batch, bits, metric)
            if metric is not None and totals.metric != metric:
                must = "left out for a model that gives no single class to an example or a token"
                raise InvalidValue(
                    "evaluate(metric=)", must, f"{metric!r} for {type(model).__name__}"
                )
    if not losses:
        raise InvalidValue(*EMPTY)
    losses = in_main_memory(losses)  # once, at the end: every copy waits for an accelerator
    check_finite(enumerate(losses))
    flat = torch.cat(losses).double()
    mean = float(flat.mean())
    totals.read()
    if not sum(totals.counts):
        totals = _Totals("loss", flat.tolist(), [1.0] * len(flat))
    per_example = (tuple(flat.tolist()), tuple(totals.amounts), tuple(totals.counts))
    more = {}
    if totals.metric == MATTHEWS:
        more = {"accuracy": math.fsum(row[0] for row in totals.amounts) / math.fsum(totals.counts)}
    return Quality(totals.metric, totals.value, mean, len(flat), *per_example, more)


def _check_metric(metric: Any, loss: Loss | None) -> None:
    if metric is not None and metric not in CLASS_METRICS:
        raise InvalidValue(
            "evaluate(metric=)", f"one of {', '.join(CLASS_METRICS)}, or None", repr(metric)
        )
    if metric is not None and loss is not None and not is_default(loss):
        must = "left out with a loss of your own, whose mean is the metric"
        raise InvalidValue("evaluate(metric=)", must, repr(metric))


@dataclass(frozen=True)
class _Answered:
    """A model's output, and whether labels of tokens are those of the next token."""

    output: Any
    shifted: bool

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return losses_of(model, batch, self.output, self.shifted)


def _count(
    totals: _Totals,
    model: nn.Module,
    batch: Mapping[str, Any],
    found: _Answered,
    bits: bool,
    metric: str | None,
) -> None:
    """Adds a batch to the metric that fits the model; leaves the metric at the loss where none
    does."""
    if "start_positions" in batch:
        return
    logits = logits_of(found.output)
    if logits.ndim == 3:
        losses, counted = token_losses(model, batch, logits, found.shifted)
        if found.shifted or is_causal_lm(model):
            name, unit = ("bits_per_character", math.log(2)) if bits else ("perplexity", 1.0)
            totals.add(name, (losses.double() * counted).sum(1) / unit, counted.sum(1))
        else:
            _count_classes(totals, logits, batch["labels"], counted.bool(), metric)
        return
    labels = batch["labels"]
    kind = problem_type(model, labels, logits)
    if kind == "single_label_classification":
        labels = labels.reshape(-1, 1)
        _count_classes(
            totals, logits[:, None], labels, torch.ones_like(labels, dtype=torch.bool), metric
        )
    elif kind == "regression":
        totals.add("mse", found.losses(model, batch))


def _count_classes(
    totals: _Totals, logits: Tensor, labels: Tensor, counted: Tensor, metric: str | None
) -> None:
    """Adds the right predictions and, for Matthews correlation, how often each class is a label and
    is predicted.

    Args:
        totals: What they are added to.
        logits: ``[examples, places, classes]``.
        labels: ``[examples, places]``.
        counted: The same: True where a label counts.
        metric: The one that is asked for.
    """
    predicted = logits.argmax(-1)
    amounts = ((predicted == labels) & counted).sum(1)
    if metric == MATTHEWS:
        classes = torch.arange(logits.shape[-1], device=logits.device)
        of_labels, of_predictions = (
            ((x[..., None] == classes) & counted[..., None]).sum(1) for x in (labels, predicted)
        )
        amounts = torch.cat([amounts[:, None], of_labels, of_predictions], 1)
    totals.add(metric or "accuracy", amounts, counted.sum(1))
