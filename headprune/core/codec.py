"""JSON for frozen values: one base class gives every value a round trip, a version and a digest.

A stored value is an object with the keys ``headprune`` (the type's name), ``version`` (its schema)
and the fields. Unknown types, versions, keys and missing keys are errors that name the path inside
the document.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from headprune.core.errors import HeadPruneError, InvalidValue, did_you_mean
from headprune.core.files import write_atomic
from headprune.core.opening import NotAFile, read_text

if TYPE_CHECKING:
    from typing_extensions import Self


class FrozenDict(Mapping[str, Any]):
    """An immutable, hashable mapping of JSON data.

    Nested dicts become FrozenDicts, lists become tuples.

    >>> a = FrozenDict({"x": [1, 2]})
    >>> a["x"], hash(a) == hash(FrozenDict({"x": (1, 2)}))
    ((1, 2), True)
    """

    __slots__ = ("_data",)

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        # A frozen copy, so that no later change of ``data`` reaches it.
        self._data = {str(key): _freeze(value) for key, value in (data or {}).items()}

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash(frozenset(self._data.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({_thaw(self)!r})"


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings under its dotted key.

    Lists and empty mappings are values.

    >>> dict(leaves({"a": {"b": 1, "c": {}}, "d": [2]}))
    {'a.b': 1, 'a.c': {}, 'd': [2]}
    """
    for key, value in data.items():
        # An empty mapping is a value: it has no keys below it.
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


#: Metadata of a field that was added after files had been written. Where it holds its default it is
#: not written. So older values keep their bytes, and the digests that plans name.
LATER = {"later": True}
#: Metadata of a field of rows of dataclasses: of equal neighbours in a long row one is written,
#: with their number under this key.
RUNS = {"runs": "times"}
#: Metadata of a field of numbers of which most are missing: a long one is written as an object with
#: its length and the numbers that it has, by their places.
SPARSE = {"sparse": True}
#: Rows with more items than this are written shorter; heads are fewer.
_LONG = 256
#: The most items of such a row.
_MOST_ITEMS = 1 << 16
#: The empty mapping, as a default.
EMPTY = FrozenDict()
#: How deep lists and objects may be nested in a stored mapping.
_DEEPEST = 50
#: Digits of a stored whole number.
_MOST_DIGITS = 40
#: Numbers that JSON lacks; they are spelt ``{"float": "nan"}``.
_SPELT = ("inf", "-inf", "nan")


def _freeze(value: Any) -> Any:
    """Make JSON data immutable."""
    if value is None or isinstance(value, (FrozenDict, bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return FrozenDict(value)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, Path):
        return str(value)
    must = "JSON data (dict, list, str, number, bool, None)"
    raise InvalidValue("a stored value", must, type(value).__name__)


def _thaw(value: Any) -> Any:
    """Turn frozen data into plain JSON data."""
    if _is_spelt(value):  # a mapping that looks like a spelt number gets one more around it
        return {"float": _plain(value)}
    if isinstance(value, str):
        return _writable(value)
    if isinstance(value, Mapping):
        return _thaw_mapping(value)
    if isinstance(value, (tuple, list)):
        return [_thaw(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}  # float(): NumPy's repr is another one
    return value


def _thaw_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {_writable(key): _thaw(value) for key, value in mapping.items()}


def _writable(text: str) -> str:
    """Text that a file can hold.

    A file's name may have bytes that are no UTF-8; they are written as escapes.
    """
    if text.isascii():
        return text
    return text.encode(errors="backslashreplace").decode()


def _is_spelt(value: Any) -> bool:
    """Whether data is ``{"float": "nan"}`` or the like, alone or inside more of the same."""
    levels = 0
    while isinstance(value, Mapping) and value.keys() == {"float"}:
        value = value["float"]
        levels += 1
    return 0 < levels <= _DEEPEST and isinstance(value, str) and value in _SPELT


def _plain(value: Any) -> Any:
    """Turn nested mappings into dicts."""
    if not isinstance(value, Mapping):
        return value
    return {key: _plain(inner) for key, inner in value.items()}


class Value:
    """Base of the frozen values: conversion to JSON and back, files, and a ``digest``.

    A subclass is a frozen dataclass. Bump ``SCHEMA_VERSION`` when its stored form changes.
    """

    SCHEMA_VERSION: ClassVar[int] = 1

    def to_dict(self) -> dict[str, Any]:
        """The value as plain JSON data, tagged with its type and schema version."""
        return {
            "headprune": type(self).__name__,
            "version": self.SCHEMA_VERSION,
            **_encode_fields(self),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Any, where: str = "") -> Self:
        """Rebuild a value from its JSON data.

        Raises:
            InvalidValue: another type, an unknown schema version, an unknown or missing key, a
                wrong type.
        """
        where = where or cls.__name__
        if not isinstance(data, Mapping):
            raise InvalidValue(where, "a JSON object", type(data).__name__)
        name = data.get("headprune")
        if name != cls.__name__:
            raise InvalidValue(f"{where}.headprune", repr(cls.__name__), repr(name))
        version = data.get("version")
        if version != cls.SCHEMA_VERSION:
            hint = (
                "Another version of headprune wrote it. Read it with that version, or write the"
                " file again."
            )
            raise InvalidValue(f"{where}.version", str(cls.SCHEMA_VERSION), repr(version), hint)
        fields = {k: v for k, v in data.items() if k not in ("headprune", "version")}
        value: Self = _decode_fields(cls, fields, where)
        return value

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Self:
        """Rebuild a value from its JSON form.

        Raises:
            InvalidValue: as ``from_dict``, or no valid JSON.
        """
        try:
            data = json.loads(text, parse_int=_whole)
            if "\\u" in text:
                # Refuses half of a surrogate pair, which no file can hold.
                json.dumps(data, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise InvalidValue(where or cls.__name__, "valid JSON", str(error)) from None
        return cls.from_dict(data, where)

    def save(self, path: str | Path) -> Path:
        """Write the JSON form to ``path``, whole or not at all; return the path."""
        return write_atomic(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote.

        Raises:
            InvalidValue: the file cannot be read or is not a stored value of this type.
        """
        try:
            text = read_text(path)
        except NotAFile:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(str(path), f"a readable {cls.__name__} file", error) from None
        return cls.from_json(text, str(path))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form: equal values have equal digests on every machine."""
        # Sorted keys and no blanks: the indented form of ``to_json`` may change.
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _encode_fields(value: Any) -> dict[str, Any]:
    cls: type = type(value)
    hints = _hints(cls)
    encoded = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if "later" in field.metadata and inner == field.default:
            continue
        items = _encode(hints[field.name], inner)
        if "runs" in field.metadata:
            items = [_in_runs(row, field.metadata["runs"]) for row in items]
        if "sparse" in field.metadata:
            items = _sparse(items)
        encoded[field.name] = items
    return encoded


def _sparse(row: list[Any]) -> Any:
    """Write what a long row has, by its places."""
    if len(row) <= _LONG:
        return row
    found = {str(place): item for place, item in enumerate(row) if item is not None}
    return {"length": len(row), "found": found}


def _out_of_sparse(row: Any, where: str) -> Any:
    """Undo ``_sparse``; a row that was written in full is unchanged."""
    if not isinstance(row, Mapping):
        return row  # refused with the types if it is no list
    length, found = row.get("length"), row.get("found")
    must = f"a row, or its length up to {_MOST_ITEMS:,} and what it has by place"
    if type(length) is not int or not 0 <= length <= _MOST_ITEMS or not isinstance(found, Mapping):
        raise InvalidValue(where, must, repr(row))
    places = {str(place): place for place in range(length)}
    items: list[Any] = [None] * length
    for place, item in found.items():
        if place not in places:
            raise InvalidValue(where, must, f"place {place!r} of {length:,}")
        items[places[place]] = item
    return items


def _in_runs(row: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Write equal neighbours of a long row once."""
    if len(row) <= _LONG:
        return row
    runs = []
    for item, equals in groupby(row):
        runs.append({**item, key: len(list(equals))})
    return runs


def _out_of_runs(rows: Any, key: str, where: str) -> Any:
    """Undo ``_in_runs``; rows that were written without runs are unchanged."""
    if not isinstance(rows, list):
        return rows  # refused with the types
    return [_repeated(row, key, f"{where}[{i}]") for i, row in enumerate(rows)]


def _repeated(row: Any, key: str, where: str) -> Any:
    if not isinstance(row, list) or not any(isinstance(i, Mapping) and key in i for i in row):
        return row
    items: list[Any] = []
    for item in row:
        times = item.get(key) if isinstance(item, Mapping) else None
        if type(times) is not int or not 1 <= times <= _MOST_ITEMS - len(items):
            must = f"of 1 to {_MOST_ITEMS:,} items together"
            raise InvalidValue(f"{where}: {key}", must, repr(times))
        items += [{name: value for name, value in item.items() if name != key}] * times
    return items


def _encode(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_fields(value)
    options = get_args(hint) if _is_union(hint) else (hint,)
    if isinstance(value, (tuple, list)):
        return _encode_items(options, value)
    if isinstance(value, FrozenDict) and FrozenDict in options:
        # It is read back as a mapping, even if it looks like a spelt number.
        return _thaw_mapping(value)
    if type(value) is int and float in options and int not in options:
        return float(value)  # 1 and 1.0 are equal: they need one stored form and one digest
    return _thaw(value)


def _encode_items(options: tuple[Any, ...], items: Sequence[Any]) -> list[Any]:
    # The type of a tuple may be one option of a union, such as ``tuple[int, ...] | None``.
    args: tuple[Any, ...] = (Any, ...)
    for option in options:
        if get_origin(option) is tuple:
            args = get_args(option)
            break
    hints = _item_hints(args, len(items))
    return [_encode(hint, item) for hint, item in zip(hints, items, strict=True)]


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _item_hints(args: tuple[Any, ...], count: int) -> list[Any]:
    """The type of each item of a tuple: ``(int, ...)`` holds for all of them."""
    if len(args) == 2 and args[1] is Ellipsis:
        return [args[0]] * count
    return list(args)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _decode_fields(cls: Any, data: Any, where: str) -> Any:
    _check_keys(cls, data, where)
    hints = _hints(cls)
    metadata = {field.name: field.metadata for field in dataclasses.fields(cls)}
    values = {}
    for key, value in data.items():
        place = f"{where}.{key}"
        full = _in_full(value, metadata[key], place)
        values[key] = _decode(hints[key], full, place)
    try:
        return cls(**values)
    except HeadPruneError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # Values of the right types may still confuse a constructor.
        got = f"values that do not fit together: {type(error).__name__}: {error}"
        raise InvalidValue(where, f"a valid {cls.__name__}", got) from error


def _in_full(value: Any, metadata: Mapping[str, Any], where: str) -> Any:
    """The items of a long row that was written shorter; any other value as it is."""
    if "runs" in metadata:
        return _out_of_runs(value, metadata["runs"], where)
    if "sparse" in metadata:
        return _out_of_sparse(value, where)
    return value


def _check_keys(cls: Any, data: Any, where: str) -> None:
    """Refuse unknown and missing fields."""
    if not isinstance(data, Mapping):
        must = f"a JSON object with the fields of {cls.__name__}"
        raise InvalidValue(where, must, type(data).__name__)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            hint = did_you_mean(str(key), fields)
            raise InvalidValue(f"{where}.{key}", "a known key", repr(key), hint)
    missing = []
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING
        no_factory = field.default_factory is dataclasses.MISSING
        if no_default and no_factory and name not in data:
            missing.append(name)
    if missing:
        must = f"complete (with {', '.join(missing)})"
        raise InvalidValue(where, must, f"only {', '.join(data) or 'nothing'}")


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return _revive(value, where)
    if _is_union(hint):
        return _decode_union(get_args(hint), value, where)
    if get_origin(hint) is tuple:
        return _decode_tuple(get_args(hint), value, where)
    if hint is FrozenDict:
        if not isinstance(value, Mapping):
            raise InvalidValue(where, "a JSON object", type(value).__name__)
        return FrozenDict({key: _revive(inner, where) for key, inner in value.items()})
    if dataclasses.is_dataclass(hint):
        return _decode_fields(hint, value, where)
    return _decode_scalar(hint, value, where)


def _decode_scalar(hint: Any, value: Any, where: str) -> Any:
    value = _revive(value, where)
    is_bool = isinstance(value, bool)
    if hint is float and isinstance(value, int) and not is_bool:
        return float(value)
    expected = hint
    if get_origin(hint) is not None:  # a Literal of strings; the class checks which
        expected = str
    if not isinstance(value, expected) or (is_bool and expected is not bool):
        raise InvalidValue(where, f"of type {getattr(expected, '__name__', expected)}", repr(value))
    return value


def _decode_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    others = [option for option in options if option is not type(None)]
    # The exact type wins: 1 is read as int from ``int | float``, not as float.
    for option in others:
        if option in (int, float, str, bool) and type(value) is option:
            return value
    return _decode(others[-1], value, where)


def _decode_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidValue(where, "a JSON list", type(value).__name__)
    hints = _item_hints(args, len(value))
    if len(hints) != len(value):
        raise InvalidValue(where, f"a list of {len(hints)} items", f"{len(value)} items")
    items = []
    for i, (hint, item) in enumerate(zip(hints, value, strict=True)):
        decoded = _decode(hint, item, f"{where}[{i}]")
        items.append(decoded)
    return tuple(items)


def _whole(digits: str) -> int:
    """Parse a whole number; refuse a long one, whose sums and ratios fit no float."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _revive(value: Any, where: str, depth: int = 0) -> Any:
    """Undo the spelling of infinities and NaN that JSON lacks.

    Raises:
        InvalidValue: nested deeper than any value of ours; code that reads such data recurses.
    """
    if depth > _DEEPEST:
        raise InvalidValue(where, f"nested at most {_DEEPEST} deep", "deeper data")
    if isinstance(value, Mapping):
        if _is_spelt(value):
            inside = value["float"]
            return float(inside) if isinstance(inside, str) else inside
        return {key: _revive(inner, where, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_revive(item, where, depth + 1) for item in value]
    return value
