"""The proof: outputs of the gated model before the cut against outputs of the cut model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.running import call, device_of, outputs, to_device, undisturbed

#: Allowed difference by dtype, relative to the largest output: rounding in sums of another length, and no more.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference, the largest output it is to be seen against, and what was allowed."""

    maximum: float
    scale: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the two are equal up to rounding; a NaN in either is not."""
        return self.maximum <= self.tolerance


def sample_outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """Every floating-point output of the model in evaluation mode.

    Raises:
        InvalidValue: the model returns no floating-point tensor to compare.
    """
    with undisturbed(model), torch.no_grad():
        found = [t.detach().clone() for t in outputs(call(model, to_device(batch, device_of(model))))]
    if not found:
        raise InvalidValue("example", "a batch on which the model returns floating-point tensors", "no such output")
    return found


def compare(expected: list[Tensor], got: list[Tensor]) -> Difference:
    """Largest difference over all outputs; infinite when their number or shapes differ."""
    dtype = max((t.dtype for t in expected), key=lambda d: TOLERANCE.get(d, 0.0))
    scale = max((float(t.abs().max()) for t in expected if t.numel()), default=0.0)
    tolerance = TOLERANCE.get(dtype, 1e-5) * max(1.0, scale)
    if [t.shape for t in expected] != [t.shape for t in got]:
        return Difference(float("inf"), scale, tolerance)
    gaps = [float((a.double() - b.double()).abs().max()) for a, b in zip(expected, got, strict=True) if a.numel()]
    worst = float("nan") if any(g != g for g in gaps) else max(gaps, default=0.0)
    return Difference(worst, scale, tolerance)
