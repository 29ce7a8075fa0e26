"""Registries: one file of a package is one entry, the file's name is the entry's name; entries load
when asked for.

Outside packages add entries through entry points (``headprune.layouts``, ``.scorers``,
``.selectors``, ``.recoveries``). Two entries of one name are an error. Files whose name begins with
an underscore are no entries.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headprune.core.errors import InvalidValue, NameClash, UnknownName, did_you_mean


def camel_case(name: str) -> str:
    """The class that a file of this name defines.

    >>> camel_case("leave_one_out")
    'LeaveOneOut'
    """
    return "".join(part.capitalize() for part in name.split("_"))


class Registry:
    """The entries of one kind, found by name and imported on first use.

    Args:
        kind: What an entry is, for messages: ``scorer``.
        package: The package whose files are the entries.
        group: The entry-point group of outside entries.
        attribute: Maps a name to the object's name inside its file; the default is the name in
            camel case.
        elsewhere: Entries of ours that stand in a higher room, because they put several rooms
            together: by name the module.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        group: str,
        attribute: Callable[[str], str] = camel_case,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.package, self.group, self.attribute = kind, package, group, attribute
        self._elsewhere = dict(elsewhere or {})
        self._loaded: dict[str, Any] = {}
        self._points: dict[str, importlib.metadata.EntryPoint] | None = (
            None  # reading them takes milliseconds
        )

    def _own(self) -> list[str]:
        spec = importlib.util.find_spec(self.package)
        paths = list(spec.submodule_search_locations or []) if spec else []
        here = [m.name for m in pkgutil.iter_modules(paths) if not m.name.startswith("_")]
        return sorted([*here, *self._elsewhere])

    def _module(self, name: str) -> str:
        """The module of an entry of ours."""
        return self._elsewhere.get(name, f"{self.package}.{name}")

    def _outside(self) -> dict[str, importlib.metadata.EntryPoint]:
        if self._points is None:
            self._points = self._read_points()
        return self._points

    def _read_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        found: dict[str, importlib.metadata.EntryPoint] = {}
        own = set(self._own())
        for point in importlib.metadata.entry_points(group=self.group):
            if point.name in own or (
                point.name in found and found[point.name].value != point.value
            ):
                other = self.package if point.name in own else found[point.name].value
                must = f"registered once; {other} has it already"
                raise NameClash(
                    f"{self.kind} {point.name!r}", must, point.value, "Rename the entry point."
                )
            found[point.name] = point
        return found

    def names(self) -> list[str]:
        """All names, sorted; imports none of the entries."""
        return sorted([*self._own(), *self._outside()])

    def is_own(self, name: str) -> bool:
        """Whether an entry is a file of ours, not of an outside package."""
        return name in self._own()

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def get(self, name: str) -> Any:
        """The entry of this name, imported now if it was not before.

        Raises:
            UnknownName: no such entry; the message names the closest.
        """
        if name not in self._loaded:
            outside = self._outside()
            if name in outside:
                self._loaded[name] = outside[name].load()
            elif name in self._own():
                module = importlib.import_module(self._module(name))
                self._loaded[name] = getattr(module, self.attribute(name))
            else:
                hint = did_you_mean(str(name), self.names())
                raise UnknownName(self.kind, f"a registered {self.kind}", repr(name), hint)
        return self._loaded[name]

    def class_named(self, name: str) -> Any:
        """The entry whose class has this name: what a room's ``__getattr__`` gives.

        Raises:
            AttributeError: no such class; the message names the closest.
        """
        if not name[:1].isupper():  # modules and dunders are none of the registry's business
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        classes = {self.attribute(entry): entry for entry in self}
        if name not in classes:
            raise AttributeError(
                f"module {self.package!r} has no {self.kind} {name!r}."
                f" {did_you_mean(name, classes)}"
            )
        return self.get(classes[name])

    def resolve(self, value: Any, base: type, where: str) -> tuple[str, Any]:
        """A registered name, or a configured entry, as ``(registered name, configured entry)``.

        Raises:
            UnknownName: no entry of this name.
            InvalidValue: neither a name nor an entry that derives from ``base``.
        """
        if isinstance(value, str):
            chosen = self.get(value)()
            if not isinstance(chosen, base):
                must = f"a class derived from {self.package}.{base.__name__}"
                raise InvalidValue(f"{self.kind} {value!r}", must, chosen)
            return value, chosen
        if not isinstance(value, base):
            hint = "Call it, to configure it." if isinstance(value, type) else ""
            must = f"a configured {self.kind} or one of the names {', '.join(self)}"
            got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
            raise InvalidValue(where, must, got, hint)
        cls = type(value)
        package, _, module = cls.__module__.rpartition(".")
        if package == self.package or self._elsewhere.get(module) == cls.__module__:
            return module, value
        outside = next((entry for entry in self if self.get(entry) is cls), None)
        return outside or f"{cls.__module__}.{cls.__qualname__}", value

    def summary(self, name: str) -> str:
        """First paragraph of an entry's documentation, on one line.

        It is read from the source, so that listing imports nothing heavy.
        """
        if name not in self._own():
            return _first_paragraph(self.get(name).__doc__)
        spec = importlib.util.find_spec(self._module(name))
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        return _first_paragraph(ast.get_docstring(ast.parse(source)))


def _first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").strip().partition("\n\n")[0].split())
