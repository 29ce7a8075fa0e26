"""Per-example losses of the usual Transformers heads: ``(model, batch) -> Tensor[batch]``, padding
left out.

A loss of your own is any callable of that form; everything that takes ``loss=`` takes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from headprune.core.errors import InvalidValue
from headprune.model.inside import bare
from headprune.model.masks import token_mask
from headprune.model.mistakes import explained_one
from headprune.model.running import ANSWERS, batch_size, call

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]

_IGNORED = -100
_USED = "loss_function"  # what Transformers' classes call that leave their loss to the library
_HINT = "Pass loss=, a callable (model, batch) -> Tensor[batch] of per-example losses."


@cache
def _causal_classes() -> frozenset[str]:
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return frozenset(n for value in names for n in ((value,) if isinstance(value, str) else value))


def is_causal_lm(model: nn.Module) -> bool:
    """Whether it is one of Transformers' causal language models, whose labels may be their inputs;
    in any wrapper."""
    return any(kind.__name__ in _causal_classes() for kind in type(bare(model)).__mro__)


def reads_next(model: nn.Module) -> bool:
    """Whether labels are those of the next token, as far as the model's class says.

    So they are for causal language models and for composites (an encoder of images or sound before
    one), to which Transformers gives the same loss. An encoder-decoder shifts its decoder's inputs
    in place of the labels.
    """
    if is_causal_lm(model):
        return not _reads_as_given(bare(model))
    return not is_encoder_decoder(model) and _loss_name(bare(model)) == "ForCausalLMLoss"


def _reads_as_given(model: nn.Module) -> bool:
    """Whether a class of Transformers' own does without the library's loss: Bart's decoder alone,
    XLM, XLNet.

    One that takes no labels has no loss, and says nothing.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in _causal_classes():
            code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
            if code is None or "labels" not in code.co_varnames:
                return False
            return kind.__module__.startswith("transformers.") and _USED not in code.co_names
    return False


def _loss_name(model: nn.Module) -> str:
    """The loss that Transformers chose for a model by its class; empty for other models."""
    kind = getattr(model, "loss_type", None)
    if not isinstance(kind, str):
        return ""
    from transformers.loss.loss_utils import LOSS_MAPPING

    return getattr(LOSS_MAPPING.get(kind), "__name__", "")


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether its configuration says so; in any wrapper."""
    return bool(getattr(getattr(bare(model), "config", None), "is_encoder_decoder", False))


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """One loss an example for a Transformers model and a batch with labels.

    Sequence and image classification (one label, several, or regression), token classification,
    masked and sequence-to-sequence language models (mean over the labelled tokens), causal language
    models and those that read images or sound as well (mean over the next tokens; a causal one
    without ``labels`` takes the inputs), extractive question answering. Padding (``attention_mask``
    0), what is predicted from it, and labels of -100 do not count. Computed in fp32 where the
    logits are narrower.

    Whether labels are those of the next token is read off the model's class here. ``score``,
    ``recover_`` and ``evaluate`` compare with the model's own loss, too: see
    ``headprune.model.own_loss.reading_of``.

    Args:
        model: A Transformers model with a head.
        batch: A mapping with the model's inputs and ``labels`` (or ``start_positions`` and
            ``end_positions``).

    Returns:
        Losses ``[batch]``.

    Raises:
        InvalidValue: no labels, or an output we do not know how to judge.
    """
    return losses_of(model, batch, predict(model, batch))


def has_labels(batch: Any) -> bool:
    """Whether a batch says what the default loss judges by."""
    return isinstance(batch, Mapping) and ("labels" in batch or "start_positions" in batch)


def predict(model: nn.Module, batch: Any) -> Any:
    """The model's output, labels left out: Transformers would spend time on a mean loss and guess a
    problem type."""
    if not isinstance(batch, Mapping):
        raise InvalidValue(
            "batch", "a mapping with the model's inputs and 'labels'", type(batch).__name__, _HINT
        )
    if not has_labels(batch) and not is_causal_lm(model):
        hint = f"{_HINT} The scorers ggn and obs need no labels."
        raise InvalidValue(
            "batch", "a mapping with 'labels'", f"only {sorted(map(str, batch))}", hint
        )
    return call(model, inputs_of(model, batch))


def inputs_of(model: nn.Module, batch: Any) -> Any:
    """The batch without its answers; an encoder-decoder makes its decoder's inputs from the labels
    and keeps them."""
    if not isinstance(batch, Mapping) or is_encoder_decoder(model):
        return batch
    return {k: v for k, v in batch.items() if k not in ANSWERS}


def losses_of(
    model: nn.Module, batch: Mapping[str, Any], output: Any, shifted: bool | None = None
) -> Tensor:
    """Losses ``[batch]`` from an output of ``predict``; see ``default_loss``.

    Args:
        model: The model.
        batch: The batch.
        output: Its output.
        shifted: Whether labels of tokens are those of the next token; None goes by the model's
            class.
    """
    if "start_positions" in batch:
        ends = [
            (output["start_logits"], batch["start_positions"]),
            (output["end_logits"], batch["end_positions"]),
        ]
        mask = token_mask(batch, (ends[0][0].shape[0], ends[0][0].shape[1]))
        return torch.stack([_position_losses(_wide(x), y, mask) for x, y in ends]).mean(0)
    logits = logits_of(output)
    if logits.ndim == 3:
        losses, counted = token_losses(model, batch, logits, shifted)
        return (losses * counted).sum(1) / counted.sum(1).clamp(min=1)
    return _sequence_losses(model, batch, logits)


def logits_of(output: Any) -> Tensor:
    """``output.logits``, or a clear error."""
    logits = output.get("logits") if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        got = type(logits if isinstance(output, Mapping) else output).__name__
        raise InvalidValue("the model's output", "one with logits [batch, ...]", got, _HINT)
    return logits


def token_losses(
    model: nn.Module, batch: Mapping[str, Any], logits: Tensor, shifted: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Losses ``[batch, tokens]`` and which of them count, as 0 or 1; see ``losses_of``."""
    labels = batch.get("labels")
    shifted = reads_next(model) if shifted is None else shifted
    if labels is None:
        shifted = shifted or is_causal_lm(model)
        labels = batch.get("input_ids")
    if labels is None:
        raise InvalidValue(
            "batch",
            "a mapping with 'labels' or 'input_ids'",
            f"only {sorted(map(str, batch))}",
            _HINT,
        )
    own = (
        not is_encoder_decoder(model) and labels.ndim == 2
    )  # the encoder's mask is not the labels'
    mask = token_mask(batch, (labels.shape[0], labels.shape[1])) if own else None
    if mask is not None:
        labels = labels.masked_fill(~mask, _IGNORED)
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
        if mask is not None:
            # After padding on the left, nothing has been read yet that could predict the first
            # token.
            labels = labels.masked_fill(~mask[:, :-1], _IGNORED)
    if logits.shape[:2] != labels.shape:
        raise InvalidValue(
            "labels", f"of shape {list(logits.shape[:2])}", list(labels.shape), _HINT
        )
    losses = functional.cross_entropy(
        _wide(logits).transpose(1, 2), labels, reduction="none", ignore_index=_IGNORED
    )
    return losses, (labels != _IGNORED).to(losses.dtype)


def problem_type(model: nn.Module, labels: Tensor, logits: Tensor) -> str:
    """``regression``, ``single_label_classification`` or ``multi_label_classification``."""
    given = getattr(getattr(bare(model), "config", None), "problem_type", None)
    if given is not None:
        return str(given)
    if logits.shape[-1] == 1:
        return "regression"
    return (
        "multi_label_classification"
        if labels.is_floating_point()
        else "single_label_classification"
    )


def _sequence_losses(model: nn.Module, batch: Mapping[str, Any], logits: Tensor) -> Tensor:
    labels, logits = batch["labels"], _wide(logits)
    if labels.shape[0] != logits.shape[0]:
        raise InvalidValue(
            "labels", f"one for each of {logits.shape[0]} examples", list(labels.shape), _HINT
        )
    kind = problem_type(model, labels, logits)
    if kind == "regression":
        error: Tensor = logits - labels.to(logits.dtype).reshape(logits.shape)
        return error.square().mean(-1)
    if kind == "multi_label_classification":
        return functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none"
        ).mean(-1)
    if labels.numel() != len(logits):
        raise InvalidValue(
            "labels", f"one class for each of {len(logits)} examples", list(labels.shape), _HINT
        )
    return functional.cross_entropy(logits, labels.reshape(-1), reduction="none")


def _position_losses(logits: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
    """Losses of one end of an answer. As in Transformers, one beyond the text (it was cut off) does
    not count.

    Unlike there, padding takes no part in the softmax, so that a loss does not depend on the
    batch's length.
    """
    length = logits.shape[1]
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    positions = positions.reshape(len(logits)).clamp(0, length)
    return functional.cross_entropy(logits, positions, reduction="none", ignore_index=length)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def checked_losses(loss: Loss, model: nn.Module, batch: Any, number: int) -> Tensor:
    """Calls a loss and checks what it returns.

    Args:
        loss: The per-example loss.
        model: The model.
        batch: The batch.
        number: Which batch this is, from 0, for messages.

    Raises:
        InvalidValue: not one finite number an example.
    """
    losses = shaped_losses(loss, model, batch, number)
    check_finite([(number, losses)])
    return losses


def shaped_losses(loss: Loss, model: nn.Module, batch: Any, number: int) -> Tensor:
    """Calls a loss and checks its shape, which waits for no accelerator; ``check_finite`` is the
    other half."""
    size = batch_size(batch, f"batch {number}")
    with explained_one(model, batch, f"batch {number}"):
        losses = loss(model, batch)
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (size,):
        got = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        hint = "Use reduction='none', and one number an example."
        where = f"loss(model, batch) of batch {number}"
        raise InvalidValue(where, f"a tensor of shape [{size}], one loss an example", got, hint)
    if losses.is_complex() or losses.dtype == torch.bool:
        hint = (
            "Return real numbers: losses.abs() or losses.real, or .float() of what is true or"
            " false."
        )
        raise InvalidValue(
            f"loss(model, batch) of batch {number}",
            "real numbers, lower is better",
            losses.dtype,
            hint,
        )
    return losses


def check_finite(numbered: Iterable[tuple[int, Tensor]]) -> None:
    """Refuses losses that are NaN or infinite, with one look at all of them: a look waits for an
    accelerator.

    Args:
        numbered: Numbers of batches with their losses ``[batch]``.

    Raises:
        InvalidValue: the first of them that is not finite, by batch and example.
    """
    given = [(number, losses.detach()) for number, losses in numbered]
    if not given or bool(torch.isfinite(torch.cat([losses for _, losses in given])).all()):
        return
    number, losses = next((n, x) for n, x in given if not bool(torch.isfinite(x).all()))
    row = int((~torch.isfinite(losses)).nonzero()[0])
    hint = "Look for NaN or infinite values in that example's inputs and labels."
    raise InvalidValue(
        f"the loss of batch {number}, example {row}", "finite", float(losses[row]), hint
    )
