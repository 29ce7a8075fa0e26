"""What a call of ours may be surrounded by: blocks, modes, transforms and settings of PyTorch and
of Python."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headprune.model.running import default_dtype

Asked = Callable[[], Any]


class Spoiling(TorchFunctionMode):
    """Every softmax is another one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if "softmax" in func.__name__ or "scaled_dot" in func.__name__ else out


class Failing(TorchDispatchMode):
    """No operation works."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no operation works here")


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def precision(name: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _within(block: Callable[[], Any]) -> Callable[[Asked], Any]:
    def ask(asked: Asked) -> Any:
        with block():
            return asked()

    return ask


def _transformed(transform: Callable[..., Any]) -> Callable[[Asked], Any]:
    def ask(asked: Asked) -> Any:
        answers = []

        def inner(x: torch.Tensor) -> torch.Tensor:
            answers.append(asked())
            return (x * x).sum()

        transform(inner)(torch.ones(2, 2))
        return answers[0]

    return ask


def _deep(asked: Asked) -> Any:
    """With few calls left before Python's limit."""

    def descend(n: int) -> Any:
        return descend(n - 1) if n else asked()

    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    return descend(sys.getrecursionlimit() - depth - 110)


#: By name: runs a function in its surroundings and returns what it returns.
CIRCUMSTANCES: dict[str, Callable[[Asked], Any]] = {
    "autocast": _within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "inference mode": _within(torch.inference_mode),
    "no grad": _within(torch.no_grad),
    "device meta": _within(lambda: torch.device("meta")),
    "default device meta": _within(lambda: default_device("meta")),
    "default dtype fp64": _within(lambda: default_dtype(torch.float64)),
    "default dtype bf16": _within(lambda: default_dtype(torch.bfloat16)),
    "deterministic": _within(deterministic),
    "matmul medium": _within(lambda: precision("medium")),
    "one kernel": _within(lambda: sdpa_kernel([SDPBackend.CUDNN_ATTENTION])),
    "function mode": _within(Spoiling),
    "dispatch mode": _within(Failing),
    "fake tensors": _within(FakeTensorMode),
    "warnings are errors": _within(warnings_are_errors),
    "vmap": _transformed(torch.vmap),
    "grad": _transformed(lambda f: torch.func.grad(f)),
    "deep in calls": _deep,
}
