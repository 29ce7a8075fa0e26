"""Proof that the code of a class computes what a layout takes for granted: it runs on a small stand-in for a module.

Parts and parameters alone do not tell how a module that nobody published arranges its heads, or by what it scales.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import UnsupportedModel
from headprune.core.mixin import original_class


def stand_in(module: nn.Module, children: Mapping[str, nn.Module | None], **attributes: Any) -> Any:
    """A copy of ``module`` in evaluation mode with other children and attributes; the rest is shared.

    Raises:
        UnsupportedModel: the rest has parameters or buffers, so that it could compute anything, or change.
    """
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    rest = [n for n in names if n.partition(".")[0] not in children]
    if rest:
        raise UnsupportedModel(type(module).__name__, f"made of {', '.join(children)}", ", ".join(rest))
    made: Any = copy.copy(module)
    made.__class__ = original_class(module)
    kept = {k: nn.Dropout(0.0) if isinstance(v, nn.Dropout) else v for k, v in module._modules.items()}
    made.__dict__ = {**module.__dict__, "_modules": {**kept, **children}, "training": False}
    made.__dict__.update(attributes)
    return made


def agree(expected: Callable[[], Tensor], got: Callable[[], Any]) -> bool:
    """Whether both compute the same; an error of the second means no."""
    with torch.no_grad():
        try:
            found = got()
        except Exception:  # it is code that we know nothing about
            return False
        found = found[0] if isinstance(found, tuple) else found
        wanted = expected()
        return isinstance(found, Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)


def linear(n_in: int, n_out: int, seed: int = 0) -> nn.Linear:
    """A projection on the CPU with fixed values; draws no random numbers."""
    made = nn.Linear(n_in, n_out, device="meta").to_empty(device="cpu")
    made.weight.data = wave(n_out, n_in, start=seed)
    made.bias.data = wave(n_out, start=seed + 0.5)
    return made


def wave(*shape: int, start: float = 0.0) -> Tensor:
    """Fixed values between -1 and 1 in no order."""
    n = int(torch.Size(shape).numel())
    return (torch.arange(n, dtype=torch.float32) * 1.7 + start).sin().view(shape)
