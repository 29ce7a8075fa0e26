"""What is wrong with a batch on which a model or a loss failed: from PyTorch's error to the batch,
and what to pass."""

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

#: What errors of ours call a batch where they do not know its number.
_UNNUMBERED = ("batch", "labels", "loss(model, batch)")
#: What the configurations of models call how many tokens they have positions for.
_POSITIONS = ("max_position_embeddings", "n_positions")
_OTHER_TYPE = re.compile(
    r"expected (scalar type|dtype) .*Long|expected .* Long|nll_loss.* not implemented for", re.I
)
_OTHER_SHAPE = re.compile(
    r"Target size \(|target batch_size|Expected target size|Expected floating point type"
)
_BEYOND = re.compile(r"index out of range in self|is out of bounds for dimension")
_UNEQUAL = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
#: What PyTorch and Transformers say where there are more tokens than positions.
_ABOUT_PLACES = re.compile(
    r"index out of range|out of bounds|must match the (existing )?size|expanded size|device-side"
    r" assert|sequence length"
    r"|position",
    re.I,
)
_ARGUMENTS = re.compile(
    r"positional argument|keyword argument|multiple values for argument|required argument"
)


@contextmanager
def explained(model: nn.Module, batches: Batches | None, before: int = 0) -> Iterator[None]:
    """For as long as the block lasts, an error on a batch says which, and what is wrong with it
    where that is known.

    Args:
        model: What runs on the batches.
        batches: What is read in the block.
        before: Batches that came before these.

    Raises:
        InvalidValue: in place of an error of PyTorch's, of Python's or of ours that does not name
            the batch.
    """
    try:
        yield
    except Exception as error:
        now = None if batches is None else batches.now
        if now is None:
            raise
        _raise(model, now[1], f"batch {now[0] + before}", error)


@contextmanager
def explained_one(model: nn.Module, batch: Any, where: str) -> Iterator[None]:
    """The same for a single batch, which is called ``where``."""
    try:
        yield
    except Exception as error:
        _raise(model, batch, where, error)


def _raise(model: nn.Module, batch: Any, where: str, error: Exception) -> None:
    if isinstance(error, InvalidValue) and error.where in _UNNUMBERED:
        named = where if error.where == "batch" else f"{error.where} of {where}"
        hint = (
            _as_mapping(model)
            if error.where == "batch" and isinstance(batch, (tuple, list))
            else error.hint
        )
        raise InvalidValue(named, error.must, error.got, hint) from error
    found = None if isinstance(error, HeadPruneError) else _cause(model, batch, where, error)
    if found is not None:
        raise found from error
    noted = isinstance(error, HeadPruneError) or getattr(error, "__notes__", None)
    if not noted and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"This was on {where}.")
    raise error


def _cause(model: nn.Module, batch: Any, where: str, error: Exception) -> InvalidValue | None:
    """What is known of an error; the first that fits."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):  # who catches it may take smaller batches
        return None
    return (
        _no_batch(batch, where)
        or (_too_long(model, batch, where) if _ABOUT_PLACES.search(text) else None)
        or _unlike_positions(model, batch, where, text)
        or _no_numbers(batch, where, text)
        or _labels(model, batch, where, text)
        or (_tokens(model, batch, where) if _BEYOND.search(text) else None)
        or (_arguments(model, batch, where, text) if isinstance(error, TypeError) else None)
    )


def _no_batch(batch: Any, where: str) -> InvalidValue | None:
    try:
        batch_size(batch, where)
    except InvalidValue as error:
        return error
    return None


def _labels(model: nn.Module, batch: Any, where: str, text: str) -> InvalidValue | None:
    place = f"the labels of {where}"
    beyond = re.search(r"Target (-?\d+) is out of bounds", text)
    if beyond:
        count = getattr(getattr(model, "config", None), "num_labels", None)
        known = "" if count is None else f", {count} in the model's configuration"
        hint = (
            "Count labels from 0, and load the model with as many classes (num_labels=). -100"
            " leaves a label out."
        )
        return InvalidValue(
            place, f"at least 0 and below the number of classes{known}", beyond[1], hint
        )
    given = batch.get("labels") if isinstance(batch, Mapping) else None
    right = isinstance(given, Tensor) and given.dtype == torch.int64
    if _OTHER_TYPE.search(text) and (not right or "target" in text):
        got = given.dtype if isinstance(given, Tensor) and not right else text
        hint = "Use labels.long() for classes; for another kind of label pass loss=."
        return InvalidValue(place, "whole numbers (torch.int64) where they tell classes", got, hint)
    if _OTHER_SHAPE.search(text) and isinstance(given, Tensor):
        must = (
            "torch.int64, one for each that is classified, or floats of the logits' shape for"
            " several labels"
        )
        hint = "Use labels.long() for classes; for another kind of label pass loss=."
        return InvalidValue(place, must, f"{given.dtype} of shape {list(given.shape)}", hint)
    return None


def _too_long(model: nn.Module, batch: Any, where: str) -> InvalidValue | None:
    """Inputs with more tokens than the model has positions."""
    config = getattr(model, "config", None)
    limit = next(
        (n for name in _POSITIONS if isinstance(n := getattr(config, name, None), int)), None
    )
    if limit is None or not isinstance(batch, Mapping):
        return None
    for name, value in batch.items():
        if (
            str(name).endswith("input_ids")
            and isinstance(value, Tensor)
            and value.ndim == 2
            and value.shape[1] > limit
        ):
            hint = f"Truncate them: tokenizer(..., truncation=True, max_length={limit})."
            return InvalidValue(
                f"{where}[{name!r}]", f"at most {limit} tokens long", value.shape[1], hint
            )
    return None


def _unlike_positions(model: nn.Module, batch: Any, where: str, text: str) -> InvalidValue | None:
    """The same, of a model that adds a parameter or buffer of positions."""
    sizes = _UNEQUAL.search(text)
    if sizes is None:
        return None
    limit, length = sorted(map(int, sizes.groups()))
    held = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, x in held if "pos" in name.rpartition(".")[2] and limit in x.shape]
    if not names or not any(x.ndim > 1 and x.shape[1] == length for x in _read(batch)):
        return None
    return InvalidValue(
        where, f"at most {limit} long, for {names[0]}", length, "Make the inputs shorter."
    )


def _no_numbers(batch: Any, where: str, text: str) -> InvalidValue | None:
    """Tokens that are no whole numbers."""
    if "'indices' to have one of the following scalar types" not in text:
        return None
    kinds = sorted({str(x.dtype) for x in _read(batch)})
    return InvalidValue(
        where,
        "one whose tokens are whole numbers (torch.int64)",
        ", ".join(kinds),
        "Use ids.long().",
    )


def _tokens(model: nn.Module, batch: Any, where: str) -> InvalidValue:
    """A whole number that is beyond the rows of an embedding; or a position."""
    sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    rows = (
        f"an embedding of {' or '.join(map(str, sorted(sizes)))} rows"
        if sizes
        else "the model's tables"
    )
    found = [
        x for x in _read(batch) if x.numel() and not x.is_floating_point() and not x.is_complex()
    ]
    numbers = [f"{int(x.min())} to {int(x.max())} in a tensor {list(x.shape)}" for x in found]
    hint = (
        "Look for token numbers beyond the vocabulary, and for inputs longer than the model has"
        " positions."
    )
    return InvalidValue(
        where, f"of numbers and lengths within {rows}", "; ".join(numbers) or "others", hint
    )


def _arguments(model: nn.Module, batch: Any, where: str, text: str) -> InvalidValue | None:
    """A batch that the model's ``forward`` cannot be called with."""
    if not _ARGUMENTS.search(text):
        return None
    called = bare(model)
    if isinstance(batch, (tuple, list)):
        got = f"a {type(batch).__name__} of {len(batch)}: {text}"
        return InvalidValue(
            where,
            f"what {type(called).__name__}.forward takes by position",
            got,
            _as_mapping(model),
        )
    takes = ", ".join(inspect.signature(called.forward).parameters)
    hint = (
        f"It takes {takes}; answers may be called {', '.join(ANSWERS)}. Or pass loss=, which knows"
        " the batch's form."
    )
    return InvalidValue(where, f"what {type(called).__name__}.forward takes", text, hint)


def _as_mapping(model: nn.Module) -> str:
    """What to pass in place of a tuple, by the name that the model's ``forward`` has for its first
    input."""
    first = next(iter(inspect.signature(bare(model).forward).parameters), "input_ids")
    return AS_MAPPING.replace("input_ids", first)


def _read(batch: Any) -> list[Tensor]:
    """The tensors that are read, which answers are not."""
    inputs = (
        {k: v for k, v in batch.items() if k not in ANSWERS}
        if isinstance(batch, Mapping)
        else batch
    )
    return [x.detach() for x in tensors(inputs)]


def refuse_caches(batch: Any, number: int) -> None:
    """Refuses keys and values of earlier tokens: every pass would add to them.

    Raises:
        InvalidValue: such a batch.
    """
    for name in ("past_key_values", "cache_params", "past_key_value"):
        if isinstance(batch, Mapping) and batch.get(name) is not None:
            hint = "Give the earlier tokens as tokens."
            raise InvalidValue(
                f"batch {number}[{name!r}]",
                "left out, for every pass would add to it",
                "a cache",
                hint,
            )
