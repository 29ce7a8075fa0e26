"""Per-example losses of the usual Transformers heads, without padding.

A loss is any callable ``(model, batch) -> Tensor[batch]``. Every ``loss=`` takes such a callable.
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
#: What Transformers' classes call that leave their loss to the library.
_LIBRARY_LOSS = "loss_function"
_HINT = "Pass loss=, a callable (model, batch) -> Tensor[batch] of per-example losses."


# ---------------------------------------------------------------- what a model's class says


_CAUSAL = "CAUSAL_LM"
#: Transformers' tables of classes whose logits are of classes, of tokens or of a grade.
_WITH_LOGITS = (
    _CAUSAL,
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "MULTIPLE_CHOICE",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
)


@cache
def _classes_in(*tables: str) -> frozenset[str]:
    """Names of the classes in Transformers' tables of models."""
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for table in tables:
        # Another version of Transformers may lack a table.
        known = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {})
        for value in known.values():
            names.update([value] if isinstance(value, str) else value)
    return frozenset(names)


def _is_in(model: nn.Module, *tables: str) -> bool:
    """Whether a model's class, in any wrapper, or a class that it derives from is in a table."""
    names = _classes_in(*tables)
    return any(kind.__name__ in names for kind in type(bare(model)).__mro__)


def has_known_logits(model: nn.Module) -> bool:
    """Whether a model's class says that its logits are those of classes, tokens or a grade."""
    return _is_in(model, *_WITH_LOGITS)


def is_causal_lm(model: nn.Module) -> bool:
    """Decide whether it is a causal language model of Transformers, in any wrapper.

    The labels of one may be its inputs.
    """
    return _is_in(model, _CAUSAL)


def reads_next(model: nn.Module) -> bool:
    """Decide by the model's class whether labels are those of the next token.

    They are for causal language models, and for an encoder of images or sound in front of one:
    Transformers gives both the same loss. An encoder-decoder shifts its decoder's inputs instead
    of the labels.
    """
    if is_causal_lm(model):
        return not _has_unshifted_loss(bare(model))
    return not is_encoder_decoder(model) and _loss_name(bare(model)) == "ForCausalLMLoss"


def _has_unshifted_loss(model: nn.Module) -> bool:
    """Whether a causal class of Transformers has a loss of its own: Bart's decoder, XLM, XLNet.

    Such a loss takes the labels as they are. A class that takes no labels has no loss.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in _classes_in(_CAUSAL):
            code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
            if code is None or "labels" not in code.co_varnames:
                return False
            is_library = kind.__module__.startswith("transformers.")
            return is_library and _LIBRARY_LOSS not in code.co_names
    return False


def _loss_name(model: nn.Module) -> str:
    """The loss that Transformers chose for a model by its class; empty for other models."""
    # Transformers finds it by a part of the class's name.
    kind = getattr(model, "loss_type", None)
    if not isinstance(kind, str):
        return ""
    from transformers.loss.loss_utils import LOSS_MAPPING

    return getattr(LOSS_MAPPING.get(kind), "__name__", "")


def is_encoder_decoder(model: nn.Module) -> bool:
    """Decide by its configuration whether a model, in any wrapper, is an encoder-decoder."""
    return bool(getattr(getattr(bare(model), "config", None), "is_encoder_decoder", False))


# ---------------------------------------------------------------- the default loss


def decoder_ids(model: Any, batch: Mapping[str, Any]) -> Any:
    """The ids that the decoder reads: given, or made by the model from the labels."""
    given, labels = batch.get("decoder_input_ids"), batch.get("labels")
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if given is not None or make is None or not isinstance(labels, Tensor):
        return given
    return make(labels)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute one loss per example for a Transformers model and a batch with labels.

    It knows classification of sequences and images (one label, several, or regression),
    classification of tokens, and extractive question answering. Masked and sequence-to-sequence
    language models get the mean over the labelled tokens. Causal language models, and those that
    read images or sound as well, get the mean over the next tokens. A causal one without ``labels``
    takes the inputs.

    Padding (``attention_mask`` 0), what is predicted from it, and labels of -100 do not count.
    Logits narrower than fp32 are widened first.

    Here the model's class decides whether labels are those of the next token. ``score``,
    ``recover_`` and ``evaluate`` compare with the model's own loss, too: see
    ``headprune.model.own_loss.reading_of``.

    Args:
        model: A Transformers model with a head.
        batch: A mapping with the model's inputs and ``labels`` (or ``start_positions`` and
            ``end_positions``).

    Returns:
        Losses ``[batch]``.

    Raises:
        InvalidValue: no labels, or an output of an unknown form.
    """
    return losses_of(model, batch, predict(model, batch))


def has_labels(batch: Any) -> bool:
    """Whether a batch has the answers that the default loss needs."""
    return isinstance(batch, Mapping) and ("labels" in batch or "start_positions" in batch)


def predicts_text(model: nn.Module, batch: Any) -> bool:
    """Whether the default loss of a batch is that of a text's tokens: its exponential is the
    perplexity."""
    if is_causal_lm(model):
        return True
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return False
    return is_encoder_decoder(model) and labels.ndim == 2  # [batch, tokens]


def predict(model: nn.Module, batch: Any) -> Any:
    """Run the model without labels.

    With them Transformers would spend time on a mean loss and guess a problem type.
    """
    if not isinstance(batch, Mapping):
        must = "a mapping with the model's inputs and 'labels'"
        raise InvalidValue("batch", must, type(batch).__name__, _HINT)
    if not has_labels(batch) and not is_causal_lm(model):
        got = f"only {sorted(map(str, batch))}"
        hint = f"{_HINT} The scorers surgeon and obs need no labels."
        raise InvalidValue("batch", "a mapping with 'labels'", got, hint)
    return call(model, inputs_of(model, batch))


def inputs_of(model: nn.Module, batch: Any) -> Any:
    """The batch without its answers."""
    # An encoder-decoder makes its decoder's inputs from the labels.
    if not isinstance(batch, Mapping) or is_encoder_decoder(model):
        return batch
    return {name: value for name, value in batch.items() if name not in ANSWERS}


def losses_of(
    model: nn.Module, batch: Mapping[str, Any], output: Any, shifted: bool | None = None
) -> Tensor:
    """Compute the losses from an output of ``predict``; see ``default_loss``.

    Args:
        model: The model.
        batch: The batch.
        output: Its output.
        shifted: Whether labels of tokens are those of the next token; None goes by the model's
            class.

    Returns:
        Losses ``[batch]``.
    """
    if "start_positions" in batch:  # extractive question answering
        starts, ends = output["start_logits"], output["end_logits"]  # [batch, tokens]
        mask = token_mask(batch, (starts.shape[0], starts.shape[1]))
        of_starts = _position_losses(_wide(starts), batch["start_positions"], mask)
        of_ends = _position_losses(_wide(ends), batch["end_positions"], mask)
        return torch.stack([of_starts, of_ends]).mean(0)
    logits = logits_of(output)
    if logits.ndim == 3:  # [batch, tokens, classes]
        losses, counted = token_losses(model, batch, logits, shifted)
        return (losses * counted).sum(1) / counted.sum(1).clamp(min=1)
    return _sequence_losses(model, batch, logits)


def logits_of(output: Any) -> Tensor:
    """``output.logits``, or an output that is logits itself.

    Raises:
        InvalidValue: an output without logits ``[batch, classes]`` or ``[batch, tokens, classes]``.
    """
    # Transformers' outputs are mappings; other models may return the logits themselves.
    logits = output.get("logits") if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        got = type(logits if isinstance(output, Mapping) else output).__name__
        raise InvalidValue("the model's output", "one with logits [batch, ...]", got, _HINT)
    return logits


def token_losses(
    model: nn.Module, batch: Mapping[str, Any], logits: Tensor, shifted: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Compute losses ``[batch, tokens]`` and which of them count, as 0 or 1.

    Args:
        model: The model.
        batch: The batch.
        logits: ``[batch, tokens, classes]``.
        shifted: See ``losses_of``.
    """
    labels = batch.get("labels")
    if shifted is None:
        shifted = reads_next(model)
    if labels is None:
        shifted = shifted or is_causal_lm(model)
        labels = batch.get("input_ids")
    if labels is None:
        got = f"only {sorted(map(str, batch))}"
        raise InvalidValue("batch", "a mapping with 'labels' or 'input_ids'", got, _HINT)

    # Padding does not count. An encoder-decoder's mask is the encoder's, not the labels'.
    mask = None
    if not is_encoder_decoder(model) and labels.ndim == 2:
        mask = token_mask(batch, (labels.shape[0], labels.shape[1]))
    if mask is not None:
        labels = labels.masked_fill(~mask, _IGNORED)
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
        if mask is not None:
            # After padding on the left, nothing was read yet that could predict the first token.
            labels = labels.masked_fill(~mask[:, :-1], _IGNORED)
    if logits.shape[:2] != labels.shape:
        must = f"of shape {list(logits.shape[:2])}"
        raise InvalidValue("labels", must, list(labels.shape), _HINT)
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
    # Transformers decides by the dtype of the labels, too.
    if labels.is_floating_point():
        return "multi_label_classification"
    return "single_label_classification"


def _sequence_losses(model: nn.Module, batch: Mapping[str, Any], logits: Tensor) -> Tensor:
    """Losses ``[batch]`` from logits ``[batch, classes]``."""
    labels, logits = batch["labels"], _wide(logits)
    if labels.shape[0] != logits.shape[0]:
        must = f"one for each of {logits.shape[0]} examples"
        raise InvalidValue("labels", must, list(labels.shape), _HINT)
    kind = problem_type(model, labels, logits)
    if kind == "regression":
        error: Tensor = logits - labels.to(logits.dtype).reshape(logits.shape)
        return error.square().mean(-1)
    if kind == "multi_label_classification":
        by_class = functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none"
        )
        return by_class.mean(-1)
    if labels.numel() != len(logits):
        must = f"one class for each of {len(logits)} examples"
        raise InvalidValue("labels", must, list(labels.shape), _HINT)
    return functional.cross_entropy(logits, labels.reshape(-1), reduction="none")


def _position_losses(logits: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
    """Losses ``[batch]`` of one end of an answer.

    As in Transformers, an end beyond the text (it was truncated) does not count. Unlike there,
    padding takes no part in the softmax, so that a loss does not depend on the batch's length.
    """
    length = logits.shape[1]
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    # The number of tokens itself is the class to ignore.
    positions = positions.reshape(len(logits)).clamp(0, length)
    return functional.cross_entropy(logits, positions, reduction="none", ignore_index=length)


def _wide(logits: Tensor) -> Tensor:
    """Logits in fp32 where they are narrower."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


# ---------------------------------------------------------------- checks


def shaped_losses(loss: Loss, model: nn.Module, batch: Any, number: int) -> Tensor:
    """Call a loss and check its shape, without a wait for an accelerator.

    ``check_finite`` is the other half of the checks.
    """
    size = batch_size(batch, f"batch {number}")
    with explained_one(model, batch, f"batch {number}"):
        losses = loss(model, batch)
    where = f"loss(model, batch) of batch {number}"
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (size,):
        must = f"a tensor of shape [{size}], one loss per example"
        got = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        hint = "Use reduction='none', and one number per example."
        raise InvalidValue(where, must, got, hint)
    if losses.is_complex() or losses.dtype == torch.bool:
        hint = (
            "Return real numbers: losses.abs() or losses.real, or .float() of what is true or"
            " false."
        )
        raise InvalidValue(where, "real numbers, lower is better", losses.dtype, hint)
    return losses


def check_finite(numbered: Iterable[tuple[int, Tensor]]) -> None:
    """Refuse losses that are NaN or infinite.

    All are checked at once, because every check waits for an accelerator.

    Args:
        numbered: Numbers of batches with their losses ``[batch]``.

    Raises:
        InvalidValue: the first of them that is not finite, by batch and example.
    """
    given = [(number, losses.detach()) for number, losses in numbered]
    if not given or bool(torch.isfinite(torch.cat([losses for _, losses in given])).all()):
        return
    for number, losses in given:
        infinite = (~torch.isfinite(losses)).nonzero()
        if len(infinite):
            row = int(infinite[0])
            where = f"the loss of batch {number}, example {row}"
            hint = "Look for NaN or infinite values in that example's inputs and labels."
            raise InvalidValue(where, "finite", float(losses[row]), hint)
