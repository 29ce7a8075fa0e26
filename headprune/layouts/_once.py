"""Remember what was proved of a module, for all modules that are built alike.

A model has many such modules, and most functions of the package visit all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

from headprune.core.errors import UnsupportedModel
from headprune.core.mixin import FORWARDS, has_own_forward, original_class
from headprune.layouts._code import reached_functions

#: Types whose values compare by what they hold.
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
#: Answers that a proof remembers; bounds the memory of a process that builds many structures.
_MANY = 256


def check_proved(module: Any, proved: bool, must: str) -> None:
    """Refuse a module whose ``forward`` was not proved to compute what it must.

    Raises:
        UnsupportedModel: ``proved`` is False.
    """
    if not proved:
        raise UnsupportedModel(f"{type(module).__name__}.forward", must, "something else")


class _Incomparable(Exception):
    """A value whose state cannot be seen from outside."""


def once(proof: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``proof(module, *plain)`` once for all modules of one structure.

    A structure is the classes, code and plain attributes of a module and its parts, and the shapes
    of their tensors. Every other module is proved at each call. The proof must not depend on the
    values of parameters. It runs isolated from the caller's settings.
    """
    known: dict[Any, Any] = {}

    @wraps(proof)
    def proved(module: Any, *rest: Any) -> Any:
        from headprune.layouts._isolated import isolated

        try:
            key = (_structure(module), rest)
        except (_Incomparable, RuntimeError):
            # RuntimeError: endless nesting, or a lazy parameter that has no shape yet.
            return isolated(proof, module, *rest)
        if key in known:
            return known[key]
        answer = isolated(proof, module, *rest)
        # A failure is not remembered: memory may have been short, or code not defined yet.
        if answer:
            if len(known) >= _MANY:
                known.clear()
            known[key] = answer
        return answer

    return proved


def _structure(value: Any) -> Any:
    """Return something hashable that is equal for values of one structure."""
    from torch import nn

    kind: type = type(value)
    # The type is part of every key, because True == 1 and 1 == 1.0.
    if kind in _PLAIN:
        return kind, value
    if kind in (set, frozenset):
        return kind, frozenset(map(_structure, value))
    if kind in (tuple, list):
        return kind, tuple(map(_structure, value))
    if kind is dict:
        return kind, tuple((_structure(k), _structure(v)) for k, v in value.items())
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return value
    if isinstance(value, nn.Module):
        return _module_structure(value)
    if not _all_in_python(kind) or not hasattr(value, "__dict__"):
        raise _Incomparable
    return kind, _structure(value.__dict__)


def _module_structure(module: Any) -> Any:
    from torch import nn

    if has_own_forward(module):
        raise _Incomparable
    kind = original_class(module)
    # Hooks and the training flag change nothing that a proof sees: it runs a copy without them.
    left_out = {*nn.Module().__dict__, *FORWARDS, "_hf_hook"}
    attributes = {k: v for k, v in module.__dict__.items() if k not in left_out}
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        shapes[name] = None if tensor is None else tuple(tensor.shape)
    parts = _structure([attributes, shapes, dict(module._modules)])
    # The code as well as the class, because somebody may replace a method of the class later.
    return kind, tuple(code_of(kind)), parts


@cache
def _all_in_python(kind: type) -> bool:
    """Return whether ``__dict__`` holds all state: no slots and no base class written in C."""
    hidden = (
        GetSetDescriptorType,
        MemberDescriptorType,
        MethodDescriptorType,
        WrapperDescriptorType,
    )
    for base in kind.__mro__[:-1]:  # without ``object``
        for name, value in vars(base).items():
            if name not in ("__dict__", "__weakref__") and isinstance(value, hidden):
                return False
    return True


def code_of(kind: type) -> Iterator[Any]:
    """Yield the code of a class, and the plain values that it uses."""
    # 1. Plain class attributes.
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if type(value) in _PLAIN and not name.startswith("__"):
                yield base, name, type(value), value
    # 2. Methods and functions with the plain globals that they use.
    for function, names in reached_functions(kind):
        yield function, function.__code__
        for name, value in names.items():
            if type(value) in _PLAIN:
                yield name, type(value), value
