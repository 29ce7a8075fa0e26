"""Remembers what was proved of a module: a model has many that are built alike, and every verb
looks at them again.

What failed is not remembered: memory may have been short, or code may not have been there yet.
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
from headprune.layouts._code import reached

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MANY = 256


def check_proved(module: Any, proved: bool, must: str) -> None:
    """Refuses a module whose ``forward`` was not proved to be what it must be."""
    if not proved:
        raise UnsupportedModel(f"{type(module).__name__}.forward", must, "something else")


class _Incomparable(Exception):
    """A value whose state cannot be seen from outside."""


def once(proof: Callable[..., Any]) -> Callable[..., Any]:
    """``proof(module, *plain)``, run alone and, where it succeeds, once for all modules of one
    structure: the classes and plain attributes of the module and of its parts, their code, and the
    shapes of their tensors. A module that holds anything else is proved every time.

    The proof must depend on nothing else, so not on the values of parameters. It returns what is
    true.
    """
    known: dict[Any, Any] = {}

    @wraps(proof)
    def asked(module: Any, *rest: Any) -> Any:
        from headprune.layouts._isolated import isolated

        try:
            key = (_structure(module), rest)
        except (
            _Incomparable,
            RuntimeError,
        ):  # nested without end, or a lazy parameter that has no shape yet
            return isolated(proof, module, *rest)
        if key in known:
            return known[key]
        answer = isolated(proof, module, *rest)
        if answer:
            if len(known) >= _MANY:
                known.clear()
            known[key] = answer
        return answer

    return asked


def _structure(value: Any) -> Any:
    """Something hashable that is equal for values of one structure."""
    from torch import nn

    kind: type = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (tuple, list, set, frozenset):
        items = map(_structure, value)
        return kind, frozenset(items) if kind in (set, frozenset) else tuple(items)
    if kind is dict:
        return kind, tuple((_structure(k), _structure(v)) for k, v in value.items())
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return value
    if isinstance(value, nn.Module):
        return _of_module(value)
    if not _all_in_python(kind) or not hasattr(value, "__dict__"):
        raise _Incomparable
    return kind, _structure(value.__dict__)


def _of_module(module: Any) -> Any:
    from torch import nn

    if has_own_forward(module):
        raise _Incomparable
    kind = original_class(module)
    passing = {*nn.Module().__dict__, *FORWARDS, "_hf_hook"}
    own = {k: v for k, v in module.__dict__.items() if k not in passing}
    shapes = {
        k: None if t is None else tuple(t.shape)
        for k, t in (*module._parameters.items(), *module._buffers.items())
    }
    return kind, tuple(code_of(kind)), _structure([own, shapes, dict(module._modules)])


@cache
def _all_in_python(kind: type) -> bool:
    """Whether an instance's state is its ``__dict__``: no slots, and no class written in C."""
    hidden = (
        GetSetDescriptorType,
        MemberDescriptorType,
        MethodDescriptorType,
        WrapperDescriptorType,
    )
    members = [(k, v) for c in kind.__mro__[:-1] for k, v in vars(c).items()]
    return all(k in ("__dict__", "__weakref__") or not isinstance(v, hidden) for k, v in members)


def code_of(kind: type) -> Iterator[Any]:
    """What a class computes with: the code and plain values of itself and its bases, and those that
    this code names."""
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if type(value) in _PLAIN and not name.startswith("__"):
                yield base, name, type(value), value
    for function, named in reached(kind):
        yield function, function.__code__
        yield from (
            (name, type(value), value) for name, value in named.items() if type(value) in _PLAIN
        )
