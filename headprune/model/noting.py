"""Hooks that only record: their bytecode shows that nothing which passes through is changed.

What a hook stores must go into containers of Python or plain objects of its own. What it calls must
be known to change nothing. Operators of the user's own classes may do anything. All else is
uncertain, and counts as a change.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from functools import partial
from inspect import CO_VARARGS, CO_VARKEYWORDS
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from headprune.layouts._code import LIBRARIES, from_libraries, function_of, functions_of

# ---------------------------------------------------------------- instructions of CPython

#: Instructions that do nothing to values.
_NEUTRAL = frozenset(
    {"CACHE", "COPY_FREE_VARS", "MAKE_CELL", "NOP", "NOT_TAKEN", "PRECALL", "RESUME"}
)
#: Instructions that change something unseen, or hide what they change; prefixes of names.
_UNCERTAIN = (
    "CALL_FUNCTION_EX",
    "DELETE_ATTR",
    "DELETE_SUBSCR",
    "IMPORT_",
    "SEND",
    "STORE_SLICE",
    "YIELD_",
)
#: Keyword arguments by which PyTorch writes, or that are functions or files of the user's.
_UNCERTAIN_KEYWORDS = {"out", "inplace", "key", "file"}
_STORES = ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_COPIES = ("COPY", "DUP_TOP")

# ---------------------------------------------------------------- names that code may use

#: Methods that record in a container.
_RECORDING = frozenset({"add", "append", "appendleft", "extend", "setdefault", "update"})
#: Containers of Python, whose keys are set without any code of the user's.
_PLAIN_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
#: Types whose bound methods are harmless where code names them as they are.
_CONTAINERS = (list, dict, set, deque, str)
#: Attributes that tensors have too, but that change an array of NumPy or a list.
_CHANGING = {"put", "resize", "sort"}
_OF_CONTAINERS = {
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
}
_OF_TENSORS = {name for name in dir(Tensor) if not name.startswith("_")}
#: Attributes of tensors, containers and texts that only read.
_READING = (_OF_TENSORS - _CHANGING) | _OF_CONTAINERS
#: Attributes of arrays and containers that may write.
_WRITING = {*dir(np.ndarray), *dir(list), *dir(dict), *dir(set)} - _READING
#: Methods behind operators, indexing, comparisons, iteration and attributes.
_OPERATORS = {name for name in dir(np.ndarray) if name.startswith("__") and name not in dir(object)}
_OPERATORS |= {"__getattr__", "__getattribute__", "__eq__", "__missing__", "__next__"}
#: Built-in functions that change nothing.
_BUILTINS = frozenset(
    {"abs", "all", "any", "bool", "dict", "enumerate", "float", "id", "int", "isinstance"}
    | {"len", "list", "max", "min", "print", "range", "repr", "reversed", "round", "set"}
    | {"sorted", "str", "sum", "tuple", "type", "zip"}
)
#: Modules of Python whose functions change nothing.
_HARMLESS_MODULES = frozenset({"copy", "logging", "math", "time"})


def only_notes(hook: Any, part: nn.Module) -> bool:
    """Decide whether a hook returns nothing new and changes nothing, as far as its code shows.

    Args:
        hook: A forward hook or a forward pre-hook.
        part: The module that it is on.
    """
    if function_of(hook) is None and not isinstance(hook, type):
        hook = getattr(hook, "__call__", None)  # noqa: B004
    function, arguments = _called(hook, [part])
    if function is None:
        return False
    reader = _CodeReader(function, function.__code__, arguments, part)
    return reader.returns_nothing() and _changes_nothing(function, arguments, part, set())


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
    positional = dict(zip(value.__code__.co_varnames, given, strict=False))
    return value, {**positional, **named}


def _changes_nothing(
    function: FunctionType, named: Mapping[str, Any], part: Any, seen: set[Any]
) -> bool:
    """Check a function, the functions inside it, and once each those that it calls."""
    this = (function, *map(id, named.values()))
    if this in seen:
        return True
    seen.add(this)
    waiting = [(function.__code__, named)]
    while waiting:
        code, known = waiting.pop()
        if not _CodeReader(function, code, known, part, seen).changes_nothing():
            return False
        # Code of inner functions and comprehensions is among the constants.
        inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        waiting.extend((constant, {}) for constant in inner)
    return True


class _Unknown(Exception):
    """A value that code alone does not show."""


class _CodeReader:
    """The instructions of one piece of code, and what of them is known before it runs.

    Args:
        function: The function that the code belongs to, for its globals and closure.
        code: Its code, or that of a function inside it.
        named: Known values of local names.
        part: The module that the hook is on.
        seen: Functions that were checked before.
    """

    def __init__(
        self,
        function: FunctionType,
        code: CodeType,
        named: Mapping[str, Any],
        part: Any,
        seen: set[Any] | None = None,
    ) -> None:
        self.function = function
        self.code = code
        self.part = part
        self.seen = set() if seen is None else seen
        self.steps = [s for s in dis.get_instructions(code) if s.opname not in _NEUTRAL]
        self.stored = {s.argval for s in self.steps if s.opname.startswith(("STORE_", "DELETE_"))}
        # A name that the code itself assigns is no longer known.
        self.named = {name: value for name, value in named.items() if name not in self.stored}
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells = {name: cell for name, cell in free if name in code.co_freevars}

    # ------------------------------------------------------------ what is returned

    def returns_nothing(self) -> bool:
        """Whether every return gives None, or the result of a call that records and gives None."""
        for i, step in enumerate(self.steps):
            if not step.opname.startswith("RETURN_") or step.opname == "RETURN_GENERATOR":
                continue
            if not self._returns_none(i):
                return False
        return True

    def _returns_none(self, i: int) -> bool:
        """Whether one return instruction gives nothing new."""
        step = self.steps[i]
        if step.opname == "RETURN_CONST":
            return step.argval is None
        # The instruction before has made the value, unless a jump leads here.
        if step.is_jump_target:
            return False
        made = self.steps[i - 1]
        if made.opname in ("RETURN_CONST", "LOAD_CONST"):
            return made.argval is None
        if made.opname.startswith("LOAD_FAST"):
            return bool(made.argval == self._output_parameter())
        if not made.opname.startswith("CALL"):
            return False
        try:
            start = self._start(i - 1, branches=True)
            root = self._root(start)
        except _Unknown:
            return False
        return root is print or self._records_in(root, start, i)

    def _records_in(self, root: Any, start: int, end: int) -> bool:
        """Whether the first method in these steps records in a container and returns None."""
        if not isinstance(root, (list, dict, set, deque)):
            return False
        for step in self.steps[start:end]:
            if step.opname.startswith(_ATTRIBUTES):
                return step.argval in ("append", "extend", "update")
        return False

    def _output_parameter(self) -> str | None:
        """The parameter that a hook may return unchanged: its last one, if never assigned."""
        code = self.code
        if code.co_flags & (CO_VARARGS | CO_VARKEYWORDS) or code.co_kwonlyargcount:
            return None
        if self.function.__defaults__ or not code.co_argcount:
            return None
        last = code.co_varnames[code.co_argcount - 1]
        return None if last in self.stored or last in self.named else last

    # ------------------------------------------------------------ what is changed

    def changes_nothing(self) -> bool:
        """Whether every step is known to leave what passes through unchanged."""
        if self._names_output():
            return False
        in_place = [i for i, step in enumerate(self.steps) if _is_in_place(step)]
        stores = [i for i, step in enumerate(self.steps) if step.opname in _STORES]
        try:
            if in_place:
                # Every store belongs to an operator in place: n += 1.
                if len(stores) != len(in_place):
                    return False
                stores_are_own = all(map(self._is_counter, in_place))
            else:
                stores_are_own = all(map(self._stores_own, stores))
            return stores_are_own and all(self._harmless_steps())
        except _Unknown:
            return False

    def _names_output(self) -> bool:
        """Whether some call has a keyword argument that writes or is called, such as ``out=``."""
        for constant in self.code.co_consts:
            # Names of keyword arguments are tuples among the constants.
            if isinstance(constant, tuple) and _UNCERTAIN_KEYWORDS.intersection(constant):
                return True
        return False

    def _harmless_steps(self) -> Iterator[bool]:
        for i, step in enumerate(self.steps):
            if step.opname.startswith(_UNCERTAIN):
                yield False
            elif step.opname.startswith(_ATTRIBUTES):
                yield self._attribute_reads(i)
            elif self._is_known_name(step):
                yield self._harmless(self._root(i))
            place = self._callee(i)
            if place is not None:
                yield self._calls_known(place)

    def _is_known_name(self, step: dis.Instruction) -> bool:
        """Whether a step loads a name whose value is known before the code runs."""
        if step.opname == "LOAD_DEREF":
            return step.argval in self.cells
        if step.opname.startswith("LOAD_FAST"):
            return step.argval in self.named
        return step.opname in ("LOAD_GLOBAL", "LOAD_NAME")

    def _callee(self, i: int) -> int | None:
        """The step that loads what is called, for calls of other than methods."""
        step = self.steps[i]
        if step.opname == "PUSH_NULL":
            return i - 1 if sys.version_info >= (3, 13) else i + 1
        if step.opname.startswith("CALL_FUNCTION"):  # Python 3.10
            return self._start(i)
        return i if step.opname == "LOAD_GLOBAL" and "NULL" in step.argrepr else None

    def _calls_known(self, i: int) -> bool:
        """Whether what is called has a name, so that its code was read."""
        if self.steps[i].opname in ("LOAD_CONST", "LOAD_CLOSURE"):  # a comprehension
            return True
        if self.steps[i].opname.startswith("LOAD_ATTR"):
            return callable(self._value(self._start(i), i))
        root = self._root(i)
        if callable(root):
            return True
        return isinstance(root, ModuleType) and self.steps[i + 1].opname.startswith("LOAD_ATTR")

    def _attribute_reads(self, i: int) -> bool:
        """Whether an attribute or a method only reads, or records in the hook's own container."""
        step = self.steps[i]
        name = step.argval
        start = self._start(i - 1) if i else 0
        if name in ("__class__", "__name__"):
            return True
        if name.endswith("_") or name.startswith("__"):  # PyTorch's sign of a change in place
            return False
        try:
            owner = self._value(start, i - 1)
            attribute = self._value(start, i)
            return self._is_pure_of_torch(owner, attribute) or self._harmless(attribute)
        except _Unknown:
            pass
        # The owner is known only when the code runs: the name has to decide.
        if name in _READING:
            return True
        if name in _RECORDING:
            return self._is_own(self._root(start))
        return not self._loads_method(step) and name not in _WRITING

    def _loads_method(self, step: dis.Instruction) -> bool:
        if step.opname == "LOAD_METHOD":
            return True
        # From Python 3.12 the lowest bit of LOAD_ATTR's argument says so.
        flagged = "LOAD_METHOD" not in dis.opmap or dis.opmap["LOAD_METHOD"] > 255
        return flagged and bool(step.arg and step.arg & 1)

    def _is_pure_of_torch(self, owner: Any, value: Any) -> bool:
        """Whether a function of PyTorch's, called by its module's name, changes no argument."""
        if not isinstance(owner, ModuleType):
            return False
        if owner.__name__ not in ("torch", "torch.linalg", "torch.nn.functional"):
            return False
        function = function_of(value)
        return function is None or "inplace" not in function.__code__.co_varnames

    def _harmless(self, value: Any) -> bool:
        """Whether a value that code names cannot change what it is given."""
        function = function_of(value)
        if function is not None:
            return self._harmless_function(value, function)
        if isinstance(value, (BuiltinFunctionType, type)):
            return _is_harmless_builtin(value)
        if isinstance(value, (ModuleType, Tensor)) or value is self.part:
            return True
        if not callable(value):
            return not _defines(type(value), _OPERATORS)
        return isinstance(value.__call__, MethodType) and self._harmless(value.__call__)

    def _harmless_function(self, value: Any, function: Any) -> bool:
        if from_libraries(value):
            return str(function.__module__).partition(".")[0] in _HARMLESS_MODULES
        called, named = _called(value, [])
        return called is not None and _changes_nothing(function, named, None, self.seen)

    # ------------------------------------------------------------ what is stored

    def _stores_own(self, i: int) -> bool:
        """Whether a step stores into an object of the hook's own."""
        step = self.steps[i]
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            return True
        if step.opname == "STORE_ATTR":
            return self._is_own_attribute(self._value(self._start(i - 1), i - 1), step.argval)
        # container[key] = ...: the container is loaded first, then the key.
        key = self._start(i - 1)
        start = self._start(key - 1)
        if not any("SUBSCR" in s.opname for s in self.steps[start:key]):
            return type(self._value(start, key - 1)) in _PLAIN_CONTAINERS
        # container[...]["text"] = ...: only a dictionary has texts as keys.
        last = self.steps[i - 1]
        is_text = last.opname == "LOAD_CONST" and isinstance(last.argval, str)
        return is_text and isinstance(self._root(start), dict)

    def _is_own(self, value: Any) -> bool:
        """Whether a value is not one that a model computes with."""
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] in LIBRARIES:
            return False
        return not isinstance(value, (Tensor, nn.Module, ModuleType, np.ndarray))

    def _is_own_attribute(self, value: Any, name: str) -> bool:
        """Whether no code of the model reads an attribute."""
        if value is not self.part or value is None:
            kind = type(value)
            is_plain = not _defines(kind, {"__setattr__"}) and not hasattr(kind, name)
            return self._is_own(value) and is_plain
        for _, _, function in functions_of(type(value)):
            if name in function.__code__.co_names:
                return False
        return not _has(value, name)

    def _is_counter(self, i: int) -> bool:
        """Whether an operator in place changes a number of the hook's own."""
        operand = self._start(i - 1)
        start = self._start(operand - 1)
        if not self.steps[start].opname.startswith(_COPIES):
            return isinstance(self._value(start, operand - 1), Number)
        loads = [s for s in self.steps[start:operand] if not s.opname.startswith(_COPIES)]
        # owner.name += ...
        if len(loads) == 1 and loads[0].opname.startswith("LOAD_ATTR"):
            owner = self._value(self._start(start - 1), start - 1)
            name = loads[0].argval
            is_number = isinstance(getattr(owner, name, None), Number)
            return self._is_own_attribute(owner, name) and is_number
        # container[key] += ...
        key = self._start(start - 1)
        return _holds_numbers(self._value(self._start(key - 1), key - 1))

    # ------------------------------------------------------------ values of expressions

    def _start(self, end: int, branches: bool = False) -> int:
        """The first step of the expression that ends at a step; only one way may lead there.

        Args:
            end: The last step of the expression.
            branches: Whether its arguments may be chosen (``x if y else z``).
        """
        # Walk back until the steps leave exactly one value on the stack.
        depth = 0
        for i in range(end, -1, -1):
            step = self.steps[i]
            if not branches and ("JUMP" in step.opname or self._is_joined(i + 1)):
                break
            depth -= step.opname == "JUMP_FORWARD"  # it jumps over the other branch's value
            depth += dis.stack_effect(step.opcode, step.arg, jump=False) + self._precall_effect(i)
            # A global that is called has an empty place on the stack besides.
            if depth == 1 or (depth == 2 and step.opname == "LOAD_GLOBAL"):
                return i
        raise _Unknown

    def _is_joined(self, i: int) -> bool:
        return i < len(self.steps) and self.steps[i].is_jump_target

    def _precall_effect(self, i: int) -> int:
        """What a call takes from the stack in a step of its own before it (Python 3.11)."""
        step = self.steps[i]
        precall = dis.opmap.get("PRECALL")
        if precall is None or step.opname != "CALL":
            return 0
        return dis.stack_effect(precall, step.arg)

    def _value(self, start: int, end: int) -> Any:
        """What a name and the attributes after it stand for now."""
        value = self._root(start)
        for step in self.steps[start + 1 : end + 1]:
            if not step.opname.startswith(_ATTRIBUTES) or step.argval.startswith("_"):
                raise _Unknown
            try:
                value = getattr(value, step.argval)
            except Exception:  # a property of the user's may raise anything
                raise _Unknown from None
        return value

    def _root(self, i: int) -> Any:
        """The value of the name that a step loads."""
        name, op = self.steps[i].argval, self.steps[i].opname
        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            return self._global(name)
        if op == "LOAD_DEREF" and name in self.cells:
            try:
                return self.cells[name].cell_contents
            except ValueError:  # an empty cell
                raise _Unknown from None
        if op.startswith("LOAD_FAST") and isinstance(name, str) and name in self.named:
            return self.named[name]
        raise _Unknown

    def _global(self, name: str) -> Any:
        names = self.function.__globals__
        if name in names:
            return names[name]
        builtins = names["__builtins__"]
        names = builtins if isinstance(builtins, dict) else vars(builtins)
        if name in names:
            return names[name]
        raise _Unknown


def _defines(kind: type, names: set[str]) -> bool:
    """Whether a class of the user's, or one that it inherits from, defines any of these methods."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in (*LIBRARIES, "builtins", "collections"):
            continue
        if not names.isdisjoint(vars(base)):
            return True
    return False


def _is_harmless_builtin(value: Any) -> bool:
    """Whether a built-in function or a class changes none of its arguments."""
    if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, _CONTAINERS):
        return True
    if value.__module__ == "builtins" and value.__name__ in _BUILTINS:
        return True
    return value.__module__ in _HARMLESS_MODULES


def _holds_numbers(container: Any) -> bool:
    """Whether a dictionary or a list holds numbers only; empty ones count if they are counters."""
    if not isinstance(container, (dict, list)):
        return False
    values = container
    if isinstance(container, dict):
        values = list(container.values())
    if not all(isinstance(value, Number) for value in values):
        return False
    return bool(values) or type(container).__name__ in ("Counter", "defaultdict")


def _has(module: nn.Module, name: str) -> bool:
    """Whether a name is one of a module's parameters, buffers, parts, or of its class."""
    parts = (module._parameters, module._buffers, module._modules)
    return any(name in names for names in parts) or hasattr(type(module), name)


def _is_in_place(step: dis.Instruction) -> bool:
    """Whether a step is an operator in place, such as ``+=``."""
    if step.opname.startswith("INPLACE_"):  # Python 3.10
        return True
    return step.opname == "BINARY_OP" and step.argrepr.endswith("=")
