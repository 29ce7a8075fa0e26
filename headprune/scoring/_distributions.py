"""What first and second order ask of a model's distributions: labels drawn from them, and numbers to differentiate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headprune.model.distributions import Distributions, content_seeds, distributions
from headprune.model.transfers import sent

__all__ = ["Distributions", "content_seeds", "distributions", "drawn_labels", "fisher_targets"]


def fisher_targets(found: Distributions, seeds: list[int], draws: int | None) -> tuple[list[Tensor], bool]:
    """Numbers whose slopes, ``g`` an example, are such that ``sum g g'`` is the second derivative of the default loss.

    That is the Gauss-Newton matrix, in whatever the slopes are taken of. Labels are drawn where an example has a
    softmax distribution a token, or where ``draws`` says how many.

    Returns:
        One number a class or a draw, summed over the batch; and whether labels were drawn.
    """
    softmax = found.kind == "single_label_classification"
    if softmax and (draws is not None or found.by_token):
        logits = found.logits_counted()
        weights = (found.counted.sum(1, keepdim=True).clamp(min=1) * (draws or 1)).rsqrt()
        of_position = sent(weights.expand_as(found.counted)[found.counted], logits.device)
        losses = [cross_entropy(logits, y, reduction="none") for y in drawn_labels(found, seeds, draws or 1)]
        return [(of_position * loss).sum() for loss in losses], True
    output = found.logits[:, 0]
    if found.kind == "regression":
        scaled = output * (2 / output.shape[1]) ** 0.5
    elif found.kind == "multi_label_classification":
        p = output.detach().sigmoid()
        scaled = output * (p * (1 - p) / output.shape[1]).sqrt()
    else:
        scaled = output.log_softmax(-1) * output.detach().softmax(-1).sqrt()
    return [column.sum() for column in scaled.unbind(1)], False


def drawn_labels(found: Distributions, seeds: list[int], draws: int) -> Tensor:
    """``[draws, counted positions]``: labels from the model's own predictions, in the order of ``logits_counted``.

    Each example has a generator of its own and inverts its cumulated probabilities, so that its labels depend on its
    seed, on its logits and on nothing else.
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
