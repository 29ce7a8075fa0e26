"""Hooks that only keep what they see: their code shows for certain that nothing which passes
through is changed.

What a hook stores must go into things of its own, what it calls must be known to change nothing.
All else is uncertain.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from inspect import CO_VARARGS, CO_VARKEYWORDS
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from headprune.layouts._code import LIBRARIES, from_libraries, function_of, functions_of

#: Steps of Python that do nothing to values.
_BETWEEN = frozenset(
    {"CACHE", "COPY_FREE_VARS", "MAKE_CELL", "NOP", "NOT_TAKEN", "PRECALL", "RESUME"}
)
#: Steps that change something unseen, or hide what they change.
_UNCERTAIN = (
    "CALL_FUNCTION_EX",
    "DELETE_ATTR",
    "DELETE_SUBSCR",
    "IMPORT_",
    "SEND",
    "STORE_SLICE",
    "YIELD_",
)
_KEEPS = ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR")
_NOTING = frozenset({"add", "append", "appendleft", "extend", "setdefault", "update"})
_CONTAINERS = (list, dict, set, deque, str)
#: What only reads, of tensors, containers and texts; NumPy's arrays are changed by some that
#: tensors are not.
_READING = {n for n in dir(Tensor) if not n.startswith("_")} - {"put", "resize", "sort"} | {
    *(
        "count",
        "endswith",
        "format",
        "get",
        "index",
        "items",
        "join",
        "keys",
        "startswith",
        "values",
    )
}
_WRITING = (set(dir(np.ndarray)) - _READING) | {*dir(list), *dir(dict), *dir(set)} - _READING
_BUILTINS = frozenset(
    {
        *(
            "abs",
            "all",
            "any",
            "bool",
            "dict",
            "enumerate",
            "float",
            "id",
            "int",
            "isinstance",
            "len",
            "list",
            "max",
        ),
        *(
            "min",
            "print",
            "range",
            "repr",
            "reversed",
            "round",
            "set",
            "sorted",
            "str",
            "sum",
            "tuple",
            "type",
            "zip",
        ),
    }
)
_KNOWN_FILES = frozenset({"copy", "logging", "math", "time"})


def only_notes(hook: Any, part: nn.Module) -> bool:
    """Whether a hook of a module for certain returns nothing new and changes nothing that passes
    through."""
    if function_of(hook) is None and not isinstance(hook, type):
        hook = getattr(hook, "__call__", None)  # noqa: B004
    function, named = _called(hook, [part])
    if function is None:
        return False
    reading = _Reading(function, function.__code__, named, part)
    return reading.returns_nothing() and _changes_nothing(function, named, part, set())


def _called(
    value: Any, given: list[Any], **named: Any
) -> tuple[FunctionType | None, dict[str, Any]]:
    """The function behind a method or a partial, and its arguments as far as they are known."""
    if isinstance(value, partial):
        return _called(value.func, [*value.args, *given], **{**value.keywords, **named})
    if isinstance(value, MethodType):
        return _called(value.__func__, [value.__self__, *given], **named)
    if not isinstance(value, FunctionType):
        return None, {}
    return value, {**dict(zip(value.__code__.co_varnames, given, strict=False)), **named}


def _changes_nothing(
    function: FunctionType, named: Mapping[str, Any], part: Any, seen: set[Any]
) -> bool:
    """The same of a function and of those inside it; of others that it calls, once each."""
    this = (function, *[id(value) for value in named.values()])
    if this in seen:
        return True
    seen.add(this)
    waiting = [(function.__code__, named)]
    while waiting:
        code, known = waiting.pop()
        if not _Reading(function, code, known, part, seen).changes_nothing():
            return False
        waiting += [(inner, {}) for inner in code.co_consts if isinstance(inner, CodeType)]
    return True


class _Unknown(Exception):
    """A value that code alone does not show."""


class _Reading:
    """The steps of one piece of code, and what of them is known before it runs."""

    def __init__(
        self,
        function: FunctionType,
        code: CodeType,
        named: Mapping[str, Any],
        part: Any,
        seen: set[Any] | None = None,
    ) -> None:
        self.function, self.code, self.part = function, code, part
        self.seen = set() if seen is None else seen
        self.steps = [s for s in dis.get_instructions(code) if s.opname not in _BETWEEN]
        self.stored = {s.argval for s in self.steps if s.opname.startswith(("STORE_", "DELETE_"))}
        self.named = {name: value for name, value in named.items() if name not in self.stored}
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells = {name: cell for name, cell in free if name in code.co_freevars}

    def start(self, end: int, branches: bool = False) -> int:
        """The step at which the expression begins that ends at a step; Python may come to it by one
        way alone.

        Args:
            branches: Whether its arguments may be chosen (``x if y else z``).
        """
        total = 0
        for i in range(end, -1, -1):
            step = self.steps[i]
            if not branches and ("JUMP" in step.opname or self._joined(i + 1)):
                break
            total -= step.opname == "JUMP_FORWARD"  # it goes past the value of the other branch
            total += dis.stack_effect(step.opcode, step.arg, jump=False) + self._left_out(i)
            if total == 1 or (
                total == 2 and step.opname == "LOAD_GLOBAL"
            ):  # with an empty place, of what is called
                return i
        raise _Unknown

    def _joined(self, i: int) -> bool:
        return i < len(self.steps) and self.steps[i].is_jump_target

    def _left_out(self, i: int) -> int:
        """What a call takes in a step of its own before it (Python 3.11)."""
        step = self.steps[i]
        precall = dis.opmap.get("PRECALL")
        return (
            dis.stack_effect(precall, step.arg)
            if precall is not None and step.opname == "CALL"
            else 0
        )

    def value(self, start: int, end: int) -> Any:
        """What names and attributes stand for now."""
        found = self._root(start)
        for step in self.steps[start + 1 : end + 1]:
            if not step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) or step.argval.startswith(
                "_"
            ):
                raise _Unknown
            try:
                found = getattr(found, step.argval)
            except Exception:  # a property of somebody's own
                raise _Unknown from None
        return found

    def _root(self, i: int) -> Any:
        name, op = self.steps[i].argval, self.steps[i].opname
        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            if name in self.function.__globals__:
                return self.function.__globals__[name]
            builtins = self.function.__globals__["__builtins__"]
            names = builtins if isinstance(builtins, dict) else vars(builtins)
            if name in names:
                return names[name]
        if op == "LOAD_DEREF" and name in self.cells:
            try:
                return self.cells[name].cell_contents
            except ValueError:
                raise _Unknown from None
        if op.startswith("LOAD_FAST") and isinstance(name, str) and name in self.named:
            return self.named[name]
        raise _Unknown

    def returns_nothing(self) -> bool:
        """Whether what it returns is None, also that of what notes."""
        ends = [i for i, step in enumerate(self.steps) if step.opname.startswith("RETURN_")]
        return all(self._none(i) for i in ends if self.steps[i].opname != "RETURN_GENERATOR")

    def _none(self, i: int) -> bool:
        step = self.steps[i]
        made = step if step.opname == "RETURN_CONST" else self.steps[i - 1]
        if made.opname in ("RETURN_CONST", "LOAD_CONST"):
            return made.argval is None and not (step is not made and step.is_jump_target)
        if step.is_jump_target:
            return False
        if made.opname.startswith("LOAD_FAST"):
            return bool(made.argval == self._output())
        try:
            start = self.start(i - 1, branches=True)
            root = self._root(start)
        except _Unknown:
            return False
        if not made.opname.startswith("CALL"):
            return False
        methods = [
            s.argval
            for s in self.steps[start:i]
            if s.opname.startswith(("LOAD_METHOD", "LOAD_ATTR"))
        ]
        notes = isinstance(root, (list, dict, set, deque)) and methods[:1] in (
            ["append"],
            ["extend"],
            ["update"],
        )
        return notes or root is print

    def _output(self) -> str | None:
        """The parameter that a hook may return as it is: its last one, where nothing else is stored
        under its name."""
        code = self.code
        if (
            code.co_flags & (CO_VARARGS | CO_VARKEYWORDS)
            or code.co_kwonlyargcount
            or self.function.__defaults__
        ):
            return None
        last = code.co_varnames[code.co_argcount - 1] if code.co_argcount else None
        return None if last in self.stored or last in self.named else last

    def changes_nothing(self) -> bool:
        """Whether every step is known to leave what passes through as it is."""
        constants = [c for c in self.code.co_consts if isinstance(c, tuple)]
        if any(name in names for names in constants for name in ("out", "inplace")):
            return False
        in_place = [i for i, step in enumerate(self.steps) if _in_place(step)]
        kept = [i for i, step in enumerate(self.steps) if step.opname in _KEEPS]
        if in_place and len(kept) != len(in_place):
            return False
        try:
            counted = all(self._counts(i) for i in in_place)
            return (
                counted
                and (bool(in_place) or all(self._keeps(i) for i in kept))
                and all(self._steps())
            )
        except _Unknown:
            return False

    def _steps(self) -> Iterator[bool]:
        for i, step in enumerate(self.steps):
            if step.opname.startswith(_UNCERTAIN):
                yield False
            elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
                yield self._reads(i)
            elif self._names(step):
                yield self._harmless(self._root(i))
            if (place := self._callee(i)) is not None:
                yield self._calls(place)

    def _names(self, step: dis.Instruction) -> bool:
        """Whether a step takes something by a name whose value is known before the code runs."""
        if step.opname == "LOAD_DEREF":
            return step.argval in self.cells
        if step.opname.startswith("LOAD_FAST"):
            return step.argval in self.named
        return step.opname in ("LOAD_GLOBAL", "LOAD_NAME")

    def _callee(self, i: int) -> int | None:
        """Where the name of what is called stands, for calls of other than methods."""
        step = self.steps[i]
        if step.opname == "PUSH_NULL":
            return i - 1 if sys.version_info >= (3, 13) else i + 1
        if step.opname.startswith("CALL_FUNCTION"):
            return self.start(i)
        return i if step.opname == "LOAD_GLOBAL" and "NULL" in step.argrepr else None

    def _calls(self, i: int) -> bool:
        """Whether what is called has a name, so that its code was read."""
        if self.steps[i].opname in ("LOAD_CONST", "LOAD_CLOSURE"):  # a comprehension
            return True
        if self.steps[i].opname.startswith("LOAD_ATTR"):
            return callable(self.value(self.start(i), i))
        root = self._root(i)
        return callable(root) or (
            isinstance(root, ModuleType) and self.steps[i + 1].opname.startswith("LOAD_ATTR")
        )

    def _reads(self, i: int) -> bool:
        """Whether an attribute, or a method, is one that only reads, or that notes in something of
        its own."""
        step, start = self.steps[i], self.start(i - 1) if i else 0
        name = step.argval
        if name in ("__class__", "__name__"):
            return True
        if name.endswith("_") or name.startswith("__"):
            return False
        try:
            above, found = self.value(start, i - 1), self.value(start, i)
            return self._of_torch(above, found) or self._harmless(found)
        except _Unknown:
            pass
        if name in _READING:
            return True
        if name in _NOTING:
            return self._own(self._root(start))
        method = step.opname == "LOAD_METHOD" or (
            self._flagged() and bool(step.arg and step.arg & 1)
        )
        return not method and name not in _WRITING

    def _flagged(self) -> bool:
        return "LOAD_METHOD" not in dis.opmap or dis.opmap["LOAD_METHOD"] > 255

    def _of_torch(self, above: Any, found: Any) -> bool:
        """Whether a function of PyTorch's, called by its module's name, changes none of its
        arguments."""
        if not isinstance(above, ModuleType) or above.__name__ not in (
            "torch",
            "torch.linalg",
            "torch.nn.functional",
        ):
            return False
        function = function_of(found)
        return function is None or "inplace" not in function.__code__.co_varnames

    def _harmless(self, value: Any) -> bool:
        """Whether something that code names is no call that may change what it is given."""
        function = function_of(value)
        if function is not None and from_libraries(value):
            return str(function.__module__).partition(".")[0] in _KNOWN_FILES
        if function is not None:
            called, named = _called(value, [])
            return called is not None and _changes_nothing(function, named, None, self.seen)
        if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, _CONTAINERS):
            return True
        if isinstance(value, (BuiltinFunctionType, type)):
            known = value.__name__ in _BUILTINS and value.__module__ == "builtins"
            return known or value.__module__ in _KNOWN_FILES
        if isinstance(value, (ModuleType, Tensor)) or value is self.part or not callable(value):
            return True
        return isinstance(value.__call__, MethodType) and self._harmless(value.__call__)

    def _keeps(self, i: int) -> bool:
        """Whether what a step stores goes into something of its own."""
        step = self.steps[i]
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            return True
        if step.opname == "STORE_ATTR":
            return self._takes(self.value(self.start(i - 1), i - 1), step.argval)
        key = self.start(i - 1)
        start = self.start(key - 1)
        if any("SUBSCR" in s.opname for s in self.steps[start:key]):
            texts = self.steps[i - 1].opname == "LOAD_CONST" and isinstance(
                self.steps[i - 1].argval, str
            )
            return texts and isinstance(self._root(start), dict)
        return self._own(self.value(start, key - 1))

    def _own(self, value: Any) -> bool:
        """Whether a value is none that a model computes with."""
        library = (value if isinstance(value, type) else type(value)).__module__.partition(".")[
            0
        ] in LIBRARIES
        return not library and not isinstance(value, (Tensor, nn.Module, ModuleType, np.ndarray))

    def _takes(self, value: Any, name: str) -> bool:
        """Whether an attribute is a note; on the hook's module, one that no code of its class
        reads."""
        if value is not self.part or value is None:
            return self._own(value)
        kind = type(value)
        used = any(name in function.__code__.co_names for _, _, function in functions_of(kind))
        return not used and not _has(value, name)

    def _counts(self, i: int) -> bool:
        """Whether an operator in place changes a number of its own."""
        start = self.start(self.start(i - 1) - 1)
        if not self.steps[start].opname.startswith(("COPY", "DUP_TOP")):
            return isinstance(self.value(start, self.start(i - 1) - 1), Number)
        left = [
            s
            for s in self.steps[start : self.start(i - 1)]
            if not s.opname.startswith(("COPY", "DUP_TOP"))
        ]
        if len(left) == 1 and left[0].opname.startswith("LOAD_ATTR"):
            above = self.value(self.start(start - 1), start - 1)
            return self._takes(above, left[0].argval) and isinstance(
                getattr(above, left[0].argval, None), Number
            )
        key = self.start(start - 1)
        above = self.value(self.start(key - 1), key - 1)
        if not isinstance(above, (dict, list)):
            return False
        values = list(above.values()) if isinstance(above, dict) else above
        numbers = all(isinstance(v, Number) for v in values)
        return numbers and (bool(values) or type(above).__name__ in ("Counter", "defaultdict"))


def _has(module: nn.Module, name: str) -> bool:
    """Whether a name is one of a module's parameters, buffers, parts, or of its class."""
    parts = (module._parameters, module._buffers, module._modules)
    return any(name in names for names in parts) or hasattr(type(module), name)


def _in_place(step: dis.Instruction) -> bool:
    return step.opname.startswith("INPLACE_") or (
        step.opname == "BINARY_OP" and step.argrepr.endswith("=")
    )
