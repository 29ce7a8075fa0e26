"""Detects models that compute something else in training mode, apart from dropout."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headprune.layouts._code import LIBRARIES
from headprune.model.running import undisturbed
from headprune.model.transfers import in_main_memory

#: Parts of class names of modules that draw noise or keep statistics.
_NOISE = (
    "dropout",
    "droppath",
    "drop_path",
    "stochasticdepth",
    "batchnorm",
    "batch_norm",
    "instancenorm",
    "noise",
)
#: Relative difference of two passes with the same numbers: kernels for training add in another
#: order.
_CLOSE = 1e-3
_CLOSE_IN_16_BITS = 5e-2
_NARROW_TYPES = (torch.float16, torch.bfloat16)
_NOTE = "Apart from dropout, the model computes something different in training mode:"


def difference_in_training(
    model: nn.Module, value: Callable[[], Sequence[Tensor]], what: str
) -> str:
    """Write a note if a model gives something else in training mode, apart from dropout.

    Only modules whose class no known package defines are put into training mode. Dropout, drop-path
    and the like are off in both modes; normalisation uses its running statistics. No note is
    written if the two passes draw different random numbers. An accelerator is waited for once.

    Args:
        model: The model; its state, random states and buffers are restored.
        value: Runs it and returns tensors to compare.
        what: What the tensors are, for the note.

    Returns:
        The note, or ``""``.
    """
    if not has_own_code(model):
        return ""
    try:
        with torch.no_grad(), undisturbed(model, frozen=False):
            evaluated, drawn = _run(value)
            with _as_in_training(model), _WithoutTraining():
                trained, drawn_in_training = _run(value)
    # The user's code may raise anything; a wrong batch raises again where it is needed.
    except Exception:  # nosec B110
        return ""
    if drawn != drawn_in_training:
        return ""
    return _difference(evaluated, trained, what)


def _difference(evaluated: list[Tensor], trained: list[Tensor], what: str) -> str:
    """A note on the first pair of tensors that differ, or ``""``."""
    dtypes, rows = [], []
    for a, b in zip(evaluated, trained, strict=False):
        if a.shape == b.shape:
            dtypes.append(a.dtype)
            # largest difference, largest number, both means
            numbers = [(a - b).abs().amax(), a.abs().amax(), a.mean(), b.mean()]
            rows.append(torch.stack(numbers).float())
    for dtype, row in zip(dtypes, in_main_memory(rows), strict=True):
        gap, size, before, after = row.tolist()
        close = _CLOSE_IN_16_BITS if dtype in _NARROW_TYPES else _CLOSE
        if gap > close * max(size, _CLOSE):
            how = f"differs by up to {gap:.4g}, where the largest number is {size:.4g}"
            if what == "loss":
                how = f"is {before:.4g} in evaluation mode and {after:.4g} in training mode"
            return (
                f"{_NOTE} the {what} of the first batch {how}. The model was judged in evaluation"
                " mode."
            )
    return ""


def has_own_code(model: nn.Module) -> bool:
    """Whether some module's class is of no known package."""
    return any(_is_own(module) for module in model.modules())


def _is_own(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in LIBRARIES


def _run(value: Callable[[], Sequence[Tensor]]) -> tuple[list[Tensor], Any]:
    """Call a function and restore the random states.

    Returns:
        Its tensors, and the random states right after it, which show whether it drew numbers.
    """
    import numpy as np

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            results = [tensor.detach() for tensor in value() if tensor.numel()]
            of_torch = [torch.get_rng_state().tolist()]
            of_torch += [torch.cuda.get_rng_state(device).tolist() for device in devices]
            drawn = (random.getstate(), repr(np.random.get_state()), of_torch)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    return results, drawn


@contextmanager
def _as_in_training(model: nn.Module) -> Iterator[None]:
    """Put the user's modules into training mode inside the block, except those that draw noise.

    Attributes and buffers are restored.
    """
    # Shallow copies: a forward may set attributes and write into buffers.
    before = [(m, dict(m.__dict__), dict(m._buffers)) for m in model.modules()]
    contents = [(b, b.clone(), b._version) for b in model.buffers() if not b.is_inference()]
    try:
        for module, _, _ in before:
            name = type(module).__name__.lower()
            module.training = _is_own(module) and not any(part in name for part in _NOISE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, attributes, buffers in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, content, version in contents:
            if buffer._version != version:  # written into
                buffer.copy_(content)


class _WithoutTraining(TorchFunctionMode):
    """Calls functions of torch as in evaluation mode, whatever their arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:  # built in: it has no signature
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs = dict(kwargs)
            kwargs.pop("dropout_p", None)
        elif func in _SWITCHES:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            return func(**{**given, _SWITCHES[func]: False})
        return func(*args, **kwargs)


_DROPOUTS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
)
#: The argument of each function that switches training on.
_SWITCHES = {
    functional.batch_norm: "training",
    functional.instance_norm: "use_input_stats",
    functional.multi_head_attention_forward: "training",
    functional.rrelu: "training",
}
