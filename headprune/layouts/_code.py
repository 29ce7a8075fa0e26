"""What code a class runs, and whose it is: that of the libraries whose modules layouts describe, or
somebody's own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial, partialmethod
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

#: Packages whose attention the laws and the coverage record run; what they do to modules is known,
#: too.
LIBRARIES = frozenset(
    {
        *(
            "accelerate",
            "diffusers",
            "einops",
            "headprune",
            "peft",
            "timm",
            "torch",
            "torch_einops_utils",
        ),
        *("transformers", "x_transformers"),
    }
)

#: Methods that no forward pass calls.
_ASIDE = frozenset(
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
_WRAPPED = ("__wrapped__", "_torchdynamo_orig_callable")


def function_of(value: Any) -> FunctionType | None:
    """The function of a method, a property or a partial; None where there is none."""
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
    """Whether what is called is a library's code, all of it where one wraps another:
    ``torch.compile``.

    Args:
        value: A function, a method or any callable.
        installed: Whether other code that lies where packages are installed counts, too.
    """
    seen: list[Any] = []
    while value is not None and not any(value is s for s in seen):
        seen.append(value)
        function = function_of(value)
        home = (
            type(value).__module__ if function is None else function.__globals__.get("__name__", "")
        )
        if not _is_library(str(home)) and not (
            installed and function is not None and _is_installed(function)
        ):
            return False
        value = next(
            (found for name in _WRAPPED if (found := getattr(function, name, None)) is not None),
            None,
        )
    return True


def _is_library(module: str) -> bool:
    package = module.partition(".")[0]
    return package in LIBRARIES or package in sys.stdlib_module_names


def _is_installed(function: FunctionType) -> bool:
    import torch

    return Path(function.__code__.co_filename).is_relative_to(Path(torch.__file__).parent.parent)


def is_of_library(kind: type) -> bool:
    """Whether a class is a library's."""
    return _is_library(kind.__module__)


def functions_of(kind: type) -> Iterator[tuple[type, str, FunctionType]]:
    """The functions of a class and of its bases below ``nn.Module``: of which one, under which
    name."""
    from torch import nn

    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for name, value in vars(base).items():
            function = function_of(value)
            if function is not None:
                yield base, name, function


def own_methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Methods of a class that no library wrote and that a forward pass may call: they stand in
    place of others."""
    bases = kind.__mro__
    for base, name, function in functions_of(kind):
        if name in _ASIDE or from_libraries(function):
            continue
        later = bases[bases.index(base) + 1 :]
        if is_of_library(base) or any(name in vars(other) for other in later):
            yield f"{base.__name__}.{name}", function


def own_globals(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Functions that somebody put in place of those that a library's class calls by name."""
    for function, named in reached(kind) if is_of_library(kind) else ():
        for name, value in named.items():
            inner = function_of(value)
            if inner is not None and not from_libraries(value, installed=True):
                yield f"{name} in {function.__globals__.get('__name__')}", inner


def reached(kind: type) -> Iterator[tuple[FunctionType, dict[str, Any]]]:
    """The functions of a class and those that they call in files of the class: each with what it
    names outside."""
    waiting = [function for _, _, function in functions_of(kind)]
    homes = {id(function.__globals__) for function in waiting}
    seen: set[FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        named = _named(function) if id(function.__globals__) in homes else {}
        waiting += [inner for value in named.values() if (inner := function_of(value)) is not None]
        yield function, named


def _named(function: FunctionType) -> dict[str, Any]:
    """What a function names outside of itself: globals, and what it closes over."""
    waiting = [function.__code__]
    names: set[str] = set()
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]
    found = {
        name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())
    }
    try:
        return found | dict(inspect.getclosurevars(function).nonlocals)
    except ValueError:  # one of them is not there yet
        return found
