"""fp64 throughout: models take some steps in fp32 whatever their dtype, which would hide what a
proof looks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Doubled(TorchFunctionMode):
    """Every step that a model takes in fp32 whatever its dtype (norms, angles, softmax) is taken in
    fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        if func is Tensor.float:
            return args[0].double()
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **kwargs)


def double_(model: nn.Module) -> nn.Module:
    """The model in fp64, to run in ``Doubled``; experts go one by one, for their grouped product
    takes no fp64."""
    if getattr(getattr(model, "config", None), "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # type: ignore[operator]
    return model.double()
