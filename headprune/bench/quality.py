"""Quality of a model on given batches: accuracy, perplexity or error, and per-example losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from headprune.core.bars import bar
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
        amounts, counts: Numerators and denominators of the metric, per example. ``value`` is
            ``sum(amounts) / sum(counts)``, and its exponential for perplexity. For BLEU and
            Matthews correlation see ``headprune.core.bleu`` and ``headprune.core.matthews``.
        more: Other metrics of the same answers, by name.
        classes: For one class per example: its label and the model's answer, in data order.
        outputs: The model's answer to each example of other tasks, in data order: label and answer
            of every counted token, label and number of a regression, or a text. None for language
            models and for losses of your own.
    """

    metric: str
    value: float
    loss: float
    n_examples: int
    losses: tuple[float, ...]
    amounts: tuple[Any, ...]
    counts: tuple[float, ...]
    more: Mapping[str, float] = field(default_factory=dict)
    classes: tuple[tuple[int, int], ...] = ()
    outputs: tuple[Any, ...] = ()


@dataclass
class _MetricSums:
    """Numerators and denominators of the metric, for every example.

    Args:
        metric: Its name.
        amounts: Numerators, numbers or tuples of numbers.
        counts: Denominators.
        unread: ``[examples, amounts and a count]`` per batch, on the model's device.
        classes: ``[examples, label and answer]`` per batch, where an example has one class.
        tokens: ``[examples, places, label, answer and whether it counts]`` per batch.
        numbers: ``[examples, label and answer]`` per batch of a regression.
    """

    metric: str = "loss"
    amounts: list[Any] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    unread: list[Tensor] = field(default_factory=list)
    classes: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)

    def outputs(self) -> list[Any]:
        """Read the answers to every example that are no single class."""
        found: list[Any] = []
        for rows in in_main_memory(self.tokens):
            found += map(_counted, rows.tolist())
        for rows in in_main_memory(self.numbers):
            found += map(tuple, rows.tolist())
        return found

    def add(self, metric: str, amounts: Tensor, counts: Tensor | None = None) -> None:
        """Add a batch: amounts ``[examples]`` or ``[examples, several]``, counts ``[examples]``."""
        self.metric = metric
        if amounts.ndim == 1:
            amounts = amounts[:, None]
        rows = in_fp64(amounts)
        counts = torch.ones_like(rows[:, 0]) if counts is None else in_fp64(counts)
        self.unread.append(torch.cat([rows, counts[:, None]], 1))

    def read(self) -> None:
        """Read the numbers of all batches at once, because a read waits for an accelerator."""
        for rows in in_main_memory(self.unread):
            for *amounts, count in rows.tolist():
                self.amounts.append(tuple(amounts) if len(amounts) > 1 else amounts[0])
                self.counts.append(count)
        self.unread = []

    @property
    def value(self) -> float:
        """The metric of the sums."""
        if self.metric == MATTHEWS:
            return float(matthews(np.array(self.amounts).sum(0), math.fsum(self.counts)))
        value = math.fsum(self.amounts) / math.fsum(self.counts)
        if self.metric == "perplexity":
            return math.exp(min(value, 700.0))  # exp overflows above 709
        return value


def _counted(places: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Label and answer of the places of an example that count."""
    return tuple((label, answer) for label, answer, counts in places if counts)


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    bits: bool = False,
    metric: ClassMetric | None = None,
) -> Quality:
    """Evaluate a model on batches; the model does not change.

    Args:
        model: The model.
        batches: Batches with labels.
        loss: Your own per-example loss; the metric is then the mean loss. The default loss is
            compared with the model's own on the first batch.
        bits: Report bits per character instead of perplexity, for causal language models whose
            tokens are characters.
        metric: Of single-label classification: ``accuracy``, the default, or ``matthews`` for
            Matthews correlation; ``Quality.more`` has the accuracy then.

    Raises:
        InvalidValue: no batch, no labels, a loss that is not finite; a default loss that is not the
            model's own; a metric of classification for another kind of model.
    """
    _check_metric(metric, loss)
    totals = _MetricSums()
    losses = []
    reading: Reading | None = None
    device = device_of(model)
    batches = Batches.of(batches)

    # 1. Losses and metric of every batch, on the model's device.
    with undisturbed(model, packed=True), torch.no_grad(), explained(model, batches):
        for number, batch in enumerate(bar(batches, "evaluation")):
            batch = to_device(batch, device)
            # For another loss the mean loss is the metric.
            if loss is not None and not is_default(loss):
                losses.append(shaped_losses(loss, model, batch, number))
                continue
            # On the first batch: does the model shift labels, and is its loss the default one?
            if reading is None:
                reading = reading_of(model, batch)
                reading.check()
            prediction = _Prediction(predict(model, batch), reading.shifted)
            losses.append(shaped_losses(prediction.losses, model, batch, number))
            _count(totals, model, batch, prediction, bits, metric)
            if metric is not None and totals.metric != metric:
                must = "left out for a model that gives no single class to an example or a token"
                got = f"{metric!r} for {type(model).__name__}"
                raise InvalidValue("evaluate(metric=)", must, got)
    if not losses:
        raise InvalidValue(*EMPTY)

    # 2. Copy once, at the end, because every copy waits for an accelerator.
    losses = in_main_memory(losses)
    check_finite(enumerate(losses))
    flat = torch.cat(losses).double()  # [examples]
    totals.read()

    # 3. The metric; the mean loss where no label counts for another.
    if not sum(totals.counts):
        totals = _MetricSums("loss", flat.tolist(), [1.0] * len(flat))
    classes = [tuple(row) for rows in in_main_memory(totals.classes) for row in rows.tolist()]
    more = {}
    if totals.metric == MATTHEWS:
        n_right = math.fsum(row[0] for row in totals.amounts)
        more["accuracy"] = n_right / math.fsum(totals.counts)
    return Quality(
        metric=totals.metric,
        value=totals.value,
        loss=float(flat.mean()),
        n_examples=len(flat),
        losses=tuple(flat.tolist()),
        amounts=tuple(totals.amounts),
        counts=tuple(totals.counts),
        more=more,
        classes=tuple(classes),
        outputs=tuple(totals.outputs()),
    )


def _check_metric(metric: Any, loss: Loss | None) -> None:
    if metric is None:
        return
    if metric not in CLASS_METRICS:
        must = f"one of {', '.join(CLASS_METRICS)}, or None"
        raise InvalidValue("evaluate(metric=)", must, repr(metric))
    if loss is not None and not is_default(loss):
        must = "left out with a loss of your own, whose mean is the metric"
        raise InvalidValue("evaluate(metric=)", must, repr(metric))


@dataclass(frozen=True)
class _Prediction:
    """A model's output, and whether labels of tokens are those of the next token."""

    output: Any
    shifted: bool

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return losses_of(model, batch, self.output, self.shifted)


def _count(
    totals: _MetricSums,
    model: nn.Module,
    batch: Mapping[str, Any],
    prediction: _Prediction,
    bits: bool,
    metric: str | None,
) -> None:
    """Add a batch to the metric that fits the model; without one the metric is the loss."""
    # Answers to questions need the texts, see `evaluate_answers`.
    if "start_positions" in batch:
        return
    logits = logits_of(prediction.output)
    if logits.ndim == 3:
        _count_tokens(totals, model, batch, logits, prediction.shifted, bits, metric)
        return
    labels = batch["labels"]
    kind = problem_type(model, labels, logits)
    if kind == "single_label_classification":
        labels = labels.reshape(-1, 1)  # [examples, 1]
        counted = torch.ones_like(labels, dtype=torch.bool)
        totals.classes.append(torch.cat([labels, logits.argmax(-1, keepdim=True)], 1))
        # One place per example: logits [examples, 1, classes].
        _count_classes(totals, logits[:, None], labels, counted, metric)
    elif kind == "regression":
        totals.add("mse", prediction.losses(model, batch))
        if logits[0].numel() == 1:
            pairs = [labels.reshape(-1).double(), logits.reshape(-1).double()]
            totals.numbers.append(torch.stack(pairs, 1))


def _count_tokens(
    totals: _MetricSums,
    model: nn.Module,
    batch: Mapping[str, Any],
    logits: Tensor,
    shifted: bool,
    bits: bool,
    metric: str | None,
) -> None:
    """Add a batch of labelled tokens: a language model's losses, or right predictions."""
    losses, counted = token_losses(model, batch, logits, shifted)  # [examples, tokens]
    if not shifted and not is_causal_lm(model):
        labels, places = batch["labels"], counted.bool()
        _count_classes(totals, logits, labels, places, metric)
        totals.tokens.append(torch.stack([labels, logits.argmax(-1), places.long()], -1))
        return
    name = "perplexity"
    unit = 1.0
    if bits:
        name = "bits_per_character"
        unit = math.log(2)
    totals.add(name, (losses.double() * counted).sum(1) / unit, counted.sum(1))


def _count_classes(
    totals: _MetricSums, logits: Tensor, labels: Tensor, counted: Tensor, metric: str | None
) -> None:
    """Add right predictions and, for Matthews correlation, the counts of each class.

    Args:
        totals: The sums to add to.
        logits: ``[examples, places, classes]``.
        labels: ``[examples, places]``.
        counted: ``[examples, places]``, True where a label counts.
        metric: The wanted metric.
    """
    predicted = logits.argmax(-1)  # [examples, places]
    amounts = ((predicted == labels) & counted).sum(1)
    if metric == MATTHEWS:
        # [examples, 1 + classes + classes]: right, per label, per prediction
        n_classes = logits.shape[-1]
        per_label = _count_each(labels, counted, n_classes)
        per_prediction = _count_each(predicted, counted, n_classes)
        amounts = torch.cat([amounts[:, None], per_label, per_prediction], 1)
    totals.add(metric or "accuracy", amounts, counted.sum(1))


def _count_each(x: Tensor, counted: Tensor, n_classes: int) -> Tensor:
    """Count each class in ``x [examples, places]``: ``[examples, classes]``."""
    classes = torch.arange(n_classes, device=x.device)
    return ((x[..., None] == classes) & counted[..., None]).sum(1)
