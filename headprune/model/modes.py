"""A model that does something else in training mode than in evaluation mode, dropout apart."""

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

from headprune.model.running import undisturbed
from headprune.model.transfers import in_main_memory

#: Packages whose modules differ between the two modes by noise and running statistics alone.
_KNOWN = (
    "torch",
    "transformers",
    "headprune",
    "peft",
    "timm",
    "accelerate",
    "diffusers",
    "x_transformers",
)
#: Modules that draw noise or keep statistics, by a part of their class's name.
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
#: How far two passes of the same numbers may be apart, relative: kernels for training add in
#: another order.
_CLOSE, _NARROW = 1e-3, 5e-2
_NARROW_TYPES = (torch.float16, torch.bfloat16)
_SAID = "In training mode the model does something else than in evaluation mode, dropout apart:"


def difference_in_training(
    model: nn.Module, value: Callable[[], Sequence[Tensor]], what: str
) -> str:
    """A note where a model gives something else in training mode than in evaluation mode, dropout
    apart; else ``""``.

    Only modules whose class no package we know defines are put into training mode. Dropout,
    drop-path and the like are off in both; normalisation keeps to its running statistics; where
    random numbers are drawn all the same, nothing is said. Numbers are read from an accelerator
    once.

    Args:
        model: The model; left as it was found, random states and buffers too.
        value: Runs it and gives tensors to compare.
        what: What they are, for the note.
    """
    if not has_own_code(model):
        return ""
    try:
        with torch.no_grad(), undisturbed(model, frozen=False):
            evaluated, drawn = _watched(value)
            with _as_in_training(model), _Quiet():
                trained, drawn_then = _watched(value)
    except (
        Exception
    ):  # somebody else's code; what is wrong with the batch shows again where it is needed  # nosec B110
        return ""
    pairs = [
        (here, there)
        for here, there in zip(evaluated, trained, strict=False)
        if here.shape == there.shape
    ]
    if drawn != drawn_then or not pairs:
        return ""
    rows = [
        torch.stack([(a - b).abs().amax(), a.abs().amax(), a.mean(), b.mean()]).float()
        for a, b in pairs
    ]
    for (here, _), row in zip(pairs, in_main_memory(rows), strict=True):
        gap, size, before, after = row.tolist()
        if gap > (_NARROW if here.dtype in _NARROW_TYPES else _CLOSE) * max(size, _CLOSE):
            means = f"is {before:.4g} in evaluation mode and {after:.4g} in training mode"
            how = (
                means
                if what == "loss"
                else f"differs by up to {gap:.4g}, where the largest number is {size:.4g}"
            )
            return (
                f"{_SAID} the {what} of the first batch {how}. The model was judged in evaluation"
                " mode."
            )
    return ""


def has_own_code(model: nn.Module) -> bool:
    """Whether a class in it is of no package that we know."""
    return any(_is_own(module) for module in model.modules())


def _is_own(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in _KNOWN


def _watched(value: Callable[[], Sequence[Tensor]]) -> tuple[list[Tensor], Any]:
    """What it gives, and what it has drawn, as the random states that it leaves; they are put
    back."""
    import numpy as np

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            found = [tensor.detach() for tensor in value() if tensor.numel()]
            of_torch = [
                torch.get_rng_state(),
                *(torch.cuda.get_rng_state(device) for device in devices),
            ]
            drawn = (
                random.getstate(),
                repr(np.random.get_state()),
                [state.tolist() for state in of_torch],
            )
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    return found, drawn


@contextmanager
def _as_in_training(model: nn.Module) -> Iterator[None]:
    """The model's own code in training mode, but for what draws noise; attributes and buffers are
    put back."""
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
            if buffer._version != version:
                buffer.copy_(content)


class _Quiet(TorchFunctionMode):
    """Functions of torch as in evaluation mode, where code of one's own has told them that it
    trains."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:  # built in: it has no signature
            args, kwargs = args[:4] + (0.0,) * bool(args[4:]) + args[5:], {**kwargs}
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
#: By function the argument that says that it trains.
_SWITCHES = {
    functional.batch_norm: "training",
    functional.instance_norm: "use_input_stats",
    functional.multi_head_attention_forward: "training",
    functional.rrelu: "training",
}
