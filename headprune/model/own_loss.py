"""The default loss compared with the model's own ``loss``: it must judge what the model was trained
to say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headprune.core.errors import InvalidValue
from headprune.model.inside import bare
from headprune.model.losses import (
    default_loss,
    has_labels,
    is_encoder_decoder,
    logits_of,
    losses_of,
    predict,
    problem_type,
    reads_next,
)
from headprune.model.running import call, undisturbed
from headprune.model.transfers import in_main_memory

_IGNORED = -100
_HINT = "Pass loss=, a callable (model, batch) -> Tensor[batch] of per-example losses."
#: How far two computations of one mean may be apart, relative; the other where a model computes its
#: own in 16 bits.
_CLOSE, _NARROW = 2e-4, 2e-2
_ATOL = 2e-5
_NARROW_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Reading:
    """The default loss of one call, with what the model's own loss has said on the first batch.

    Args:
        shifted: Whether labels of tokens are those of the next token.
        refusal: Raised where the loss is asked: the model's own is another one.
        notes: What the user should know.
    """

    shifted: bool
    refusal: InvalidValue | None = None
    notes: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Losses ``[batch]``; see ``default_loss``."""
        self.check()
        return losses_of(model, batch, predict(model, batch), self.shifted)

    def check(self) -> None:
        """Raises what it refuses."""
        if self.refusal is not None:
            raise self.refusal


def is_default(loss: Any) -> bool:
    """Whether a loss is the default one, compared or not."""
    return loss is default_loss or isinstance(loss, Reading)


def shift_of(loss: Any) -> bool | None:
    """How a loss reads labels of tokens, where that is known."""
    return loss.shifted if isinstance(loss, Reading) else None


def reading_of(model: nn.Module, batch: Any) -> Reading:
    """How a model reads the labels of tokens, by its own loss on a batch where it gives one; else
    by its class.

    The model runs once, in evaluation mode, with the labels. What its loss has beyond the labels is
    switched off for
    that: weights of classes, smoothed labels, a router's share. One number is read from an
        accelerator.

    Args:
        model: The model; left as it was found.
        batch: On the model's device.

    Returns:
        A loss. It refuses to be asked where the model's own loss agrees with no reading of the
        labels.
    """
    by_class = Reading(reads_next(model))
    if not has_labels(batch) or not _takes_answers(model):
        return by_class
    plain = _Plain()
    # A count of items over several batches, which the Trainer gives, would make the own loss a part
    # of another mean.
    given = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
    try:
        with undisturbed(model, frozen=False), torch.no_grad(), plain:
            output = call(model, {**given, **_without_router(model)})
    # The forward is not ours. What is wrong with the batch shows again where it is needed.
    except Exception as error:
        return Reading(by_class.shifted, notes=(_not_compared(error),))
    own = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(own, Tensor) or own.numel() != 1:
        return by_class
    try:
        with torch.no_grad():
            ours = _readings(model, batch, output)
    except Exception:  # no output or labels that the default loss takes: it says so itself  # nosec B110
        return by_class
    numbers = iter(
        in_main_memory(
            [own.detach().reshape(1).float(), *(torch.stack(means) for means in ours.values())]
        )
    )
    theirs = float(next(numbers))
    found = {shifted: next(numbers).tolist() for shifted in ours}
    return _judged(
        model,
        by_class.shifted,
        theirs,
        found,
        _NARROW if own.dtype in _NARROW_TYPES else _CLOSE,
        plain,
    )


def _judged(
    model: nn.Module,
    by_class: bool,
    own: float,
    found: dict[bool, list[float]],
    close: float,
    plain: _Plain,
) -> Reading:
    """The reading whose mean is the model's own loss.

    Args:
        model: The model.
        by_class: The reading by its class, which is preferred.
        own: Its loss.
        found: By reading the mean, taken in all the ways in which a model may take it.
        close: How far apart they may be.
        plain: What was switched off in the model's loss.
    """
    if not found or own != own or own in (float("inf"), float("-inf")):
        return Reading(by_class)
    for shifted in sorted(found, key=lambda x: x is not by_class):
        if any(abs(mean - own) <= _ATOL + close * abs(own) for mean in found[shifted]):
            return Reading(shifted, notes=plain.notes())
    words = {False: "with the labels as they are", True: "with labels of the next token"}
    means = [f"{values[0]:.6g} {words[shifted]}" for shifted, values in found.items()]
    name = type(bare(model)).__name__
    got = " and ".join(means if len(found) > 1 else [f"{found[by_class][0]:.6g}"])
    refusal = InvalidValue(
        "the default loss", f"the own loss of {name}, {own:.6g} on the first batch", got, _HINT
    )
    return Reading(by_class, refusal)


def _not_compared(error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0][:120]
    return (
        "The default loss was not compared with the model's own, which failed:"
        f" {type(error).__name__}: {reason}"
    )


def _takes_answers(model: nn.Module) -> bool:
    parameters = inspect.signature(bare(model).forward).parameters
    return (
        any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        or "labels" in parameters
        or ("start_positions" in parameters)
    )


def _without_router(model: nn.Module) -> dict[str, Any]:
    """What has a mixture of experts leave the router's share out of its loss."""
    name = "output_router_logits"
    return {name: False} if name in inspect.signature(bare(model).forward).parameters else {}


# ---------------------------------------------------------------- ours


def _readings(model: nn.Module, batch: Mapping[str, Any], output: Any) -> dict[bool, list[Tensor]]:
    """By reading of the labels what the mean of the default loss comes to, in all the ways to take
    it.

    Padding counts here as its labels say: the default loss leaves it out, a model's own need not.
    """
    by_class = reads_next(model)
    if "start_positions" in batch:
        return {by_class: [_ends(batch, output)]}
    logits = logits_of(output)
    logits = logits.float() if logits.dtype in _NARROW_TYPES else logits
    if logits.ndim == 2:
        return {by_class: list(_of_examples(model, batch, logits))}
    labels = batch["labels"]
    mask = None if is_encoder_decoder(model) else batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        mask = torch.ones_like(labels)
    places = {False: (slice(None), slice(None)), True: (slice(None, -1), slice(1, None))}
    if labels.shape != logits.shape[:2]:
        return {}
    return {
        shifted: list(_token_means(logits[:, read], labels[:, said], mask[:, said]))
        for shifted, (read, said) in places.items()
    }


def _token_means(logits: Tensor, labels: Tensor, mask: Tensor) -> Iterator[Tensor]:
    """Means over tokens, over examples, and both without padding; sums, whose slopes are those of
    means."""
    losses = functional.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", ignore_index=_IGNORED
    )
    counted = (labels != _IGNORED).to(losses)
    for counts in (counted, counted * (mask != 0)):
        sums, n = (losses * counts).sum(1), counts.sum(1)
        yield sums.sum() / n.sum()
        yield sums.sum()
        yield (sums / n.clamp(min=1)).mean()


def _of_examples(model: nn.Module, batch: Mapping[str, Any], logits: Tensor) -> Iterator[Tensor]:
    """The mean over examples, and their sum."""
    labels = batch["labels"]
    losses = losses_of(model, batch, {"logits": logits})
    if problem_type(model, labels, logits) == "single_label_classification":
        yield losses.sum() / (labels != _IGNORED).sum()
    else:
        yield losses.mean()
    yield losses.sum()


def _ends(batch: Mapping[str, Any], output: Any) -> Tensor:
    """As Transformers takes it, with padding in the softmax."""
    means = []
    for name in ("start", "end"):
        logits = output[f"{name}_logits"].float()
        length = logits.shape[1]
        positions = batch[f"{name}_positions"].reshape(len(logits)).clamp(0, length)
        means.append(functional.cross_entropy(logits, positions, ignore_index=length))
    return torch.stack(means).mean()


# ---------------------------------------------------------------- theirs


class _Plain(TorchFunctionMode):
    """Losses of torch without weights of classes and smoothed labels, of logits in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.switched_off: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LOSSES:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
        for name, words in _EXTRAS.items():
            extra = given.get(name)
            if isinstance(extra, Tensor) and extra.ndim > 1:  # a weight for every number: a mask
                continue
            given.pop(name, None)
            if isinstance(extra, Tensor) or extra:
                self.switched_off.add(words)
        if given["input"].dtype in _NARROW_TYPES:
            given["input"] = given["input"].float()
        return func(**given)

    def notes(self) -> tuple[str, ...]:
        """What the model's own loss has and the default loss has not."""
        if not self.switched_off:
            return ()
        extras = " and ".join(sorted(self.switched_off))
        return (
            f"The model's own loss has {extras}; the default loss has not. Pass loss= for another.",
        )


_LOSSES: tuple[Callable[..., Any], ...] = (
    functional.cross_entropy,
    functional.nll_loss,
    functional.binary_cross_entropy_with_logits,
)
#: By argument of a loss what it adds to the plain one.
_EXTRAS = {
    "weight": "weights of classes",
    "pos_weight": "weights of classes",
    "label_smoothing": "smoothed labels",
}
