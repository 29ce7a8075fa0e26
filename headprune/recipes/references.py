"""Replace ``${other.key}`` references in recipes by the values of those keys, within limits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headprune.core.errors import InvalidValue, did_you_mean

REFERENCE = re.compile(r"\$\{([^{}]*)\}")

# Limits far above any recipe, for files from anywhere.
#: Characters of all values that have references, together.
_LONGEST = 200_000
#: References in a chain.
_LONGEST_CHAIN = 40
#: Characters of all dotted paths together: the path of a value has the keys of all its sections.
_LONGEST_PATHS = 2_000_000
#: Problems that are reported, those of them with a hint, and keys that a hint is chosen from.
_PROBLEMS, _HINTS, _HINTED_KEYS = 1_000, 50, 1_000

#: A problem without its place: what must be, what it got, what to try.
_Fault = tuple[str, str, str]


@dataclass(frozen=True)
class _Expansion:
    """A text with its references replaced.

    Args:
        value: The result.
        chain: References that follow each other in it, at most.
        faults: Its problems.
    """

    value: Any
    chain: int
    faults: tuple[_Fault, ...] = ()


def interpolate(
    raw: Mapping[str, Any],
) -> tuple[dict[str, Any], list[InvalidValue]]:
    """Replace every ``${section.key}`` by that key's value.

    Returns:
        A copy with all references replaced, and the problems of single references.

    Raises:
        InvalidValue: the references expand to far more text than any recipe has, or form too
            long a chain.

    >>> recipe = {"model": {"path": "a"}, "data": {"path": "${model.path}/rows.jsonl"}}
    >>> interpolate(recipe)[0]["data"]
    {'path': 'a/rows.jsonl'}
    """
    problems: list[InvalidValue] = []
    texts = _Texts(raw)
    total = 0

    def resolve(value: Any, path: str) -> Any:
        nonlocal total
        if isinstance(value, Mapping):
            return {key: resolve(v, _inside(path, key)) for key, v in value.items()}
        if isinstance(value, list):
            return [resolve(v, f"{path}.{i}") for i, v in enumerate(value)]
        if not isinstance(value, str) or not REFERENCE.search(value):
            return value
        expansion = texts.expanded(value, path)
        # Counted at every place, because a recipe that is written out repeats the text there.
        total += _length(expansion.value)
        _check_length(total, path)
        room = _PROBLEMS - len(problems)
        problems.extend(InvalidValue(path, *fault) for fault in expansion.faults[:room])
        return expansion.value

    return resolve(raw, ""), problems


def _inside(path: str, key: Any) -> str:
    """Return the dotted path of a key in the section at ``path``."""
    return f"{path}.{key}" if path else str(key)


class _Texts:
    """Expands texts with references, each of them once: a repeated text costs nothing more."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self._leaves: dict[str, Any] | None = None
        self._done: dict[str, _Expansion] = {}
        # Texts in expansion; each is referred to by the one before.
        self._open: list[str] = []
        self._hints = 0

    def expanded(self, text: str, path: str) -> _Expansion:
        """Expand a text.

        Args:
            text: The text.
            path: Its dotted path, for errors.

        Raises:
            InvalidValue: a limit is passed; lengths are checked before the text is made.
        """
        if text not in self._done:
            self._open.append(text)
            self._done[text] = self._expand(text, path)
            self._open.pop()
        return self._done[text]

    def _expand(self, text: str, path: str) -> _Expansion:
        # 1. Expand every reference in it.
        if len(self._open) > _LONGEST_CHAIN:
            raise _too_long_a_chain(path)
        parts = [self._follow(match[1].strip(), path) for match in REFERENCE.finditer(text)]
        chain = 1 + max(part.chain for part in parts)
        if chain > _LONGEST_CHAIN:
            raise _too_long_a_chain(path)
        faults: dict[_Fault, None] = {}  # a set that keeps the order
        for part in parts:
            faults.update(dict.fromkeys(part.faults))
        shown = tuple(faults)[:_PROBLEMS]
        # 2. A text that is one reference becomes a value of any type.
        if REFERENCE.fullmatch(text):
            return _Expansion(parts[0].value, chain, shown)
        # 3. Any other is put together as text.
        plain = sum(map(len, REFERENCE.split(text)[::2]))
        _check_length(plain + sum(_length(part.value) for part in parts), path)
        values = iter(parts)
        return _Expansion(REFERENCE.sub(lambda _: str(next(values).value), text), chain, shown)

    def _follow(self, key: str, path: str) -> _Expansion:
        """Return the value of a key; empty where there is none."""
        known = self._known(path)
        if key not in known:
            fault = ("a reference to another key", f"${{{key}}}", self._hint(key, known))
            return _Expansion("", 0, (fault,))
        value = known[key]
        if value is None:
            hint = f"Give it: --set {shlex.quote(f'{key}=...')}"
            return _Expansion(
                "",
                0,
                (("a reference to a key that has a value", f"${{{key}}}, which has none", hint),),
            )
        if not isinstance(value, str) or not REFERENCE.search(value):
            return _Expansion(value, 0)
        if value in self._open:
            fault = ("free of circular references", f"${{{key}}}, which refers back to itself", "")
            return _Expansion("", 0, (fault,))
        return self.expanded(value, path)

    def _known(self, path: str) -> dict[str, Any]:
        """Return every value of the recipe by its dotted path."""
        if self._leaves is not None:
            return self._leaves
        self._leaves, length = {}, 0
        for key, value in _leaves(self._raw):
            length += len(key)
            if length > _LONGEST_PATHS:
                must = (
                    f"in a recipe whose dotted keys have at most {_LONGEST_PATHS:,} characters"
                    " together"
                )
                hint = "Use shorter keys, or fewer sections in each other."
                raise InvalidValue(path, must, "more", hint)
            self._leaves[key] = value
        return self._leaves

    def _hint(self, key: str, known: dict[str, Any]) -> str:
        self._hints += 1
        if self._hints > _HINTS:
            return ""
        return did_you_mean(key, islice(known, _HINTED_KEYS))


def _length(value: Any) -> int:
    """Return the characters that a value has in a text, at most."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        # str() refuses numbers of thousands of digits.
        return value.bit_length() // 3 + 2
    return len(str(value))


def _check_length(length: int, path: str) -> None:
    if length > _LONGEST:
        must = (
            f"at most {_LONGEST:,} characters, with all values that have references (${{...}})"
            " written out"
        )
        raise InvalidValue(path, must, "more", "Refer to other keys in fewer places.")


def _too_long_a_chain(path: str) -> InvalidValue:
    must = f"at the end of a chain of at most {_LONGEST_CHAIN} references (${{...}})"
    return InvalidValue(path, must, "a longer one", "Refer to the first key of the chain.")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no section and no list, with its dotted path."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, _inside(path, key))
