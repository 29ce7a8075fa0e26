"""fp64 throughout: steps that models take in fp32 would hide what a proof looks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Doubled(TorchFunctionMode):
    """Takes every step in fp64 that a model takes in fp32 (norms, angles, softmax)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def double_(model: nn.Module) -> nn.Module:
    """Convert a model to fp64, to run in ``Doubled``."""
    # The grouped product of experts takes no fp64: they run one by one.
    if getattr(getattr(model, "config", None), "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # type: ignore[operator]
    return model.double()
