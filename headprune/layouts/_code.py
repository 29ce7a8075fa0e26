"""Find the code that a class runs, and whether a known library wrote it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial, partialmethod
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

#: Packages whose attention the tests run and whose effects on modules are known.
LIBRARIES = frozenset(
    {
        "accelerate",
        "diffusers",
        "einops",
        "headprune",
        "peft",
        "timm",
        "torch",
        "torch_einops_utils",
        "transformers",
        "x_transformers",
    }
)

#: Methods that no forward pass calls.
_NOT_IN_FORWARD = frozenset(
    {
        "__init__",
        "__new__",
        "__repr__",
        "__str__",
        "_init_weights",
        "extra_repr",
        "reset_parameters",
    }
)
#: Attributes under which decorators and ``torch.compile`` keep the function that they wrap.
_WRAPPED = ("__wrapped__", "_torchdynamo_orig_callable")


def function_of(value: Any) -> FunctionType | None:
    """Return the function of a method, a property or a partial; None where there is none."""
    while not isinstance(value, FunctionType):
        if isinstance(value, (MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, (partial, partialmethod)):
            value = value.func
        else:
            return None
    return value


def from_libraries(value: Any, installed: bool = False) -> bool:
    """Return whether a callable, and everything that it wraps, is a library's code.

    Args:
        value: A function, a method or any callable.
        installed: Whether code of any installed package counts too.
    """
    # Compared by identity: a callable may define ``__eq__`` or lack a hash.
    seen: list[Any] = []
    while value is not None and not any(value is other for other in seen):
        seen.append(value)
        function = function_of(value)
        if function is None:
            home = type(value).__module__
        else:
            home = function.__globals__.get("__name__", "")
        known = _is_library(str(home))
        if not known and installed and function is not None:
            known = _is_installed(function)
        if not known:
            return False
        value = _wrapped_by(function)
    return True


def _wrapped_by(function: FunctionType | None) -> Any:
    """Return the function inside a wrapper; None where it is no wrapper."""
    for name in _WRAPPED:
        inner = getattr(function, name, None)
        if inner is not None:
            return inner
    return None


def _is_library(module: str) -> bool:
    package = module.partition(".")[0]
    return package in LIBRARIES or package in sys.stdlib_module_names


def _is_installed(function: FunctionType) -> bool:
    import torch

    site_packages = Path(torch.__file__).parent.parent
    return Path(function.__code__.co_filename).is_relative_to(site_packages)


def is_of_library(kind: type) -> bool:
    """Return whether a class is a library's."""
    return _is_library(kind.__module__)


def functions_of(kind: type) -> Iterator[tuple[type, str, FunctionType]]:
    """Yield the functions of a class and its bases as (class, name, function)."""
    from torch import nn

    for base in kind.__mro__:
        # What every module inherits is PyTorch's.
        if base in (nn.Module, object):
            continue
        for name, value in vars(base).items():
            function = function_of(value)
            if function is not None:
                yield base, name, function


def own_methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield methods that no library wrote and that a forward pass may run instead of others."""
    bases = kind.__mro__
    for base, name, function in functions_of(kind):
        if name in _NOT_IN_FORWARD or from_libraries(function):
            continue
        # Either the library's class itself was changed, or a subclass overrides a method.
        later = bases[bases.index(base) + 1 :]
        if is_of_library(base) or any(name in vars(other) for other in later):
            yield f"{base.__name__}.{name}", function


def own_globals(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield functions that replace globals which a library's class calls by name."""
    if not is_of_library(kind):
        return
    for function, names in reached_functions(kind):
        home = function.__globals__.get("__name__")
        for name, value in names.items():
            inner = function_of(value)
            if inner is not None and not from_libraries(value, installed=True):
                yield f"{name} in {home}", inner


def reached_functions(kind: type) -> Iterator[tuple[FunctionType, dict[str, Any]]]:
    """Yield the functions that a class may call, each with the outer names that it uses.

    Calls are followed within the files that define the class and its bases.
    """
    waiting = [function for _, _, function in functions_of(kind)]
    homes = {id(function.__globals__) for function in waiting}
    seen: set[FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        names: dict[str, Any] = {}
        # In other files, the calls would lead through all of PyTorch.
        if id(function.__globals__) in homes:
            names = _outer_names(function)
        for value in names.values():
            inner = function_of(value)
            if inner is not None:
                waiting.append(inner)
        yield function, names


def _outer_names(function: FunctionType) -> dict[str, Any]:
    """Return the globals and closure variables that a function uses, by name."""
    waiting = [function.__code__]
    names: set[str] = set()
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        # Inner functions and comprehensions are constants of the outer code.
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    used = sorted(names & function.__globals__.keys())
    values = {name: function.__globals__[name] for name in used}
    try:
        return values | dict(inspect.getclosurevars(function).nonlocals)
    except ValueError:  # a closure variable that is not assigned yet
        return values
