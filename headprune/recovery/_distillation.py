"""Distillation: how far the model's logits are from the teacher's, one number an example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.running import device_of, to_device, token_mask

_WHERE = "Finetune(distill=)"


def distillation(teacher: nn.Module, calls: Sequence[tuple[Any, Any, Any]], temperature: float) -> Tensor:
    """``T² · KL(softmax(teacher / T) || softmax(model / T))`` of the last call of the model, one number an example.

    Logits of tokens are averaged over the tokens that are no padding; start and end logits of question answering
    are distributions over the tokens, and are averaged.

    Args:
        teacher: Called with what the model was called with, without gradients.
        calls: The model's calls: positional arguments, keyword arguments, output.
        temperature: T.

    Returns:
        ``[batch]``, differentiable in the model's output.

    Raises:
        InvalidValue: the loss did not call the model; outputs without logits, of one class, or of unlike shapes.
    """
    if not calls:
        raise InvalidValue(_WHERE, "used with a loss that calls model(...)", "one that did not")
    args, kwargs, output = calls[-1]
    device = device_of(teacher)
    with torch.no_grad():
        target = teacher(*to_device(args, device), **to_device(kwargs, device))
    ours, theirs = _logits(output), _logits(target)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        must = f"used with a teacher of the same outputs, {[list(t.shape) for t in ours]}"
        raise InvalidValue(_WHERE, must, [list(t.shape) for t in theirs])
    pairs = zip(ours, theirs, strict=True)
    return torch.stack([_divergence(s, t.to(s.device), kwargs, temperature) for s, t in pairs]).mean(0)


def _divergence(student: Tensor, teacher: Tensor, inputs: Mapping[str, Any], temperature: float) -> Tensor:
    wide = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = (nn.functional.log_softmax(x.to(wide) / temperature, dim=-1) for x in (teacher, student))
    gaps = temperature**2 * nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    if gaps.ndim == 1:
        return gaps
    mask = token_mask(inputs, (gaps.shape[0], gaps.shape[1]))
    if mask is None or gaps.ndim != 2:
        return gaps.flatten(1).mean(1)
    return gaps.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def _logits(output: Any) -> list[Tensor]:
    if isinstance(output, Mapping):
        names = ("logits",) if "logits" in output else ("start_logits", "end_logits")
        found: list[Any] = [output.get(name) for name in names]
    elif isinstance(output, (tuple, list)):
        found = [t for t in output if isinstance(t, Tensor) and t.is_floating_point() and t.ndim >= 2][:1]
    else:
        found = [output]
    tensors = [t for t in found if isinstance(t, Tensor) and t.is_floating_point() and t.ndim >= 2]
    if not tensors or len(tensors) != len(found):
        raise InvalidValue(_WHERE, "used with models that return logits [batch, ..., classes]", type(output).__name__)
    if any(t.shape[-1] < 2 for t in tensors):
        hint = "A regression has no distribution to distil; train it on the task loss alone."
        raise InvalidValue(_WHERE, "used with logits of two classes or more", list(tensors[0].shape), hint)
    return tensors
