"""What an attention's own code keeps of its last call, for others to read: without heads, nobody
renews it."""

from __future__ import annotations

import dis
import inspect
from functools import cache
from types import FunctionType
from typing import Any

from headprune.core.mixin import original_class


def stores(module: Any, path: str) -> bool:
    """Whether the code of the module that has this attribute assigns it when it is called."""
    parent, _, name = path.rpartition(".")
    return name in _assigned(original_class(module.get_submodule(parent)))


def forget_(module: Any) -> None:
    """Puts None where the code of a module, or of one inside it, has kept a tensor of an earlier
    call."""
    from torch import Tensor

    for part in module.modules():
        for name in _assigned(original_class(part)) & part.__dict__.keys():
            if isinstance(part.__dict__[name], Tensor):
                part.__dict__[name] = None


@cache
def _assigned(kind: type) -> frozenset[str]:
    """Names of the attributes that a class's methods assign, but for those that build it."""
    from torch import nn

    own = [f for base in kind.__mro__ if base not in nn.Module.__mro__ for f in vars(base).values()]
    code = [
        inspect.unwrap(f).__code__
        for f in own
        if isinstance(f, FunctionType) and f.__name__ != "__init__"
    ]
    return frozenset(
        i.argval for c in code for i in dis.get_instructions(c) if i.opname == "STORE_ATTR"
    )
