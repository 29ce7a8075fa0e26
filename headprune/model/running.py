"""Runs a model on batches: calls, batch sizes, devices, and blocks that restore a model's state."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.inside import bare
from headprune.model.offloaded import offloaders, sent_back
from headprune.model.transfers import in_main_memory

#: The keys of a batch that hold the answers.
ANSWERS = ("labels", "start_positions", "end_positions")
#: What to pass in place of batches ``(x, y)``.
AS_MAPPING = (
    "Give mappings: batches = [{'input_ids': x, 'labels': y} for x, y in batches], or pass loss=,"
    " a callable (model, batch) that reads x and y."
)
#: Parts of an output whose shapes a cut changes.
_NOT_OUTPUTS = (
    "past_key_values",
    "attentions",
    "cross_attentions",
    "decoder_attentions",
    "encoder_attentions",
)
#: The attribute by which PyTorch's encoder packs padded batches.
_PACKS = "use_nested_tensor"
# Of Transformers' layers: tokens that a feed-forward runs on at once; 0 is all of them.
_CHUNK = "chunk_size_feed_forward"


# ---------------------------------------------------------------- calls


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch.

    Args:
        model: The model.
        batch: A mapping is passed by keyword, a tuple or list by position, a tensor alone. Of a
            mapping, answers that ``forward`` has no parameter for are not passed.
    """
    if isinstance(batch, Mapping):
        return model(**_accepted(model, batch))
    if isinstance(batch, (tuple, list)):
        check_positions(model, batch)
        return model(*batch)
    return model(batch)


def check_positions(model: nn.Module, batch: tuple[Any, ...] | list[Any]) -> None:
    """Refuse labels in the place of a Transformers model's mask, which it would take silently.

    Raises:
        InvalidValue: a tensor that is no mask where the model expects one.
    """
    # Only models of Transformers have this name; their masks follow the first input.
    if not hasattr(model, "main_input_name") or len(batch) < 2:
        return
    for name, value in zip(inspect.signature(model.forward).parameters, batch, strict=False):
        if "mask" in name and isinstance(value, Tensor) and not _may_be_mask(value):
            must = f"what {type(model).__name__}.forward takes by position"
            got = f"{value.dtype} of shape {list(value.shape)} in the place of {name}"
            raise InvalidValue("batch", must, got, AS_MAPPING)


def _may_be_mask(value: Tensor) -> bool:
    """Whether a tensor can be a mask: floats or booleans, or several axes of 0 and 1."""
    if value.is_floating_point() or value.dtype == torch.bool:
        return True
    if value.ndim < 2:
        return False
    # To read the numbers of an accelerator would wait for it.
    return value.device.type != "cpu" or not bool(((value != 0) & (value != 1)).any())


def _accepted(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch without answers that ``forward`` has no parameter for."""
    if not any(name in batch for name in ANSWERS):
        return batch
    parameters = forward_parameters(model)
    if parameters is None:
        return batch
    refused = set(ANSWERS) - parameters
    return {name: value for name, value in batch.items() if name not in refused}


def forward_parameters(model: nn.Module) -> set[str] | None:
    """Names of the parameters of a model's ``forward``; None if it takes any keyword."""
    parameters = inspect.signature(bare(model).forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)


# ---------------------------------------------------------------- tensors of batches and outputs


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested mappings, tuples and lists, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def outputs(value: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output.

    Caches and attention maps are not among them, for a cut changes their shapes.
    """
    if isinstance(value, Mapping):
        value = [part for name, part in value.items() if name not in _NOT_OUTPUTS]
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]


def device_of(model: nn.Module) -> torch.device:
    """Where a model, or a module, takes its inputs.

    If accelerate offloads its weights, that is where it runs.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    # Offloaded weights are on the meta device between forwards.
    if device.type != "meta":
        return device
    for module in model.modules():
        for hook in offloaders(module):
            # Only the first hook counts.
            return device if hook.execution_device is None else torch.device(hook.execution_device)
    return device


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch's tensors to a device; other values pass through."""
    return over_tensors(batch, lambda t: t.to(device, non_blocking=True))


def over_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a batch.

    Containers are copied, and sequences become tuples; other values pass through.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: over_tensors(value, function) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(over_tensors(value, function) for value in batch)
    return batch


def batch_size(batch: Any, where: str = "batch") -> int:
    """Count the examples: the first dimension of the first tensor that has one.

    Raises:
        InvalidValue: no tensor, or no example.
    """
    first = next((t for t in tensors(batch) if t.ndim), None)
    if first is None:
        must = "made of tensors with the examples first"
        hint = "Make tensors of it, as a DataLoader does."
        raise InvalidValue(where, must, type(batch).__name__, hint)
    if not first.shape[0]:
        raise InvalidValue(where, "one with examples", "an empty batch", "Leave empty batches out.")
    return first.shape[0]


def some_examples(batch: Any, places: Tensor | slice) -> Any:
    """Take some examples of a batch: of everything with one entry per example those entries.

    That is rows of tensors and arrays, and items of lists and tuples of plain values (texts,
    numbers).

    >>> some_examples({"x": torch.arange(3), "texts": ["a", "b", "c"]}, slice(2))
    {'x': tensor([0, 1]), 'texts': ['a', 'b']}
    """
    size = batch_size(batch)
    # Tensors take a mask, a slice or numbers; lists need numbers.
    numbers = list(range(size)[places]) if isinstance(places, slice) else places.tolist()
    return _selected(batch, size, places, numbers)


def _selected(value: Any, size: int, places: Tensor | slice, numbers: list[int]) -> Any:
    """The entries at some places of every part of a batch.

    Args:
        value: The batch, or a part of it.
        size: Examples in the batch.
        places: Which examples, to index tensors.
        numbers: The same as numbers, to index arrays and lists.
    """
    if isinstance(value, Tensor):
        return value[places] if _is_by_example(value, size) else value
    if isinstance(value, np.ndarray):
        return value[numbers] if _is_by_example(value, size) else value
    if isinstance(value, Mapping):
        return {name: _selected(part, size, places, numbers) for name, part in value.items()}
    if not isinstance(value, (tuple, list)):
        return value
    # One text per example, say; a tuple of tensors is searched.
    if len(value) == size and _are_plain(value):
        return [value[number] for number in numbers]
    return tuple(_selected(part, size, places, numbers) for part in value)


def _is_by_example(value: Tensor | np.ndarray[Any, Any], size: int) -> bool:
    """Whether the first axis is that of the examples."""
    if isinstance(value, Tensor) and value.is_nested:
        return False
    return value.ndim > 0 and value.shape[0] == size


def _are_plain(values: Iterable[Any]) -> bool:
    """Whether all are texts, numbers or None."""
    return all(value is None or isinstance(value, (str, bytes, int, float)) for value in values)


# ---------------------------------------------------------------- digests


class DataDigest:
    """SHA-256 over every tensor of the batches that pass through it."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, batch: Any) -> None:
        for tensor in in_main_memory(tensor.detach() for tensor in tensors(batch)):
            # Equal bytes of another dtype or shape are other data.
            self._digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            self._digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def short(self) -> bytes:
        """Its first eight bytes: enough to distinguish data that nobody made to collide."""
        return self._digest.digest()[:8]


def digest_of(batch: Any) -> str:
    """SHA-256 over every tensor of one batch."""
    digest = DataDigest()
    digest.add(batch)
    return digest.hexdigest()


# ---------------------------------------------------------------- settings inside a block


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floats without a given type of this one inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """Keep PyTorch's encoders off their fused path inside the block.

    It reads weights past adapters, and packs sentences of unlike lengths into nested tensors.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def packing(model: nn.Module) -> list[nn.Module]:
    """Encoders of PyTorch's that may pack padded batches into nested tensors."""
    return list(filter(_packs, model.modules()))


def _packs(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoder) and bool(module.__dict__.get(_PACKS))


@contextmanager
def nested_tensors(encoders: Iterable[nn.Module], made: bool) -> Iterator[None]:
    """Switch nested tensors of ``packing`` encoders on or off inside the block."""
    with _attribute(encoders, _PACKS, made):
        yield


@contextmanager
def _attribute(modules: Iterable[nn.Module], name: str, value: Any) -> Iterator[None]:
    """Give an attribute of modules another value inside the block."""
    before = [(module, getattr(module, name)) for module in modules]
    try:
        for module, _ in before:
            setattr(module, name, value)
        yield
    finally:
        for module, old in before:
            setattr(module, name, old)


@contextmanager
def other_forwards(
    instead: Iterable[tuple[nn.Module, Callable[[Callable[..., Any]], Any]]],
) -> Iterator[None]:
    """Replace forwards inside the block: those of pairs (module, make) by ``make(forward)``."""
    # A forward that the module's class has is not in the module's own dictionary: None.
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module, make in instead:
            before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = make(module.forward)
        yield
    finally:
        for module, forward in reversed(before):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


@contextmanager
def undisturbed(
    model: nn.Module, frozen: bool = True, compiled: bool = False, packed: bool = False
) -> Iterator[nn.Module]:
    """Run a model in evaluation mode inside the block, and restore its state afterwards.

    Feed-forwards run on all tokens at once, which gives the same: a part of the tokens could not
    be compared with the padding mask.

    Restored: each module's training flag, each parameter's ``requires_grad`` and ``grad``, torch's
    random state, what accelerate offloads, and the problem type that Transformers' classifiers
    write into their configuration when they see labels.

    Args:
        model: The model.
        frozen: Whether weights need no gradient inside the block.
        compiled: Whether a model that was compiled in place runs compiled. Compiled code ignores
            the hooks of measurements.
        packed: Whether PyTorch's encoder may make nested tensors of padded batches. Their parts
            have no shape to be read.
    """
    device = device_of(model)
    devices = [device.index or 0] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        # To set the stance imports dynamo, which takes a second; without it nothing is compiled.
        if "torch._dynamo" in sys.modules and not compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if not packed:
            stack.enter_context(nested_tensors(packing(model), made=False))
        stack.enter_context(sent_back(model))
        stack.enter_context(_restored(model))
        chunked = [module for module in model.modules() if vars(module).get(_CHUNK)]
        stack.enter_context(_attribute(chunked, _CHUNK, 0))
        model.eval()
        if frozen:
            for parameter in model.parameters():
                parameter.requires_grad_(False)
        yield model


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore modes, gradients and the configured problem type after the block."""
    # A forward may set a gradient or a problem type, and the caller changes modes.
    modes = [(module, module.training) for module in model.modules()]
    grads = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    config = getattr(bare(model), "config", None)
    problem_type = getattr(config, "problem_type", None)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, needed, grad in grads:
            parameter.requires_grad_(needed)
            parameter.grad = grad
        if config is not None and hasattr(config, "problem_type"):
            config.problem_type = problem_type
