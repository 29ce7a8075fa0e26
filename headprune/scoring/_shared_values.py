"""Values that the scorers of one call share, such as gradients that several of them read."""

from __future__ import annotations

from typing import Any, TypeVar

Value = TypeVar("Value")


class SharedValues:
    """One value per class, made without arguments when it is first asked for.

    A module that computes something once for all scorers defines a class for it and asks for the
    one instance of the call. So the value is typed, and this module knows none of its users.

    >>> class Count:
    ...     n = 0
    >>> shared = SharedValues()
    >>> shared.of(Count).n += 1
    >>> shared.of(Count).n
    1
    """

    def __init__(self) -> None:
        self._values: dict[type, Any] = {}

    def of(self, kind: type[Value]) -> Value:
        """The call's one instance of a class."""
        if kind not in self._values:
            self._values[kind] = kind()
        value: Value = self._values[kind]
        return value

    def put(self, value: object) -> None:
        """Replace the call's instance of the value's class."""
        self._values[type(value)] = value
