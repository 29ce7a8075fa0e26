"""Precisions to compute in: a dtype of weights, TF32 on or off, autocast."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
import torch

from headprune.model.double import Doubled


@dataclass(frozen=True)
class Mode:
    """A precision.

    Args:
        name: By which tolerances go.
        dtype: Of weights and inputs.
        tf32: Whether fp32 products may take TF32; a CPU has none.
        autocast: To bfloat16.
    """

    name: str
    dtype: torch.dtype
    tf32: bool = False
    autocast: bool = False


FP64 = Mode("fp64", torch.float64)
FP32 = Mode("fp32", torch.float32)
TF32 = Mode("tf32", torch.float32, tf32=True)
AUTOCAST = Mode("autocast", torch.float32, autocast=True)
BF16 = Mode("bf16", torch.bfloat16)
FP16 = Mode("fp16", torch.float16)

MODES = (FP64, FP32, TF32, AUTOCAST, BF16, FP16)
#: Those that have the numbers of fp32 at least.
WIDE = (FP64, FP32, TF32)


@contextmanager
def tf32(allowed):
    """Allows or forbids TF32 in products and in convolutions, which PyTorch allows it by
    default."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def computing(mode, device):
    """Computes in a mode for as long as the block lasts; in fp64 also the steps that models take in
    fp32."""
    with ExitStack() as stack:
        stack.enter_context(tf32(mode.tf32))
        if mode.dtype == torch.float64:
            stack.enter_context(Doubled())
        if mode.autocast:
            stack.enter_context(torch.autocast(device.type, torch.bfloat16))
        yield


def usable(mode, device):
    """Skips a test where the device has no such mode."""
    if mode.tf32 and device.type == "cpu":
        pytest.skip("a CPU has no TF32")
