"""What TF32 and autocast do to products: how coarse they get, float32 throughout, no narrow copies
of old weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

#: The relative step of what float32 products are computed in, by PyTorch's name for it.
_STEPS = {"tf32": 2.0**-10, "bf16": 2.0**-7}


def product_eps(dtype: torch.dtype, device: torch.device) -> float:
    """The relative step of the numbers that are multiplied in products of matrices of a type: that
    of the type, or a wider one where autocast or TF32 rounds them before.

    >>> product_eps(torch.float32, torch.device("cpu")) == 2**-23
    True
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     product_eps(torch.float32, torch.device("cpu")) == 2**-7
    True
    """
    eps = torch.finfo(dtype).eps
    if dtype == torch.float64:  # autocast leaves it alone, too
        return eps
    if torch.is_autocast_enabled(device.type):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(device.type)).eps)
    return max(eps, _STEPS.get(_float32_products(device), eps)) if dtype == torch.float32 else eps


def _float32_products(device: torch.device) -> str:
    """What a device takes float32 products in: ``tf32``, ``bf16``, or another name, which is
    float32 itself."""
    backend: Any = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(device.type)
    try:
        return str(backend.matmul.fp32_precision)
    except AttributeError:  # before PyTorch 2.9, or a device without such a switch
        return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"


@contextmanager
def weights_change() -> Iterator[None]:
    """For as long as the block lasts, no narrow copies of weights are kept, and none from before
    are used afterwards.

    ``torch.autocast`` copies a weight once and keeps the copy until the outermost block is left.
    What changes a weight inside of a caller's block would go on with the old numbers, and so would
    the caller.

    >>> layer, x = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     before = layer(x)
    ...     with weights_change(), torch.no_grad():
    ...         _ = layer.weight.mul_(2)
    ...     bool(layer(x) == 2 * before)
    True
    """
    within = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    if not within:  # a block of autocast that is entered here takes its copies with it
        yield
        return
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
        torch.clear_autocast_cache()


@contextmanager
def full_precision() -> Iterator[None]:
    """For as long as the block lasts, float32 matrix products and convolutions take no TF32 and no
    bfloat16 inside.

    TF32 rounds what is multiplied to 11 bits. Two sums of the same products in another order then
    differ by 1e-3, not by 1e-6, and a proof of equality would refuse what is equal. The settings
    are as before afterwards.

    >>> torch.set_float32_matmul_precision("high")
    >>> with full_precision():
    ...     torch.get_float32_matmul_precision()
    'highest'
    >>> torch.get_float32_matmul_precision()
    'high'
    >>> torch.set_float32_matmul_precision("highest")
    """
    with ExitStack() as stack:
        stack.enter_context(_products())
        stack.enter_context(_convolutions())
        yield


@contextmanager
def _products() -> Iterator[None]:
    backend = torch.backends.cuda.matmul
    try:
        before = torch.get_float32_matmul_precision()
        narrow = backend.allow_tf32 or before != "highest"
    except RuntimeError:  # set by PyTorch's newer switch: the older one refuses to answer
        with _ieee(backend):
            yield
        return
    if not narrow:
        yield
        return
    try:
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _convolutions() -> Iterator[None]:
    backend = torch.backends.cudnn
    try:
        before = backend.allow_tf32
    except RuntimeError:
        with _ieee(backend.conv):  # type: ignore[attr-defined,unused-ignore]
            yield
        return
    try:
        backend.allow_tf32 = False
        yield
    finally:
        backend.allow_tf32 = before


@contextmanager
def _ieee(backend: Any) -> Iterator[None]:
    """One operation of one backend without TF32, by PyTorch's newer switch."""
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "ieee"
        yield
    finally:
        backend.fp32_precision = before
