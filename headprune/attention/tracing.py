"""Whether a forward pass is being recorded: then sizes are symbols and numbers cannot be read.

A recorded pass has no branches: a decision in it holds for every later input.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_recorded() -> bool:
    """Whether ``torch.jit.trace``, ``torch.export`` or an ONNX export records the pass."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor's numbers exist and can be read."""
    if is_recorded() or torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor):
        return False
    # torch.func (vmap, grad, ...) runs the pass on wrapped tensors.
    return torch._C._functorch.peek_interpreter_stack() is None
