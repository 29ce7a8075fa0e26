"""Run a proof independently of the caller's settings and contexts."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

#: All kernels, as PyTorch allows by default.
_KERNELS = [
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


def isolated(function: Callable[..., Any], *args: Any) -> Any:
    """Return what ``function(*args)`` returns or raises outside of the caller's contexts.

    Autocast, inference mode, default devices, function and dispatch modes, transforms such as
    ``vmap``, tracers and the recursion depth belong to a thread, so the function runs in a new
    thread. Default dtype, precision, determinism, kernels and warnings belong to the process; they
    have PyTorch's defaults while it runs.
    """
    answers: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        # An exception in a thread would only be printed; the caller must get it.
        try:
            answers.append(function(*args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="headprune-proof", daemon=True)
    with _DEFAULTS:
        thread.start()
        thread.join()
    if errors:
        raise errors[0]
    return answers[0]


@contextmanager
def _default_settings() -> Iterator[None]:
    """Give the process PyTorch's default settings, and restore the old ones."""
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        # 1. Settings that have a context manager.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # ``set_stance`` imports dynamo, which takes a second; without dynamo nothing is compiled.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(_KERNELS))
        stack.enter_context(_full_precision())
        # 2. Settings that are restored by hand.
        stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        stack.callback(torch.set_default_dtype, dtype)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        yield


class _SharedContext:
    """A context for several threads: the first one enters it, the last one leaves it.

    If each thread saved and restored process settings, overlapping threads would leave them
    changed.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._n_inside = 0
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_inside:
                self._entered.enter_context(self._make())
            self._n_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if not self._n_inside:
                self._entered.close()


_DEFAULTS = _SharedContext(_default_settings)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32 instead of TF32."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The user chose by PyTorch's newer setting; mixing it with the older one is an error.
        backend: Any = torch.backends.cuda.matmul
        newer = backend.fp32_precision
        backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            backend.fp32_precision = newer
        return
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
