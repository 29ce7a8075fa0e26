"""Products of float32 matrices in float32, also where TF32 is allowed: what two ways of computing agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """For as long as the block lasts, float32 matrix products and convolutions take no TF32 and no bfloat16 inside.

    TF32 rounds what is multiplied to 11 bits. Two sums of the same products in another order then differ by 1e-3, not
    by 1e-6, and a proof of equality would refuse what is equal. The settings are as before afterwards.

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
