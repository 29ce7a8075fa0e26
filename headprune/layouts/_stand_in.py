"""Stand-ins: small copies of a module that run its class's code in a proof.

Names of parts and parameters do not show how a module arranges its heads or scales its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from headprune.core.errors import UnsupportedModel
from headprune.core.mixin import FORWARDS, has_own_forward, original_class

#: Attributes that every module has: hooks, parameters, children and the training flag.
_MODULE_STATE = frozenset(nn.Module().__dict__)


def stand_in(module: nn.Module, children: Mapping[str, nn.Module | None], **attributes: Any) -> Any:
    """Copy a module with other children and attributes, in evaluation mode and without hooks.

    Args:
        module: The module whose class's code the copy runs.
        children: The child modules of the copy that replace the module's.
        **attributes: Attributes of the copy.

    Raises:
        UnsupportedModel: the module has other parameters or buffers, or a replaced ``forward``.
    """
    # Other state could hold anything, so that a proof about the copy says nothing of the module.
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    rest = [name for name in names if name.partition(".")[0] not in children]
    if rest:
        raise UnsupportedModel(
            type(module).__name__, f"made of {', '.join(children)}", ", ".join(rest)
        )
    copy = _bare(module, children)
    copy.__dict__.update(attributes)
    return copy


def _bare(module: nn.Module, children: Mapping[str, nn.Module | None]) -> Any:
    """Copy a module without parameters; its other children are copied the same way."""
    if isinstance(module, nn.Dropout):
        return nn.Dropout(0.0)
    if has_own_forward(module):
        raise UnsupportedModel(
            type(module).__name__, "one with its class's own forward", "a replaced forward"
        )
    # 1. An empty module of the same class; ``__init__`` of the class may need unknown arguments.
    kind: Any = original_class(module)
    copy = kind.__new__(kind)
    nn.Module.__init__(copy)

    # 2. Its plain attributes, without what hooks of accelerate have put there.
    left_out = {*_MODULE_STATE, *FORWARDS, "_hf_hook"}
    for name, value in module.__dict__.items():
        if name not in left_out:
            copy.__dict__[name] = value

    # 3. Its children in their order, which code that iterates over them may rely on.
    copy._modules.update(dict.fromkeys(module._modules))
    for name, child in module._modules.items():
        if child is not None and name not in children:
            copy._modules[name] = _bare(child, {})
    copy._modules.update(children)
    copy.training = False
    return copy


def on_cpu(module: nn.Module) -> Any:
    """Copy a module with fp32 parameters of the same shapes, on the CPU and without hooks.

    Raises:
        UnsupportedModel: a replaced ``forward``, or a lazy parameter that has no shape yet.
    """
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        must = "run once before, because it has lazy parameters"
        raise UnsupportedModel(type(module).__name__, must, "parameters without a shape")
    copy = _bare(module, dict.fromkeys(module._modules))
    for name, child in module._modules.items():
        copy._modules[name] = None if child is None else on_cpu(child)
    for name, parameter in module._parameters.items():
        if parameter is None:
            copy._parameters[name] = None
        else:
            copy._parameters[name] = nn.Parameter(fixed_values(*parameter.shape))
    for name, buffer in module._buffers.items():
        copy._buffers[name] = None if buffer is None else _tensor_on_cpu(buffer)
    # Tensors that are plain attributes.
    for name, value in module.__dict__.items():
        if isinstance(value, Tensor):
            copy.__dict__[name] = _tensor_on_cpu(value)
    return copy


def _tensor_on_cpu(tensor: Tensor) -> Tensor:
    """Move a tensor to the CPU; a meta tensor, which has no values, becomes ones."""
    if tensor.is_meta:
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().cpu()


def outputs_agree(expected: Callable[[], Tensor], computed: Callable[[], Any]) -> bool:
    """Return whether both functions compute the same; an error counts as no.

    Raises:
        MemoryError: memory ran out; so do PyTorch's errors of this kind.
    """
    wanted = first_tensor(expected)
    output = first_tensor(computed)
    return wanted is not None and output is not None and nearly_equal(output, wanted)


def first_tensor(run: Callable[[], Any]) -> Tensor | None:
    """Return the first tensor that unknown code returns; None where it fails.

    Raises:
        MemoryError: memory ran out; so do PyTorch's errors of this kind.
    """
    with torch.no_grad():
        try:
            output = run()
        except (MemoryError, torch.OutOfMemoryError):
            raise  # a proof that had no memory must not count as a failed one
        except Exception as error:
            # On a CPU, PyTorch reports missing memory as a RuntimeError.
            if "memory" in str(error) and "alloc" in str(error):
                raise
            return None
    if isinstance(output, tuple) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def nearly_equal(output: Tensor, wanted: Tensor) -> bool:
    """Return whether tensors are equal up to rounding, with NaN in the same places."""
    return output.shape == wanted.shape and torch.allclose(
        output, wanted, atol=1e-5, equal_nan=True
    )


def fixed_linear(n_in: int, n_out: int, seed: int = 0) -> nn.Linear:
    """Make a projection on the CPU with fixed values."""
    # By way of "meta", because the usual initialisation draws from the user's generator.
    made = nn.Linear(n_in, n_out, device="meta").to_empty(device="cpu")
    made.weight.data = fixed_values(n_out, n_in, start=seed)
    made.bias.data = fixed_values(n_out, start=seed + 0.5)
    return made


def fixed_values(*shape: int, start: float = 0.0) -> Tensor:
    """Make a tensor of irregular values between -1 and 1 without a random generator."""
    n = int(torch.Size(shape).numel())
    return (torch.arange(n, dtype=torch.float32) * 1.7 + start).sin().view(shape)
