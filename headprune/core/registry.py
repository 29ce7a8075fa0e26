"""Registries of scorers, selectors, recoveries and layouts; entries are imported on first use.

One file of a package is one entry, and the file's name is the entry's name. Files whose name begins
with an underscore are no entries. Other packages add entries through entry points
(``headprune.layouts``, ``.scorers``, ``.selectors``, ``.recoveries``). Two entries of one name are
an error.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from headprune.core.errors import InvalidValue, NameClash, UnknownName, did_you_mean


def camel_case(name: str) -> str:
    """Name the class that a file of this name defines.

    >>> camel_case("leave_one_out")
    'LeaveOneOut'
    """
    return "".join(map(str.capitalize, name.split("_")))


class Registry:
    """The entries of one kind, found by name and imported on first use.

    Args:
        kind: Kind of the entries, for messages: ``scorer``.
        package: The package whose files are the entries.
        group: The entry-point group of other packages' entries.
        attribute: Maps a name to the object's name inside its file; by default the name in camel
            case.
        elsewhere: Modules, by name, of own entries in other packages; they combine several parts
            of the library.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        group: str,
        attribute: Callable[[str], str] = camel_case,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.package = package
        self.group = group
        self.attribute = attribute
        self._elsewhere = dict(elsewhere or {})
        self._loaded: dict[str, Any] = {}
        # Names of entries that were added in this process.
        self._added: set[str] = set()
        # Both are read on first use: each takes milliseconds.
        self._points: dict[str, EntryPoint] | None = None
        self._files: list[str] | None = None

    def _own(self) -> list[str]:
        """Names of the entries of this library."""
        if self._files is None:
            self._files = self._read_files()
        return self._files

    def _read_files(self) -> list[str]:
        paths: list[str] = []
        # Files are listed; no entry is imported.
        spec = importlib.util.find_spec(self.package)
        if spec is not None:
            paths.extend(spec.submodule_search_locations or [])
        modules = [module.name for module in pkgutil.iter_modules(paths)]
        here = [name for name in modules if not name.startswith("_")]
        return sorted([*here, *self._elsewhere])

    def _module(self, name: str) -> str:
        """The module of an own entry."""
        return self._elsewhere.get(name, f"{self.package}.{name}")

    def _outside(self) -> dict[str, EntryPoint]:
        """Entry points of other packages, by name."""
        if self._points is None:
            self._points = self._read_points()
        return self._points

    def _read_points(self) -> dict[str, EntryPoint]:
        points: dict[str, EntryPoint] = {}
        own = set(self._own())
        for point in importlib.metadata.entry_points(group=self.group):
            # An installed package may list one entry point twice; that is no clash.
            owner = None
            if point.name in own:
                owner = self.package
            elif point.name in points and points[point.name].value != point.value:
                owner = points[point.name].value
            if owner is not None:
                where = f"{self.kind} {point.name!r}"
                must = f"registered once; {owner} has it already"
                raise NameClash(where, must, point.value, "Rename the entry point.")
            points[point.name] = point
        return points

    def names(self) -> list[str]:
        """All names, sorted; imports no entry."""
        return sorted([*self._own(), *self._outside(), *self._added])

    def add(self, name: str, entry: Any) -> None:
        """Add an entry for this process; adding it again changes nothing.

        Raises:
            NameClash: another entry has the name.
        """
        if name in self and self.get(name) != entry:
            must = "registered once; another one has this name already"
            hint = "Give it another name, for example by dataclasses.replace(entry, name=...)."
            raise NameClash(f"{self.kind} {name!r}", must, repr(name), hint)
        if name not in self:
            self._added.add(name)
            self._loaded[name] = entry

    def is_builtin(self, name: str) -> bool:
        """Whether an entry is a file of this library, not of another package."""
        return name in self._own()

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def configured(self, name: str, settings: Mapping[str, Any], where: str) -> Any:
        """Return an entry, a dataclass, with these settings.

        Args:
            name: The entry's name.
            settings: By its fields' names.
            where: What the settings are called, for messages.

        Raises:
            UnknownName: no entry has the name.
            InvalidValue: a setting that it does not have, or a value that it refuses.
        """
        entry = self.get(name)
        known = [field.name for field in dataclasses.fields(entry)]
        for key in settings:
            if key not in known:
                hint = did_you_mean(key, known)
                raise InvalidValue(where, f"settings of {name}", repr(key), hint)
        return entry(**settings)

    def get(self, name: str) -> Any:
        """Return the entry of this name; import it if needed.

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
        """Return the entry whose class has this name, for a package's ``__getattr__``.

        Raises:
            AttributeError: no such class; the message names the closest.
        """
        if not name[:1].isupper():  # a module or a dunder, no class
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        classes = {self.attribute(entry): entry for entry in self}
        if name not in classes:
            hint = did_you_mean(name, classes)
            raise AttributeError(f"module {self.package!r} has no {self.kind} {name!r}. {hint}")
        return self.get(classes[name])

    def resolve(self, value: Any, base: type, where: str) -> tuple[str, Any]:
        """Turn a registered name, or a configured entry, into both.

        Returns:
            The registered name and the configured entry.

        Raises:
            UnknownName: no entry of this name.
            InvalidValue: neither a name nor an entry that derives from ``base``.
        """
        # A name stands for the entry with its default settings.
        if isinstance(value, str):
            chosen = self.get(value)()
            if not isinstance(chosen, base):
                must = f"a class derived from {self.package}.{base.__name__}"
                raise InvalidValue(f"{self.kind} {value!r}", must, chosen)
            return value, chosen
        if not isinstance(value, base):
            must = f"a configured {self.kind} or one of the names {', '.join(self)}"
            if isinstance(value, type):
                got = f"the class {value.__name__}"
                raise InvalidValue(where, must, got, "Call it, to configure it.")
            raise InvalidValue(where, must, type(value).__name__)
        return self._name_of(type(value)), value

    def _name_of(self, cls: type) -> str:
        """The registered name of a class, or where it is defined if it has none."""
        # An own entry: its file's name is its name.
        package, _, module = cls.__module__.rpartition(".")
        if package == self.package or self._elsewhere.get(module) == cls.__module__:
            return module
        # An entry of another package has no name of its own: search for its class.
        for entry in self:
            if self.get(entry) is cls:
                return entry
        return f"{cls.__module__}.{cls.__qualname__}"

    def summary(self, name: str) -> str:
        """First paragraph of an entry's documentation, on one line."""
        if name not in self._own():
            return _first_paragraph(self.get(name).__doc__)
        # Read from the source, so that a list of entries imports nothing heavy.
        spec = importlib.util.find_spec(self._module(name))
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        return _first_paragraph(ast.get_docstring(ast.parse(source)))


def _first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").strip().partition("\n\n")[0].split())
