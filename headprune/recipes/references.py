"""``${other.key}`` references in recipes: replaced by the value of the other key, within limits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headprune.core.errors import InvalidValue, did_you_mean

REFERENCE = re.compile(r"\$\{([^{}]*)\}")

#: Characters that all values with references come to together, and references in a chain: far above
#: any recipe.
_LONGEST, _LONGEST_CHAIN = 200_000, 40
#: Characters of all dotted paths together: a long key at each level stands in the path of every
#: value below it.
_LONGEST_PATHS = 2_000_000
#: Problems that are reported, those of them with a hint, and keys that a hint is chosen from.
_PROBLEMS, _HINTS, _HINTED_KEYS = 1_000, 50, 1_000

#: What a problem says but for its place: what must be, what it got, what to try.
_Fault = tuple[str, str, str]


@dataclass(frozen=True)
class _Expansion:
    """What a text becomes, the references that follow each other in it at most, and what is wrong
    with them."""

    value: Any
    chain: int
    faults: tuple[_Fault, ...] = ()


def interpolate(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[InvalidValue]]:
    """A copy in which every ``${section.key}`` is replaced by that key's value, and what went wrong
    on the way.

    >>> interpolate({"model": {"path": "a"}, "data": {"path": "${model.path}/rows.jsonl"}})[0][
    ...     "data"
    ... ]
    {'path': 'a/rows.jsonl'}

    Raises:
        InvalidValue: the references stand for far more text than any recipe has, or form too long a
            chain.
    """
    problems: list[InvalidValue] = []
    texts = _Texts(raw)
    total = 0

    def resolve(value: Any, path: str) -> Any:
        nonlocal total
        if isinstance(value, Mapping):
            return {k: resolve(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
        if isinstance(value, list):
            return [resolve(v, f"{path}.{i}") for i, v in enumerate(value)]
        if not isinstance(value, str) or not REFERENCE.search(value):
            return value
        found = texts.expanded(value, path)
        total += _length(
            found.value
        )  # of every place: what is written out has the text in each of them
        _check_length(total, path)
        room = _PROBLEMS - len(problems)
        problems.extend(InvalidValue(path, *fault) for fault in found.faults[:room])
        return found.value

    return resolve(raw, ""), problems


class _Texts:
    """Texts with references, each expanded once: a text that is needed twice costs no more than
    one."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self._leaves: dict[str, Any] | None = None
        self._done: dict[str, _Expansion] = {}
        self._open: list[
            str
        ] = []  # texts that are being expanded, each of them referred to by the one before
        self._hints = 0

    def expanded(self, text: str, path: str) -> _Expansion:
        """What a text at this path becomes.

        Raises:
            InvalidValue: a limit is passed. It is known before a longer text is made.
        """
        if text not in self._done:
            self._open.append(text)
            self._done[text] = self._expand(text, path)
            self._open.pop()
        return self._done[text]

    def _expand(self, text: str, path: str) -> _Expansion:
        if len(self._open) > _LONGEST_CHAIN:
            raise _too_long_a_chain(path)
        found = [self._follow(match[1].strip(), path) for match in REFERENCE.finditer(text)]
        chain = 1 + max(one.chain for one in found)
        if chain > _LONGEST_CHAIN:
            raise _too_long_a_chain(path)
        faults = tuple(dict.fromkeys(fault for one in found for fault in one.faults))[:_PROBLEMS]
        if REFERENCE.fullmatch(text):
            return _Expansion(found[0].value, chain, faults)
        plain = sum(len(part) for part in REFERENCE.split(text)[::2])
        _check_length(plain + sum(_length(one.value) for one in found), path)
        values = iter(found)
        return _Expansion(REFERENCE.sub(lambda _: str(next(values).value), text), chain, faults)

    def _follow(self, key: str, path: str) -> _Expansion:
        """The value of a key; empty where there is none."""
        known = self._known(path)
        if key not in known:
            return _Expansion(
                "", 0, (("a reference to another key", f"${{{key}}}", self._hint(key, known)),)
            )
        value = known[key]
        if value is None:
            hint = f"Give it: --set {shlex.quote(f'{key}=...')}"
            return _Expansion("", 0, ((f"preceded by a value for {key}", "none", hint),))
        if not isinstance(value, str) or not REFERENCE.search(value):
            return _Expansion(value, 0)
        if value in self._open:
            return _Expansion(
                "", 0, (("free of circles", f"${{{key}}}, which refers back to itself", ""),)
            )
        return self.expanded(value, path)

    def _known(self, path: str) -> dict[str, Any]:
        """Every value of the recipe by its dotted path."""
        if self._leaves is None:
            self._leaves, length = {}, 0
            for key, value in _leaves(self._raw):
                length += len(key)
                if length > _LONGEST_PATHS:
                    must = (
                        f"in a recipe whose keys come to {_LONGEST_PATHS:,} characters, with the"
                        " sections they are in"
                    )
                    raise InvalidValue(
                        path, must, "more", "Use shorter keys, or fewer sections in each other."
                    )
                self._leaves[key] = value
        return self._leaves

    def _hint(self, key: str, known: dict[str, Any]) -> str:
        self._hints += 1
        return did_you_mean(key, islice(known, _HINTED_KEYS)) if self._hints <= _HINTS else ""


def _length(value: Any) -> int:
    """Characters of a value in a text, at most."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 2  # Python writes no numbers of thousands of digits
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
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))
