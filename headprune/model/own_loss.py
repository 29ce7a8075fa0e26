"""The default loss compared with the model's own ``loss``, which it must agree with."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headprune.core.errors import InvalidValue
from headprune.model.inside import bare
from headprune.model.losses import (
    default_loss,
    has_known_logits,
    has_labels,
    is_encoder_decoder,
    logits_of,
    losses_of,
    predict,
    problem_type,
    reads_next,
)
from headprune.model.running import call, forward_parameters, undisturbed
from headprune.model.transfers import in_main_memory

_IGNORED = -100
_HINT = "Pass loss=, a callable (model, batch) -> Tensor[batch] of per-example losses."
#: Relative difference that two computations of one mean may have.
_CLOSE = 2e-4
_CLOSE_IN_16_BITS = 2e-2
#: Absolute difference that they may have.
_ATOL = 2e-5
_NARROW_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Reading:
    """The default loss of one call, after the comparison with the model's own loss.

    Args:
        shifted: Whether labels of tokens are those of the next token.
        refusal: Raised when the loss is called, because the model's own loss differs.
        notes: What the user should know.
        is_assumed: Whether neither labels nor the model's class say that its output is of classes.
    """

    shifted: bool
    refusal: InvalidValue | None = None
    notes: tuple[str, ...] = ()
    is_assumed: bool = False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Losses ``[batch]``; see ``default_loss``."""
        self.check()
        return losses_of(model, batch, predict(model, batch), self.shifted)

    def check(self) -> None:
        """Raise the refusal, if there is one."""
        if self.refusal is not None:
            raise self.refusal


def is_default(loss: Any) -> bool:
    """Whether a loss is the default one, compared or not."""
    return loss is default_loss or isinstance(loss, Reading)


def output_notes(loss: Any, reader: str) -> tuple[str, ...]:
    """Notes of what reads a model's output as distributions over classes, and no loss.

    Args:
        loss: The loss of the call.
        reader: What reads the output.
    """
    if not is_default(loss):
        return (f"loss= was not used: {reader} reads only the model's output.",)
    if not isinstance(loss, Reading) or not loss.is_assumed:
        return ()
    return (
        "The model's output was read as logits of a softmax over its last axis, but neither the"
        " labels nor the model's class confirm that. If it is something else, pass loss=.",
    )


def shift_of(loss: Any) -> bool | None:
    """Whether a loss takes labels as those of the next token; None if unknown."""
    return loss.shifted if isinstance(loss, Reading) else None


def reading_of(model: nn.Module, batch: Any) -> Reading:
    """Find how a model reads the labels of tokens, by its own loss or else by its class.

    The model runs once, in evaluation mode, with the labels. What its loss has beyond the labels is
    switched off for that: weights of classes, smoothed labels, a router's share. An accelerator is
    waited for once.

    Args:
        model: The model; its state is restored.
        batch: On the model's device.

    Returns:
        A loss. It refuses to be called where the model's own loss agrees with no reading of the
        labels.
    """
    by_class = Reading(reads_next(model))
    if not has_labels(batch):
        return replace(by_class, is_assumed=not has_known_logits(model))
    if not _takes_answers(model):
        return by_class

    # 1. The model's own loss. Its forward may raise anything: what is wrong with the batch raises
    # again where the loss is needed.
    plain = _PlainLosses()
    try:
        with undisturbed(model, frozen=False), torch.no_grad(), plain:
            output = call(model, _inputs_for_own_loss(model, batch))
    except Exception as error:
        return Reading(by_class.shifted, notes=(_not_compared(error),))
    own = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(own, Tensor) or own.numel() != 1:
        return by_class

    # 2. The default loss, by every reading of the labels.
    try:
        with torch.no_grad():
            ours = _means_by_reading(model, batch, output)
    except Exception:  # the default loss itself explains what it cannot take  # nosec B110
        return by_class

    # 3. Compare, with one copy from the accelerator.
    stacked = map(torch.stack, ours.values())
    theirs, *copied = in_main_memory([own.detach().reshape(1).float(), *stacked])
    means = {shifted: row.tolist() for shifted, row in zip(ours, copied, strict=True)}
    close = _CLOSE_IN_16_BITS if own.dtype in _NARROW_TYPES else _CLOSE
    return _compared(model, by_class.shifted, float(theirs), means, close, plain)


def _compared(
    model: nn.Module,
    by_class: bool,
    own: float,
    means: dict[bool, list[float]],
    close: float,
    plain: _PlainLosses,
) -> Reading:
    """The reading whose mean is the model's own loss.

    Args:
        model: The model.
        by_class: The reading by its class, which is preferred.
        own: Its loss.
        means: By reading the mean, taken in all the ways in which a model may take it.
        close: The relative difference that they may have.
        plain: What was switched off in the model's loss.
    """
    if not means or not math.isfinite(own):
        return Reading(by_class)
    # The reading by the class first: a batch may agree with both.
    for shifted in sorted(means, key=lambda shifted: shifted is not by_class):
        if any(abs(mean - own) <= _ATOL + close * abs(own) for mean in means[shifted]):
            return Reading(shifted, notes=plain.notes())

    # No reading agrees: the first mean of each goes into the message.
    if len(means) > 1:
        unshifted = f"{means[False][0]:.6g} with the labels as they are"
        got = f"{unshifted} and {means[True][0]:.6g} with labels of the next token"
    else:
        got = f"{means[by_class][0]:.6g}"
    must = f"the own loss of {type(bare(model)).__name__}, {own:.6g} on the first batch"
    refusal = InvalidValue("the default loss", must, got, _HINT)
    return Reading(by_class, refusal, is_assumed=not has_known_logits(model))


def _not_compared(error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0][:120]
    return (
        "The default loss was not compared with the model's own, which failed:"
        f" {type(error).__name__}: {reason}"
    )


def _takes_answers(model: nn.Module) -> bool:
    """Whether the model's ``forward`` can be called with labels."""
    parameters = forward_parameters(model)
    return parameters is None or not parameters.isdisjoint({"labels", "start_positions"})


def _inputs_for_own_loss(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch, without what would add to the model's own loss."""
    inputs = dict(batch)
    # The Trainer's count of items over several batches makes the loss a part of another mean.
    inputs.pop("num_items_in_batch", None)
    # A mixture of experts adds the router's share to its loss.
    router = "output_router_logits"
    if router in inspect.signature(bare(model).forward).parameters:
        inputs[router] = False
    return inputs


# ---------------------------------------------------------------- the default loss


def _means_by_reading(
    model: nn.Module, batch: Mapping[str, Any], output: Any
) -> dict[bool, list[Tensor]]:
    """By reading of the labels, the mean of the default loss in all the ways to take it.

    Padding counts here as its labels say: the default loss leaves it out, a model's own may not.
    """
    by_class = reads_next(model)
    if "start_positions" in batch:
        return {by_class: [_mean_of_ends(batch, output)]}
    logits = logits_of(output)
    if logits.dtype in _NARROW_TYPES:
        logits = logits.float()
    if logits.ndim == 2:
        return {by_class: list(_example_means(model, batch, logits))}
    labels = batch["labels"]
    if labels.shape != logits.shape[:2]:
        return {}
    mask = None if is_encoder_decoder(model) else batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        mask = torch.ones_like(labels)
    return {
        False: list(_token_means(logits, labels, mask)),
        True: list(_token_means(logits[:, :-1], labels[:, 1:], mask[:, 1:])),
    }


def _token_means(logits: Tensor, labels: Tensor, mask: Tensor) -> Iterator[Tensor]:
    """Means over tokens and over examples, and sums; each with and without padding.

    Args:
        logits: ``[batch, tokens, classes]``.
        labels: ``[batch, tokens]``.
        mask: ``[batch, tokens]``, 0 at padding.
    """
    losses = functional.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", ignore_index=_IGNORED
    )
    counted = (labels != _IGNORED).to(losses)
    for counts in (counted, counted * (mask != 0)):
        sums, n = (losses * counts).sum(1), counts.sum(1)
        yield sums.sum() / n.sum()
        yield sums.sum()
        yield (sums / n.clamp(min=1)).mean()


def _example_means(model: nn.Module, batch: Mapping[str, Any], logits: Tensor) -> Iterator[Tensor]:
    """The mean over examples, and their sum."""
    labels = batch["labels"]
    losses = losses_of(model, batch, {"logits": logits})
    if problem_type(model, labels, logits) == "single_label_classification":
        yield losses.sum() / (labels != _IGNORED).sum()
    else:
        yield losses.mean()
    yield losses.sum()


def _mean_of_ends(batch: Mapping[str, Any], output: Any) -> Tensor:
    """The mean over both ends of the answers, with padding in the softmax as in Transformers."""
    means = []
    for name in ("start", "end"):
        logits = output[f"{name}_logits"].float()
        length = logits.shape[1]
        positions = batch[f"{name}_positions"].reshape(len(logits)).clamp(0, length)
        means.append(functional.cross_entropy(logits, positions, ignore_index=length))
    return torch.stack(means).mean()


# ---------------------------------------------------------------- the model's own loss


class _PlainLosses(TorchFunctionMode):
    """Computes torch's losses in fp32, without weights of classes and smoothed labels."""

    def __init__(self) -> None:
        super().__init__()
        self.switched_off: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LOSSES:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
        for name, description in _EXTRAS.items():
            extra = given.get(name)
            if isinstance(extra, Tensor) and extra.ndim > 1:  # a weight for every number: a mask
                continue
            given.pop(name, None)
            if isinstance(extra, Tensor) or extra:
                self.switched_off.add(description)
        if given["input"].dtype in _NARROW_TYPES:
            given["input"] = given["input"].float()
        return func(**given)

    def notes(self) -> tuple[str, ...]:
        """A note on what only the model's own loss has, if there is anything."""
        if not self.switched_off:
            return ()
        extras = " and ".join(sorted(self.switched_off))
        return (
            f"The model's own loss has {extras}; the default loss does not. Pass loss= for them.",
        )


_LOSSES: tuple[Callable[..., Any], ...] = (
    functional.cross_entropy,
    functional.nll_loss,
    functional.binary_cross_entropy_with_logits,
)
#: Arguments of torch's losses that the default loss does without.
_EXTRAS = {
    "weight": "weights of classes",
    "pos_weight": "weights of classes",
    "label_smoothing": "smoothed labels",
}
