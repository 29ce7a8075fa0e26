"""Find and clear the tensors that an attention's code stores on itself in each call."""

from __future__ import annotations

import dis
import inspect
from functools import cache
from types import FunctionType
from typing import Any

from headprune.core.mixin import original_class


def stores(module: Any, path: str) -> bool:
    """Return whether the module's code assigns this attribute when it is called."""
    parent, _, name = path.rpartition(".")
    return name in _assigned(original_class(module.get_submodule(parent)))


def forget_(module: Any) -> None:
    """Set stored tensors of an earlier call to None; without heads, no code renews them."""
    from torch import Tensor

    for part in module.modules():
        for name in _assigned(original_class(part)) & part.__dict__.keys():
            if isinstance(part.__dict__[name], Tensor):
                part.__dict__[name] = None


@cache
def _assigned(kind: type) -> frozenset[str]:
    """Names of the attributes that a class's methods assign, except ``__init__``."""
    from torch import nn

    names: set[str] = set()
    for base in kind.__mro__:
        # What every module inherits assigns PyTorch's own state.
        if base in nn.Module.__mro__:
            continue
        for function in vars(base).values():
            if isinstance(function, FunctionType) and function.__name__ != "__init__":
                # Unwrapped, because a decorator's code hides the method's.
                code = inspect.unwrap(function).__code__
                for step in dis.get_instructions(code):
                    if step.opname == "STORE_ATTR":
                        names.add(step.argval)
    return frozenset(names)
