"""Explains why a model or a loss failed on a batch: from PyTorch's error to what to pass."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.model.batches import Batches
from headprune.model.inside import bare
from headprune.model.running import ANSWERS, AS_MAPPING, batch_size, tensors

#: What our own errors call a batch whose number they do not know.
_UNNUMBERED = ("batch", "labels", "loss(model, batch)")
#: Names in a model's configuration of the number of tokens that it has positions for.
_POSITIONS = ("max_position_embeddings", "n_positions")
#: Names that authors of models give to what `forward` compares its answers with.
_TARGETS = ("targets", "target", "label", "y")
#: PyTorch's words for labels of another dtype.
_OTHER_TYPE = re.compile(
    r"expected (scalar type|dtype) .*Long|expected .* Long|nll_loss.* not implemented for", re.I
)
#: PyTorch's words for labels of another shape.
_OTHER_SHAPE = re.compile(
    r"Target size \(|target batch_size|Expected target size|Expected floating point type"
)
#: PyTorch's words for token numbers beyond an embedding.
_BEYOND = re.compile(r"index out of range in self|is out of bounds for dimension")
#: PyTorch's words for a table of positions that is too short.
_UNEQUAL = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
#: Words of PyTorch and Transformers for more tokens than positions.
_TOO_LONG = re.compile(
    r"index out of range|out of bounds|must match the (existing )?size|expanded size"
    r"|device-side assert|sequence length|position",
    re.I,
)
#: Python's words for arguments that a function does not take.
_ARGUMENTS = re.compile(
    r"positional argument|keyword argument|multiple values for argument|required argument"
)


@contextmanager
def explained(model: nn.Module, batches: Batches | None, before: int = 0) -> Iterator[None]:
    """Explain errors inside the block: on which batch, and what is wrong with it if known.

    Args:
        model: What runs on the batches.
        batches: What is read in the block.
        before: Batches that came before these.

    Raises:
        InvalidValue: instead of an error of PyTorch, of Python or of this package that does not
            name the batch.
    """
    try:
        yield
    except Exception as error:
        now = None if batches is None else batches.now
        if now is None:
            raise
        number, batch = now
        _raise(model, batch, f"batch {number + before}", error)


@contextmanager
def explained_one(model: nn.Module, batch: Any, where: str) -> Iterator[None]:
    """Explain errors inside the block for a single batch, which messages call ``where``."""
    try:
        yield
    except Exception as error:
        _raise(model, batch, where, error)


def _raise(model: nn.Module, batch: Any, where: str, error: Exception) -> None:
    """Raise the explanation of an error, or else the error itself with a note."""
    if isinstance(error, InvalidValue) and error.where in _UNNUMBERED:
        raise _numbered(model, batch, where, error) from error
    if not isinstance(error, HeadPruneError):
        explanation = _explanation(model, batch, where, error)
        if explanation is not None:
            raise explanation from error
        has_notes = getattr(error, "__notes__", None)
        if not has_notes and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"This was on {where}.")
    raise error


def _numbered(model: nn.Module, batch: Any, where: str, error: InvalidValue) -> InvalidValue:
    """An error of ours with the number of the batch."""
    if error.where != "batch":
        return InvalidValue(f"{error.where} of {where}", error.must, error.got, error.hint)
    hint = _as_mapping(model) if isinstance(batch, (tuple, list)) else error.hint
    return InvalidValue(where, error.must, error.got, hint)


def _explanation(model: nn.Module, batch: Any, where: str, error: Exception) -> InvalidValue | None:
    """The first explanation that fits an error; None where none does."""
    # PyTorch has one class for most errors, so the text has to decide.
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):  # callers may catch it and take smaller batches
        return None
    return (
        _no_batch(batch, where)
        or _too_long(model, batch, where, text)
        or _beyond_positions(model, batch, where, text)
        or _no_numbers(batch, where, text)
        or _wrong_labels(model, batch, where, text)
        or _beyond_embedding(model, batch, where, text)
        or _wrong_arguments(model, batch, where, error)
    )


def _no_batch(batch: Any, where: str) -> InvalidValue | None:
    """A batch without tensors or without examples."""
    try:
        batch_size(batch, where)
    except InvalidValue as error:
        return error
    return None


def _wrong_labels(model: nn.Module, batch: Any, where: str, text: str) -> InvalidValue | None:
    """Labels of another range, dtype or shape than the loss takes."""
    place = f"the labels of {where}"
    beyond = re.search(r"Target (-?\d+) is out of bounds", text)
    if beyond:
        count = getattr(getattr(bare(model), "config", None), "num_labels", None)
        known = "" if count is None else f", {count} in the model's configuration"
        must = f"at least 0 and below the number of classes{known}"
        hint = (
            "Count labels from 0, and load the model with as many classes (num_labels=). -100"
            " leaves a label out."
        )
        return InvalidValue(place, must, beyond[1], hint)

    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    hint = "Use labels.long() for classes; for another kind of label pass loss=."
    are_long = isinstance(labels, Tensor) and labels.dtype == torch.int64
    if _OTHER_TYPE.search(text) and (not are_long or "target" in text):
        must = "whole numbers (torch.int64) where they are classes"
        got = labels.dtype if isinstance(labels, Tensor) and not are_long else text
        return InvalidValue(place, must, got, hint)
    if _OTHER_SHAPE.search(text) and isinstance(labels, Tensor):
        must = (
            "torch.int64, one per classified example or token, or floats of the logits' shape for"
            " multi-label tasks"
        )
        return InvalidValue(place, must, f"{labels.dtype} of shape {list(labels.shape)}", hint)
    return None


def _too_long(model: nn.Module, batch: Any, where: str, text: str) -> InvalidValue | None:
    """Inputs with more tokens than the model's configuration has positions for."""
    limit = _n_positions(model)
    if limit is None or not isinstance(batch, Mapping) or not _TOO_LONG.search(text):
        return None
    for name, value in batch.items():
        if not str(name).endswith("input_ids") or not isinstance(value, Tensor):
            continue
        if value.ndim == 2 and value.shape[1] > limit:
            must = f"at most {limit} tokens long"
            hint = f"Truncate them: tokenizer(..., truncation=True, max_length={limit})."
            return InvalidValue(f"{where}[{name!r}]", must, value.shape[1], hint)
    return None


def _n_positions(model: nn.Module) -> int | None:
    config = getattr(bare(model), "config", None)
    for name in _POSITIONS:
        limit = getattr(config, name, None)
        if isinstance(limit, int):
            return limit
    return None


def _beyond_positions(model: nn.Module, batch: Any, where: str, text: str) -> InvalidValue | None:
    """Inputs longer than a parameter or buffer of positions."""
    sizes = _UNEQUAL.search(text)
    if sizes is None:
        return None
    # Which of the two is the table's length is not in the text.
    limit, length = sorted(map(int, sizes.groups()))
    tables = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "pos" in name.rpartition(".")[2] and limit in tensor.shape:
            tables.append(name)
    if not tables or not any(x.ndim > 1 and x.shape[1] == length for x in _inputs(batch)):
        return None
    must = f"at most {limit} tokens long, the length of {tables[0]}"
    return InvalidValue(where, must, length, "Make the inputs shorter.")


def _no_numbers(batch: Any, where: str, text: str) -> InvalidValue | None:
    """Tokens that are no whole numbers."""
    if "'indices' to have one of the following scalar types" not in text:
        return None
    must = "one whose tokens are whole numbers (torch.int64)"
    got = ", ".join(sorted({str(x.dtype) for x in _inputs(batch)}))
    return InvalidValue(where, must, got, "Use ids.long().")


def _beyond_embedding(model: nn.Module, batch: Any, where: str, text: str) -> InvalidValue | None:
    """A token number, or a position, beyond the rows of an embedding."""
    if not _BEYOND.search(text):
        return None
    sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    rows = "the model's tables"
    if sizes:
        rows = f"an embedding of {' or '.join(map(str, sorted(sizes)))} rows"
    integers = [x for x in _inputs(batch) if not x.is_floating_point() and not x.is_complex()]
    ranges = [_range_of(x) for x in integers if x.numel()]
    must = f"made of token numbers and lengths that fit {rows}"
    hint = (
        "Look for token numbers beyond the vocabulary, and for inputs longer than the model has"
        " positions."
    )
    return InvalidValue(where, must, "; ".join(ranges) or "numbers beyond it", hint)


def _range_of(x: Tensor) -> str:
    return f"{int(x.min())} to {int(x.max())} in a tensor {list(x.shape)}"


def _wrong_arguments(
    model: nn.Module, batch: Any, where: str, error: Exception
) -> InvalidValue | None:
    """A batch that the model's ``forward`` cannot be called with."""
    text = str(error)
    if not isinstance(error, TypeError) or not _ARGUMENTS.search(text):
        return None
    called = bare(model)
    must = f"what {type(called).__name__}.forward takes"
    # By position, names cannot help.
    if isinstance(batch, (tuple, list)):
        got = f"a {type(batch).__name__} of {len(batch)}: {text}"
        return InvalidValue(where, f"{must} by position", got, _as_mapping(model))
    parameters = ", ".join(inspect.signature(called.forward).parameters)
    hint = (
        f"It takes {parameters}; answers may be called {', '.join(ANSWERS)}. Or pass loss=, which"
        " knows the batch's form."
    )
    return InvalidValue(where, must, text, hint)


def _as_mapping(model: nn.Module) -> str:
    """A hint to pass a mapping, with the names that ``forward`` has for its arguments."""
    names = [*inspect.signature(bare(model).forward).parameters]
    own = next((name for name in _TARGETS if name in names), None)
    if own is None or "labels" in names:
        return AS_MAPPING.replace("input_ids", names[0] if names else "input_ids")
    # Only the model's author knows what such a forward returns: logits, a loss, or both.
    return (
        f"Give mappings: batches = [{{{names[0]!r}: x, {own!r}: y}} for x, y in batches], and pass"
        " loss=, a callable (model, batch) that calls model(**batch) and returns a loss for each"
        " example."
    )


def _inputs(batch: Any) -> list[Tensor]:
    """The tensors of a batch that are no answers."""
    if isinstance(batch, Mapping):
        batch = {name: value for name, value in batch.items() if name not in ANSWERS}
    return [tensor.detach() for tensor in tensors(batch)]


def refuse_caches(batch: Any, number: int) -> None:
    """Refuse keys and values of earlier tokens: every pass would add to them.

    Raises:
        InvalidValue: such a batch.
    """
    for name in ("past_key_values", "cache_params", "past_key_value"):
        if isinstance(batch, Mapping) and batch.get(name) is not None:
            where = f"batch {number}[{name!r}]"
            must = "left out, because every pass would add to it"
            raise InvalidValue(where, must, "a cache", "Give the earlier tokens as tokens.")
