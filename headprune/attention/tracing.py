"""Whether a forward pass is recorded, so that sizes are symbols and numbers cannot be looked at.

A recorded pass has no branch: what is decided in it, is decided for every later input.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_recorded() -> bool:
    """Whether ``torch.jit.trace``, ``torch.export`` or an ONNX export records the pass, for sizes
    other than these."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor's numbers can be read: nothing records, compiles or vectorises the pass, and
    it has some."""
    if is_recorded() or torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor):
        return False
    return torch._C._functorch.peek_interpreter_stack() is None  # torch.func: vmap, grad, ...
