"""Runs a model on batches without leaving a trace: calls, batch sizes, modes, gradients and random
states."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.inside import bare
from headprune.model.offloaded import offloaders, sent_back
from headprune.model.transfers import in_main_memory

#: The keys of a batch that tell the answers.
ANSWERS = ("labels", "start_positions", "end_positions")
#: What to pass in place of batches ``(x, y)``.
AS_MAPPING = (
    "Give mappings, such as {'input_ids': x, 'labels': y}, or pass loss=, a callable (model, batch)"
    " that reads x and y."
)
#: The attribute by which PyTorch's encoder packs padded batches.
_PACKS = "use_nested_tensor"


def call(model: nn.Module, batch: Any) -> Any:
    """Calls a model with a batch: a mapping by keyword, a tuple or list by position, a tensor as it
    is.

    Answers that the model's ``forward`` has no parameter for are left out: a module of one's own
    need not take them.
    """
    if isinstance(batch, Mapping):
        return model(**_taken(model, batch))
    if isinstance(batch, (tuple, list)):
        check_positions(model, batch)
        return model(*batch)
    return model(batch)


def check_positions(model: nn.Module, batch: tuple[Any, ...] | list[Any]) -> None:
    """Refuses labels in the place of a Transformers model's mask, which would be read as one
    without a word.

    Raises:
        InvalidValue: a tensor where the model expects a mask, and which is none.
    """
    if not hasattr(model, "main_input_name") or len(batch) < 2:
        return
    for name, value in zip(inspect.signature(model.forward).parameters, batch, strict=False):
        if (
            "mask" not in name
            or not isinstance(value, Tensor)
            or value.is_floating_point()
            or value.dtype == torch.bool
        ):
            continue
        other = value.device.type == "cpu" and bool(((value != 0) & (value != 1)).any())
        if value.ndim < 2 or other:
            got = f"{value.dtype} of shape {list(value.shape)} in the place of {name}"
            raise InvalidValue(
                "batch", f"what {type(model).__name__}.forward takes by position", got, AS_MAPPING
            )


def _taken(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    if not any(name in batch for name in ANSWERS):
        return batch
    parameters = inspect.signature(bare(model).forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return batch
    return {
        name: value for name, value in batch.items() if name not in ANSWERS or name in parameters
    }


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
    """The floating-point tensors of a model's output, without caches and attention maps, whose
    shapes change."""
    if isinstance(value, Mapping):
        skipped = (
            "past_key_values",
            "attentions",
            "cross_attentions",
            "decoder_attentions",
            "encoder_attentions",
        )
        value = [v for k, v in value.items() if k not in skipped]
    return [t for t in tensors(value) if t.is_floating_point()]


def device_of(model: nn.Module) -> torch.device:
    """Where a model, or a module, takes its inputs; where its weights run, if accelerate offloads
    them."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    hook = (
        next((h for m in model.modules() for h in offloaders(m)), None)
        if device.type == "meta"
        else None
    )
    return (
        device
        if hook is None or hook.execution_device is None
        else torch.device(hook.execution_device)
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; containers are copied, other values pass
    through."""
    return over_tensors(batch, lambda t: t.to(device, non_blocking=True))


def over_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The batch with ``function`` of every tensor; containers are copied, other values pass
    through."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {k: over_tensors(v, function) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(over_tensors(v, function) for v in batch)
    return batch


def batch_size(batch: Any, where: str = "batch") -> int:
    """Examples in a batch: the first dimension of its first tensor that has one.

    Raises:
        InvalidValue: no tensor, or no example.
    """
    first = next((t for t in tensors(batch) if t.ndim), None)
    if first is None:
        hint = "Make tensors of it, as a DataLoader does."
        raise InvalidValue(
            where, "made of tensors with the examples first", type(batch).__name__, hint
        )
    if not first.shape[0]:
        raise InvalidValue(where, "one with examples", "an empty batch", "Leave empty batches out.")
    return first.shape[0]


def some_examples(batch: Any, places: Tensor | slice) -> Any:
    """The batch of some of its examples: of everything with one entry per example those entries.

    That is of tensors and arrays their rows, and of lists and tuples of plain values (texts,
    numbers) their items.

    >>> some_examples({"x": torch.arange(3), "texts": ["a", "b", "c"]}, slice(2))
    {'x': tensor([0, 1]), 'texts': ['a', 'b']}
    """
    size = batch_size(batch)
    numbers = list(range(size)[places]) if isinstance(places, slice) else places.tolist()

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (
                value[places]
                if not value.is_nested and value.ndim and value.shape[0] == size
                else value
            )
        if isinstance(value, np.ndarray):
            return value[numbers] if value.ndim and len(value) == size else value
        if isinstance(value, Mapping):
            return {key: of(one) for key, one in value.items()}
        if isinstance(value, (tuple, list)):
            plain = all(one is None or isinstance(one, (str, bytes, int, float)) for one in value)
            if plain and len(value) == size:
                return [value[n] for n in numbers]
            return tuple(map(of, value))
        return value

    return of(batch)


class DataDigest:
    """SHA-256 over every tensor of the batches that pass through it."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, batch: Any) -> None:
        for tensor in in_main_memory(tensor.detach() for tensor in tensors(batch)):
            self._digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            self._digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def short(self) -> bytes:
        """Its first eight bytes, which tell data apart that nobody has made alike on purpose."""
        return self._digest.digest()[:8]


def digest_of(batch: Any) -> str:
    """SHA-256 over every tensor of one batch."""
    digest = DataDigest()
    digest.add(batch)
    return digest.hexdigest()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """For as long as the block lasts, floats that are made without a type are of this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """PyTorch's encoders take no fused way: it reads weights past adapters, and packs sentences of
    unlike lengths into nested tensors."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def packing(model: nn.Module) -> list[nn.Module]:
    """Encoders of PyTorch's that pack padded batches into nested tensors, where they may."""
    return [
        m
        for m in model.modules()
        if isinstance(m, nn.TransformerEncoder) and m.__dict__.get(_PACKS)
    ]


@contextmanager
def nested_tensors(encoders: Iterable[nn.Module], made: bool) -> Iterator[None]:
    """For as long as the block lasts, encoders that are ``packing`` make nested tensors, or
    none."""
    encoders = list(encoders)
    before = [getattr(encoder, _PACKS) for encoder in encoders]
    try:
        for encoder in encoders:
            setattr(encoder, _PACKS, made)
        yield
    finally:
        for encoder, packs in zip(encoders, before, strict=True):
            setattr(encoder, _PACKS, packs)


@contextmanager
def other_forwards(
    instead: Iterable[tuple[nn.Module, Callable[[Callable[..., Any]], Any]]],
) -> Iterator[None]:
    """For as long as the block lasts, modules of pairs (module, make) are called by
    ``make(forward)``."""
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
    """Evaluation mode and, if ``frozen``, weights that need no gradient; everything is put back
    afterwards.

    Put back: each module's training flag, each parameter's ``requires_grad`` and ``grad``, torch's
    random state, what accelerate offloads, and the problem type that Transformers' classifiers
    write into their configuration when they see labels. A model that
    was compiled in place runs uncompiled, unless ``compiled``: compiled code ignores the hooks that
    measurements hang on it. PyTorch's encoder makes no nested tensors of padded batches, whose
    parts have no shape to be read, unless ``packed``.
    """
    modes = [(m, m.training) for m in model.modules()]
    grads = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    device = device_of(model)
    devices = [device.index or 0] if device.type == "cuda" else []
    config = getattr(bare(model), "config", None)
    problem_type = getattr(config, "problem_type", None)
    # Setting the stance imports dynamo, which takes a second; nothing is compiled where nobody has
    # imported it.
    forced = "torch._dynamo" in sys.modules and not compiled
    eager = torch.compiler.set_stance("force_eager") if forced else nullcontext()
    plain = nested_tensors([] if packed else packing(model), made=False)
    with torch.random.fork_rng(devices=devices), eager, plain, sent_back(model):
        try:
            model.eval()
            if frozen:
                for parameter, _, _ in grads:
                    parameter.requires_grad_(False)
            yield model
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter, needed, grad in grads:
                parameter.requires_grad_(needed)
                parameter.grad = grad
            if config is not None and hasattr(config, "problem_type"):
                config.problem_type = problem_type
