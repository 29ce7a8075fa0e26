"""What first and second order ask of a model's distributions: labels drawn from them, and numbers
to differentiate."""

from __future__ import annotations

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

#: Columns of slopes that an example has without ``draws``: a backward pass each.
COLUMNS = 4


def fisher_targets(
    found: Distributions, seeds: list[int], draws: int | None
) -> tuple[list[Tensor], bool]:
    """Numbers whose slopes, ``g`` an example, are such that ``sum g g'`` is the second derivative
    of the default loss.

    That is the Gauss-Newton matrix, in whatever the slopes are taken of. Where an example has a
    softmax distribution a token, labels are drawn. Elsewhere each class has a column of slopes, and
    where these are more than ``draws`` they are dealt at random into as many groups and added up
    with random signs (``_combined``).

    Args:
        found: The distributions.
        seeds: A seed an example.
        draws: Labels a token, or groups of columns; None is 1 label, or ``COLUMNS`` groups.

    Returns:
        One number a class, a group or a draw, summed over the batch; and whether anything was
        drawn.
    """
    if found.by_token:
        logits = found.logits_counted()
        weights = (found.counted.sum(1, keepdim=True).clamp(min=1) * (draws or 1)).rsqrt()
        of_position = sent(weights.expand_as(found.counted)[found.counted], logits.device)
        losses = [
            cross_entropy(logits, y, reduction="none")
            for y in drawn_labels(found, seeds, draws or 1)
        ]
        return [(of_position * loss).sum() for loss in losses], True
    output = found.logits[:, 0]
    if found.kind == "regression":
        scaled = output * (2 / output.shape[1]) ** 0.5
    elif found.kind == "multi_label_classification":
        p = output.detach().sigmoid()
        scaled = output * (p * (1 - p) / output.shape[1]).sqrt()
    else:
        scaled = output.log_softmax(-1) * output.detach().softmax(-1).sqrt()
    return _targets(scaled, seeds, draws)


def logit_targets(
    found: Distributions, seeds: list[int], draws: int | None
) -> tuple[list[Tensor], bool]:
    """The same for half the squared change of the logits, mean over classes, from which their own
    mean is taken away.

    So every class weighs alike, and an example that the model is sure of as much as one that it is
    not. Where every token has logits, each draw is a sum of them with random signs.

    Args:
        found: The distributions; of outputs that are no softmax, those of ``regression``.
        seeds: A seed an example.
        draws: Sums a token, or groups of columns; None is 1 sum, or ``COLUMNS`` groups.
    """
    softmax = found.kind == "single_label_classification"
    if not found.by_token:
        output = found.logits[:, 0]
        centred = output - output.mean(1, keepdim=True) if softmax else output
        return _targets(centred * (2 / output.shape[1]) ** 0.5, seeds, draws)
    logits = found.logits_counted()  # [counted positions, classes]
    there = logits.detach().isfinite()  # what no answer may begin at is -inf
    numbers = logits.masked_fill(~there, 0)
    centred = (numbers - numbers.sum(1, keepdim=True) / there.sum(1, keepdim=True)).masked_fill(
        ~there, 0
    )
    counts = found.counted.sum(1)  # [examples]
    positions = sent(counts.clamp(min=1).repeat_interleave(counts), logits.device)
    weights = (2 / (positions * there.sum(1) * (draws or 1))).sqrt().unsqueeze(1)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    targets = []
    for _ in range(draws or 1):
        # Classes first: where they are places in a text, padding at its end changes no sign of the
        # others.
        pairs = zip(counts.tolist(), generators, strict=True)
        signs = [
            torch.randint(2, (logits.shape[1], n), generator=g, dtype=torch.int8).T
            for n, g in pairs
        ]
        signed = centred * (sent(torch.cat(signs), logits.device, logits.dtype) * 2 - 1)
        targets.append((signed * weights).sum())
    return targets, True


def _targets(columns: Tensor, seeds: list[int], draws: int | None) -> tuple[list[Tensor], bool]:
    """One number a column ``[batch, columns]``, or a group of columns where they are more; and
    whether these were drawn."""
    groups = draws or COLUMNS
    if columns.shape[1] <= groups:
        return [column.sum() for column in columns.unbind(1)], False
    return _combined(columns, seeds, groups), True


def _combined(columns: Tensor, seeds: list[int], groups: int) -> list[Tensor]:
    """Sums of columns with random signs, one a group, whose slopes' products have the columns'
    products as their mean.

    Two columns meet in a group or not; where they do, the product of their signs has a mean of 0.
    Groups of equal size have less noise than signs for all columns in every sum, and none where
    each column has a group of its own (a count sketch with buckets of equal size: Charikar, Chen,
    Farach-Colton 2002).

    Args:
        columns: ``[batch, columns]``.
        seeds: A seed an example. What is drawn depends on nothing else: not on the logits, whose
            rounding is another in another batch.
        groups: How many.
    """
    n = columns.shape[1]
    group, sign = torch.empty(len(seeds), n, dtype=torch.long), torch.empty(len(seeds), n)
    for example, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        group[example] = torch.randperm(n, generator=generator) % groups
        sign[example] = torch.randint(2, (n,), generator=generator) * 2 - 1
    group = sent(group, columns.device)
    signed = columns * sent(sign, columns.device, columns.dtype)
    return [signed.masked_fill(group != number, 0).sum() for number in range(groups)]


def drawn_labels(found: Distributions, seeds: list[int], draws: int) -> Tensor:
    """``[draws, counted positions]``: labels from the model's own predictions, in the order of
    ``logits_counted``.

    Each example has a generator of its own and inverts its cumulated probabilities, so that its
    labels depend on its seed, on its logits and on nothing else.
    """
    labels = []
    by_example = found.logits_counted().detach().split(found.counted.sum(1).tolist())
    for logits, seed in zip(by_example, seeds, strict=True):
        wide = torch.float32 if logits.device.type == "mps" else torch.float64
        cumulated = logits.to(wide).softmax(-1).cumsum(-1)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(len(cumulated), draws, generator=generator, dtype=torch.float64)
        places = sent(drawn, cumulated.device, cumulated.dtype)
        index = torch.searchsorted(cumulated, places * cumulated[:, -1:], right=True)
        labels.append(index.clamp(max=logits.shape[-1] - 1))
    return torch.cat(labels).T
