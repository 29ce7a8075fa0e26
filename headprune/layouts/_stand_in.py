"""Proof that the code of a class computes what a layout takes for granted: it runs on a small
stand-in for a module.

Parts and parameters alone do not tell how a module that nobody published arranges its heads, or by
what it scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from headprune.core.errors import UnsupportedModel
from headprune.core.mixin import FORWARDS, has_own_forward, original_class

_KEPT_BY_TORCH = frozenset(nn.Module().__dict__)


def stand_in(module: nn.Module, children: Mapping[str, nn.Module | None], **attributes: Any) -> Any:
    """A copy of ``module`` in evaluation mode with other children and attributes, and without
    hooks.

    Raises:
        UnsupportedModel: the rest has parameters or buffers, so that it could compute anything, or
            change; or a ``forward`` of its own, so that its class does not tell what it computes.
    """
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    rest = [n for n in names if n.partition(".")[0] not in children]
    if rest:
        raise UnsupportedModel(
            type(module).__name__, f"made of {', '.join(children)}", ", ".join(rest)
        )
    made = _bare(module, children)
    made.__dict__.update(attributes)
    return made


def _bare(module: nn.Module, children: Mapping[str, nn.Module | None]) -> Any:
    """A copy with other children, and of the rest such copies; it drops out nothing."""
    if isinstance(module, nn.Dropout):
        return nn.Dropout(0.0)
    if has_own_forward(module):
        raise UnsupportedModel(
            type(module).__name__, "run by its class's forward", "another forward"
        )
    kind: Any = original_class(module)
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    passing = (*FORWARDS, "_hf_hook")
    made.__dict__.update(
        {k: v for k, v in module.__dict__.items() if k not in _KEPT_BY_TORCH and k not in passing}
    )
    rest = {
        k: None if v is None else _bare(v, {})
        for k, v in module._modules.items()
        if k not in children
    }
    made._modules.update({**dict.fromkeys(module._modules), **rest, **children})
    made.training = False
    return made


def on_cpu(module: nn.Module) -> Any:
    """A copy of ``module`` in evaluation mode on the CPU, without hooks: parameters of the same
    shapes, in fp32.

    Raises:
        UnsupportedModel: a ``forward`` of its own, or a lazy parameter that has no shape yet.
    """
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        raise UnsupportedModel(type(module).__name__, "run once", "parameters without a shape")
    made = _bare(module, dict.fromkeys(module._modules))
    made._modules.update({k: None if v is None else on_cpu(v) for k, v in module._modules.items()})
    for name, parameter in module._parameters.items():
        made._parameters[name] = None if parameter is None else nn.Parameter(wave(*parameter.shape))
    for name, buffer in module._buffers.items():
        made._buffers[name] = buffer if buffer is None else _seen(buffer)
    for name, value in module.__dict__.items():
        if isinstance(value, Tensor):
            made.__dict__[name] = _seen(value)
    return made


def _seen(tensor: Tensor) -> Tensor:
    """A tensor on the CPU; ones where it holds no numbers."""
    return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu()


def agree(expected: Callable[[], Tensor], got: Callable[[], Any]) -> bool:
    """Whether both compute the same; an error of the second means no.

    Raises:
        MemoryError: there was none left; so do PyTorch's errors of the kind.
    """
    wanted, found = tried(expected), tried(got)
    return wanted is not None and found is not None and same(found, wanted)


def tried(run: Callable[[], Any]) -> Tensor | None:
    """The first tensor of what code that we know nothing about returns; None where it fails.

    Raises:
        MemoryError: there was none left; so do PyTorch's errors of the kind.
    """
    with torch.no_grad():
        try:
            found = run()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if "memory" in str(error) and "alloc" in str(
                error
            ):  # PyTorch's on a CPU is a RuntimeError
                raise
            return None
    found = found[0] if isinstance(found, tuple) and found else found
    return found if isinstance(found, Tensor) else None


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors are equal up to rounding, and not a number in the same places."""
    return found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5, equal_nan=True)


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
