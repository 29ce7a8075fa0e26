"""Numbers to differentiate, made of a model's predicted distributions, and labels drawn from
them."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headprune.model.distributions import Distributions, content_seeds, distributions
from headprune.model.transfers import sent

__all__ = [
    "Distributions",
    "content_seeds",
    "distributions",
    "drawn_labels",
    "fisher_targets",
    "logit_targets",
]

#: Columns of slopes per example, where ``draws`` is not given: one backward pass each.
COLUMNS = 4

#: Numbers to differentiate, each summed over the batch; and whether anything was drawn.
Targets: TypeAlias = tuple[list[Tensor], bool]


def fisher_targets(predicted: Distributions, seeds: list[int], draws: int | None) -> Targets:
    """Numbers whose slopes' products are the second derivative of the default loss.

    With slopes ``g`` of an example, ``sum g g'`` is the Gauss-Newton matrix, with respect to
    anything. Where an example has a softmax distribution per token, labels are drawn. Elsewhere
    each class has a column of slopes. More columns than ``draws`` are dealt at random into groups
    and added up with random signs (``_combined``).

    Args:
        predicted: The distributions.
        seeds: One seed per example.
        draws: Labels per token, or groups of columns; None is 1 label, or ``COLUMNS`` groups.

    Returns:
        One number per class, group or draw.
    """
    if predicted.by_token:
        logits = predicted.logits_counted()  # [counted positions, classes]
        n_draws = draws or 1
        # By position: an example's loss is the mean over its tokens and draws.
        weights = (predicted.counted.sum(1, keepdim=True).clamp(min=1) * n_draws).rsqrt()
        weights = sent(weights.expand_as(predicted.counted)[predicted.counted], logits.device)
        targets = []
        for labels in drawn_labels(predicted, seeds, n_draws):
            losses = cross_entropy(logits, labels, reduction="none")
            targets.append((weights * losses).sum())
        return targets, True
    output = predicted.logits[:, 0]  # [examples, classes]
    # Each column times the root of its second derivative.
    if predicted.kind == "regression":
        scaled = output * (2 / output.shape[1]) ** 0.5
    elif predicted.kind == "multi_label_classification":
        p = output.detach().sigmoid()
        scaled = output * (p * (1 - p) / output.shape[1]).sqrt()
    else:
        scaled = output.log_softmax(-1) * output.detach().softmax(-1).sqrt()
    return _targets(scaled, seeds, draws)


def logit_targets(predicted: Distributions, seeds: list[int], draws: int | None) -> Targets:
    """Numbers whose slopes' products are the second derivative of the squared change of the logits.

    That is half the squared change, mean over classes, of logits less their own mean. So all
    classes weigh alike, and so do examples of which the model is sure or unsure.
    Where every token has logits, each draw is a sum of them with random signs.

    Args:
        predicted: The distributions; of outputs that are no softmax, those of ``regression``.
        seeds: One seed per example.
        draws: Sums per token, or groups of columns; None is 1 sum, or ``COLUMNS`` groups.

    Returns:
        One number per class, group or draw.
    """
    if not predicted.by_token:
        output = predicted.logits[:, 0]  # [examples, classes]
        if predicted.kind == "single_label_classification":
            columns = output - output.mean(1, keepdim=True)
        else:
            columns = output
        return _targets(columns * (2 / output.shape[1]) ** 0.5, seeds, draws)

    # 1. Logits less their mean, [counted positions, classes].
    logits = predicted.logits_counted()
    finite = logits.detach().isfinite()  # a place where no answer may begin has -inf
    numbers = logits.masked_fill(~finite, 0)
    mean = numbers.sum(1, keepdim=True) / finite.sum(1, keepdim=True)
    centred = (numbers - mean).masked_fill(~finite, 0)

    # 2. The weight of every position: a mean over tokens, classes and draws.
    n_draws = draws or 1
    counts = predicted.counted.sum(1)  # [examples]
    positions = sent(counts.clamp(min=1).repeat_interleave(counts), logits.device)
    weights = (2 / (positions * finite.sum(1) * n_draws)).sqrt().unsqueeze(1)

    # 3. Sums with random signs.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    targets = []
    for _ in range(n_draws):
        signs = _signs(generators, counts.tolist(), logits.shape[1])
        signed = centred * (sent(signs, logits.device, logits.dtype) * 2 - 1)
        targets.append((signed * weights).sum())
    return targets, True


def _signs(generators: list[torch.Generator], counts: list[int], n_classes: int) -> Tensor:
    """``[positions, classes]`` of 0 and 1, of every example by its own generator."""
    signs = []
    for generator, n in zip(generators, counts, strict=True):
        # Classes first: where they are places in a text, padding at its end changes no sign of the
        # others.
        drawn = torch.randint(2, (n_classes, n), generator=generator, dtype=torch.int8)
        signs.append(drawn.T)
    return torch.cat(signs)


def _targets(columns: Tensor, seeds: list[int], draws: int | None) -> Targets:
    """One number per column of ``[batch, columns]``; where they are too many, per group."""
    groups = draws or COLUMNS
    if columns.shape[1] <= groups:
        return [column.sum() for column in columns.unbind(1)], False
    return _combined(columns, seeds, groups), True


def _combined(columns: Tensor, seeds: list[int], groups: int) -> list[Tensor]:
    """Sums of columns with random signs, one per group.

    The mean of their slopes' products is that of the columns: two columns in one group have signs
    whose product has a mean of 0. Groups of equal size have less noise than signs for all columns
    in every sum, and none where each column has a group of its own (a count sketch with buckets of
    equal size: Charikar, Chen, Farach-Colton 2002).

    Args:
        columns: ``[batch, columns]``.
        seeds: One seed per example. Draws depend on nothing else: not on the logits, whose rounding
            is another in another batch.
        groups: How many.
    """
    n = columns.shape[1]
    # Both [batch, columns].
    group = torch.empty(len(seeds), n, dtype=torch.long)
    sign = torch.empty(len(seeds), n)
    for example, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        group[example] = torch.randperm(n, generator=generator) % groups
        sign[example] = torch.randint(2, (n,), generator=generator) * 2 - 1
    group = sent(group, columns.device)
    signed = columns * sent(sign, columns.device, columns.dtype)
    return [signed.masked_fill(group != number, 0).sum() for number in range(groups)]


def drawn_labels(predicted: Distributions, seeds: list[int], draws: int) -> Tensor:
    """Labels from the model's own predictions, in the order of ``logits_counted``.

    Each example has a generator of its own and inverts its cumulated probabilities. So its labels
    depend on its seed and its logits alone.

    Returns:
        ``[draws, counted positions]``.
    """
    labels = []
    by_example = predicted.logits_counted().detach().split(predicted.counted.sum(1).tolist())
    for logits, seed in zip(by_example, seeds, strict=True):
        # [positions, classes] in fp64, which mps has not.
        wide = torch.float32 if logits.device.type == "mps" else torch.float64
        cumulated = logits.to(wide).softmax(-1).cumsum(-1)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(len(cumulated), draws, generator=generator, dtype=torch.float64)
        places = sent(drawn, cumulated.device, cumulated.dtype)
        index = torch.searchsorted(cumulated, places * cumulated[:, -1:], right=True)
        labels.append(index.clamp(max=logits.shape[-1] - 1))
    return torch.cat(labels).T
