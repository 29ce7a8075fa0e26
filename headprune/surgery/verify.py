"""The comparison of a cut model's outputs with those of the gated model before the cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.mistakes import explained_one
from headprune.model.precision import full_precision
from headprune.model.running import call, device_of, outputs, to_device, undisturbed

#: Allowed difference by dtype, relative to the largest output: rounding in sums of another length,
#: and no more. In fp64 it is that of fp32 norms and angles, which many models compute inside
#: whatever their dtype.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_OTHER_DTYPES = 1e-5

#: The hint where a cut model's code cannot run, or differs for a reason that is not rounding.
SIZE_NOT_CUT = (
    "The model is unchanged. Its code uses a size or a number of heads that the layout does not"
    " cut. Leave this site out, or describe it with a layout of your own (docs/custom-models.md)."
)


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference of outputs.

    Args:
        maximum: The difference.
        scale: The largest finite output, which gives the difference its size.
        tolerance: The allowed difference.
    """

    maximum: float
    scale: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the two are equal up to rounding; a NaN in only one of them is not."""
        return self.maximum <= self.tolerance


def sample_outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """Every floating-point output of the model in evaluation mode.

    Without TF32, which rounds more than ``TOLERANCE`` allows.

    Raises:
        InvalidValue: the model returns no floating-point tensor to compare, or nothing finite in
            them.
    """
    with (
        undisturbed(model, packed=True),
        full_precision(),
        torch.no_grad(),
        explained_one(model, batch, "example"),
    ):
        returned = call(model, to_device(batch, device_of(model)))
        # Copies: a later call may write into the same memory.
        tensors = [tensor.detach().clone() for tensor in outputs(returned)]
    if not tensors:
        must = "a batch on which the model returns floating-point tensors"
        raise InvalidValue("example", must, "no such output")
    if not any(bool(tensor.isfinite().any()) for tensor in tensors):
        must = "a batch on which the model's outputs are finite"
        hint = "Look for NaN or infinite values in its inputs."
        raise InvalidValue("example", must, "none that is", hint)
    return tensors


def compare(expected: list[Tensor], got: list[Tensor]) -> Difference:
    """Largest difference over all outputs; infinite when their number or shapes differ."""
    # 1. The allowed difference: that of the least precise output.
    tolerance = scale = 0.0
    for tensor in expected:
        tolerance = max(tolerance, TOLERANCE.get(tensor.dtype, 0.0))
        finite = tensor[tensor.isfinite()]
        if finite.numel():
            scale = max(scale, float(finite.abs().max()))
    tolerance = (tolerance or _OTHER_DTYPES) * max(1.0, scale)
    # 2. The difference.
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in got]:
        return Difference(math.inf, scale, tolerance)
    worst = 0.0
    for one, other in zip(expected, got, strict=True):
        if one.numel():  # an empty tensor has no maximum
            gap = _gap(one, other)
            if math.isnan(gap):
                return Difference(math.nan, scale, tolerance)
            worst = max(worst, gap)
    return Difference(worst, scale, tolerance)


def _gap(one: Tensor, other: Tensor) -> float:
    """Largest difference of two tensors.

    Where both have the same infinity or both NaN, as at padding, there is none.
    """
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one.double() - other.double()).abs().masked_fill(same, 0.0).max())
