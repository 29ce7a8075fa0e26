"""The proof: outputs of the gated model before the cut against outputs of the cut model."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference, the largest output it is to be seen against, and what was
    allowed."""

    maximum: float
    scale: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the two are equal up to rounding; a NaN in only one of them is not."""
        return self.maximum <= self.tolerance


def sample_outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """Every floating-point output of the model in evaluation mode.

    Without TF32, for which ``TOLERANCE`` leaves no room.

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
        found = [
            t.detach().clone() for t in outputs(call(model, to_device(batch, device_of(model))))
        ]
    if not found:
        raise InvalidValue(
            "example", "a batch on which the model returns floating-point tensors", "no such output"
        )
    if not any(bool(t.isfinite().any()) for t in found):
        hint = "Look for NaN or infinite values in its inputs."
        raise InvalidValue(
            "example", "a batch on which the model's outputs are finite", "none that is", hint
        )
    return found


def compare(expected: list[Tensor], got: list[Tensor]) -> Difference:
    """Largest difference over all outputs; infinite when their number or shapes differ."""
    dtype = max((t.dtype for t in expected), key=lambda d: TOLERANCE.get(d, 0.0))
    scale = max(
        (float(t[t.isfinite()].abs().max()) for t in expected if t.isfinite().any()), default=0.0
    )
    tolerance = TOLERANCE.get(dtype, 1e-5) * max(1.0, scale)
    if [t.shape for t in expected] != [t.shape for t in got]:
        return Difference(float("inf"), scale, tolerance)
    gaps = [_gap(a, b) for a, b in zip(expected, got, strict=True) if a.numel()]
    worst = float("nan") if any(g != g for g in gaps) else max(gaps, default=0.0)
    return Difference(worst, scale, tolerance)


def _gap(a: Tensor, b: Tensor) -> float:
    """Largest difference; where both are the same infinity or both NaN, as at padding, there is
    none."""
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a.double() - b.double()).abs().masked_fill(same, 0.0).max())
