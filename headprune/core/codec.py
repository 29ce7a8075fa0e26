"""JSON for frozen values: one base class gives every value its round trip, its schema version and
its digest.

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
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from headprune.core.errors import HeadPruneError, InvalidValue, did_you_mean
from headprune.core.files import write_atomic
from headprune.core.opening import NotAFile, read_text

if TYPE_CHECKING:
    from typing_extensions import Self


class FrozenDict(Mapping[str, Any]):
    """An immutable, hashable mapping of JSON data; nested dicts become FrozenDicts, lists become
    tuples.

    >>> a = FrozenDict({"x": [1, 2]})
    >>> a["x"], hash(a) == hash(FrozenDict({"x": (1, 2)}))
    ((1, 2), True)
    """

    __slots__ = ("_data",)

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self._data = {str(k): _freeze(v) for k, v in (data or {}).items()}

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
    """Every value of nested mappings under its dotted key; lists and empty mappings are values.

    >>> dict(leaves({"a": {"b": 1, "c": {}}, "d": [2]}))
    {'a.b': 1, 'a.c': {}, 'd': [2]}
    """
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


#: Metadata of a field that came after files had been written: where it holds its default it is not
#: written, so that values of before, and their digests, which plans name, stay what they were to
#: the last byte.
LATER = {"later": True}
#: The empty mapping, as a default.
EMPTY = FrozenDict()
#: Lists and objects within each other in a stored mapping, and digits of a stored whole number.
_DEEPEST, _LONGEST = 50, 40
#: How numbers that JSON lacks are spelt: ``{"float": "nan"}``.
_SPELT = ("inf", "-inf", "nan")


def _freeze(value: Any) -> Any:
    if isinstance(value, FrozenDict) or value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return FrozenDict(value)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, Path):
        return str(value)
    raise InvalidValue(
        "a stored value", "JSON data (dict, list, str, number, bool, None)", type(value).__name__
    )


def _thaw(value: Any) -> Any:
    if _spells(value):  # a mapping that says what a number is spelt as gets one more around it
        return {"float": _plain(value)}
    if isinstance(value, str):
        return _writable(value)
    if isinstance(value, Mapping):
        return {_writable(k): _thaw(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_thaw(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}  # float(): NumPy spells its own repr
    return value


def _writable(text: str) -> str:
    """Text as a file can hold it: bytes of a file's name that are no UTF-8 as what Python shows for
    them."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _spells(value: Any) -> bool:
    """Whether data is ``{"float": "nan"}`` or its likes, alone or within more of the same."""
    levels = 0
    while isinstance(value, Mapping) and value.keys() == {"float"}:
        value, levels = value["float"], levels + 1
    return 0 < levels <= _DEEPEST and isinstance(value, str) and value in _SPELT


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


class Value:
    """Base of the frozen values: ``to_json``/``from_json``, ``save``/``load``, and a content
    ``digest``.

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
        """Rebuilds a value.

        Raises:
            InvalidValue: another type, an unknown schema version, an unknown or missing key, a
                wrong type.
        """
        where = where or cls.__name__
        if not isinstance(data, Mapping):
            raise InvalidValue(where, "a JSON object", type(data).__name__)
        if data.get("headprune") != cls.__name__:
            raise InvalidValue(
                f"{where}.headprune", repr(cls.__name__), repr(data.get("headprune"))
            )
        if data.get("version") != cls.SCHEMA_VERSION:
            hint = (
                "It was written by another version of headprune; use that one, or make the file"
                " anew."
            )
            raise InvalidValue(
                f"{where}.version", str(cls.SCHEMA_VERSION), repr(data.get("version")), hint
            )
        fields = {k: v for k, v in data.items() if k not in ("headprune", "version")}
        value: Self = _decode_fields(cls, fields, where)
        return value

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Self:
        """Rebuilds a value from its JSON form.

        Raises:
            InvalidValue: as ``from_dict``, or no valid JSON.
        """
        try:
            data = json.loads(text, parse_int=_whole)
            if "\\u" in text:  # half of a surrogate pair, which no file can hold, is spelt so
                json.dumps(data, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise InvalidValue(where or cls.__name__, "valid JSON", str(error)) from None
        return cls.from_dict(data, where)

    def save(self, path: str | Path) -> Path:
        """Writes the JSON form to ``path`` (whole or not at all) and returns the path."""
        return write_atomic(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what ``save`` wrote.

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
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _encode_fields(value: Any) -> dict[str, Any]:
    cls: type = type(value)
    hints = _hints(cls)
    held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    unsaid = {
        f.name
        for f in dataclasses.fields(value)
        if "later" in f.metadata and held[f.name] == f.default
    }
    return {name: _encode(hints[name], held[name]) for name in held if name not in unsaid}


def _encode(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_fields(value)
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, (tuple, list)):
        items = next((get_args(o) for o in options if get_origin(o) is tuple), (Any, ...))
        return [_encode(h, v) for h, v in zip(_item_hints(items, len(value)), value, strict=True)]
    if (
        isinstance(value, FrozenDict) and FrozenDict in options
    ):  # read as a mapping, whatever it looks like
        return {_writable(k): _thaw(v) for k, v in value.items()}
    if type(value) is int and float in options and int not in options:
        return float(value)  # 1 and 1.0 are equal, so they must have one stored form and one digest
    return _thaw(value)


def _item_hints(args: tuple[Any, ...], count: int) -> list[Any]:
    return [args[0]] * count if len(args) == 2 and args[1] is Ellipsis else list(args)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _decode_fields(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise InvalidValue(
            where, f"a JSON object with the fields of {cls.__name__}", type(data).__name__
        )
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise InvalidValue(
                f"{where}.{key}", "a known key", repr(key), did_you_mean(str(key), fields)
            )
    missing = [
        name
        for name, f in fields.items()
        if name not in data
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InvalidValue(
            where, f"complete (with {', '.join(missing)})", f"only {', '.join(data) or 'nothing'}"
        )
    hints = _hints(cls)
    values = {k: _decode(hints[k], v, f"{where}.{k}") for k, v in data.items()}
    try:
        return cls(**values)
    except HeadPruneError:
        raise
    except (
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # a constructor that its values confuse
        got = f"one that makes no sense: {type(error).__name__}: {error}"
        raise InvalidValue(where, f"a sound {cls.__name__}", got) from error


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return _revive(value, where)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(hint), value, where)
    if origin is tuple:
        return _decode_tuple(get_args(hint), value, where)
    if hint is FrozenDict:
        if not isinstance(value, Mapping):
            raise InvalidValue(where, "a JSON object", type(value).__name__)
        return FrozenDict({k: _revive(v, where) for k, v in value.items()})
    if dataclasses.is_dataclass(hint):
        return _decode_fields(hint, value, where)
    value = _revive(value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = (
        str if get_origin(hint) is not None else hint
    )  # Literal[...] of strings; the class checks its values
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise InvalidValue(where, f"of type {getattr(expected, '__name__', expected)}", repr(value))
    return value


def _decode_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(o for o in options if o is not type(None))
    for option in options:
        if option in (int, float, str, bool) and type(value) is option:
            return value
    return _decode(options[-1], value, where)


def _decode_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidValue(where, "a JSON list", type(value).__name__)
    hints = _item_hints(args, len(value))
    if len(hints) != len(value):
        raise InvalidValue(where, f"a list of {len(hints)} items", f"{len(value)} items")
    return tuple(
        _decode(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True))
    )


def _whole(digits: str) -> int:
    """A whole number, unless it is longer than any of ours: sums and ratios of such ones fit no
    float."""
    if len(digits) > _LONGEST:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _revive(value: Any, where: str, depth: int = 0) -> Any:
    """Undoes the spelling of infinities and NaN that JSON lacks.

    Raises:
        InvalidValue: lists and objects within each other, deeper than any value of ours: what reads
            them recurses.
    """
    if depth > _DEEPEST:
        raise InvalidValue(where, f"nested at most {_DEEPEST} deep", "deeper data")
    if isinstance(value, Mapping):
        if _spells(value):
            inside = value["float"]
            return float(inside) if isinstance(inside, str) else inside
        return {k: _revive(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_revive(v, where, depth + 1) for v in value]
    return value
