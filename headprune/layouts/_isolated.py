"""Runs a proof as if nothing surrounded it: what a module computes must not depend on where
somebody asked for it."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_KERNELS = [
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


def isolated(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns or raises outside of every block that its caller is in.

    Autocast, inference mode, default devices, modes that see or change operations, transforms such
    as ``vmap``, tracers and the depth of calls all belong to a thread, so the function has one of
    its own. What belongs to the process is as PyTorch begins for as long as it runs: default dtype,
    precision, determinism, kernels, warnings.
    """
    answers: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(function(*args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="headprune-proof", daemon=True)
    with _USUAL:
        thread.start()
        thread.join()
    if errors:
        raise errors[0]
    return answers[0]


@contextmanager
def _usual_settings() -> Iterator[None]:
    """The settings of the process as they are when PyTorch is imported; afterwards they are as
    before."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    compiled = "torch._dynamo" in sys.modules  # to ask for it imports it, which takes a second
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.compiler.set_stance("force_eager") if compiled else nullcontext())
        stack.enter_context(sdpa_kernel(_KERNELS))
        stack.enter_context(_whole_products())
        stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        stack.callback(torch.set_default_dtype, dtype)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        yield


class _Shared:
    """A block that several threads may be in: the first one enters it, the last one leaves it.

    Settings of the process that each thread saved and put back by itself would stay changed where
    two overlap.
    """

    def __init__(self, block: Callable[[], AbstractContextManager[None]]) -> None:
        self._block, self._lock = block, threading.Lock()
        self._inside = 0
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._entered.enter_context(self._block())
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._entered.close()


_USUAL = _Shared(_usual_settings)


@contextmanager
def _whole_products() -> Iterator[None]:
    """Products of float32 in float32."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by PyTorch's newer switch: the older one refuses to answer
        yield
        return
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
