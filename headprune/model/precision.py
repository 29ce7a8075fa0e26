"""Controls TF32 and autocast: the precision of products, and copies of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

#: Relative precision of float32 products, by PyTorch's name for what they are computed in.
_STEPS = {"tf32": 2.0**-10, "bf16": 2.0**-7}


def product_eps(dtype: torch.dtype, device: torch.device) -> float:
    """Compute the relative precision of the numbers that a product of matrices multiplies.

    It is that of the dtype, or a coarser one where autocast or TF32 rounds them first.

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
    if dtype == torch.float32:
        eps = max(eps, _STEPS.get(_float32_products(device), eps))
    return eps


def _float32_products(device: torch.device) -> str:
    """What a device computes float32 products in: ``tf32``, ``bf16``, or another name."""
    backend: Any = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(device.type)
    try:
        return str(backend.matmul.fp32_precision)
    except AttributeError:  # before PyTorch 2.9, or a device without such a switch
        return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"


@contextmanager
def weights_change() -> Iterator[None]:
    """Keep autocast from caching narrow copies of weights, which change inside the block.

    ``torch.autocast`` copies a weight once and keeps the copy until its outermost block ends. Code
    that changes a weight inside a caller's autocast block would continue with the old numbers, and
    so would the caller. Copies from before the block are dropped after it.

    >>> layer, x = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     before = layer(x)
    ...     with weights_change(), torch.no_grad():
    ...         _ = layer.weight.mul_(2)
    ...     bool(layer(x) == 2 * before)
    True
    """
    # Only the nesting depth shows whether a caller's block is open.
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
    """Compute float32 products and convolutions without TF32 and bfloat16 inside the block.

    TF32 rounds what is multiplied to 11 bits. Two sums of the same products in another order then
    differ by 1e-3 instead of 1e-6, and a proof of equality would refuse what is equal. The settings
    are restored afterwards.

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
    """Matrix products in full precision."""
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
    """Convolutions in full precision."""
    backend = torch.backends.cudnn
    try:
        before = backend.allow_tf32
    except RuntimeError:  # as in _products
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
