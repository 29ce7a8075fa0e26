"""Another selector inside a selector: its name and settings, under the outer one's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue, did_you_mean
from headprune.selection import registry
from headprune.selection._base import Selector

#: What a selector may need that scores do not carry.
CALLABLES = frozenset({"loss", "rescore"})


def inner_selector(outer: Selector, name: str, settings: Mapping[str, Any]) -> Selector:
    """The configured inner selector, with ``min_heads`` and ``multiple_of`` of the outer one.

    Raises:
        UnknownName: no such selector.
        InvalidValue: a setting that it does not have, or a selector that needs more than scores.
    """
    where = type(outer).__name__
    kind = registry.get(name) if isinstance(name, str) else None
    if kind is None or kind.needs & CALLABLES:
        must = "the name of a selector that needs scores alone"
        raise InvalidValue(f"{where}.inner", must, repr(name), did_you_mean("", _alone()))
    own = _field_names(kind) - _field_names(Selector)
    for key in settings:
        if key not in own:
            if hasattr(outer, key):
                hint = f"Give {key} to {where} itself."
            else:
                hint = did_you_mean(key, own)
            raise InvalidValue(f"{where}.inner_settings", f"settings of {name!r}", repr(key), hint)
    inner = kind(**settings, min_heads=outer.min_heads, multiple_of=outer.multiple_of)
    assert isinstance(inner, Selector)
    return inner


def frozen(settings: object, outer: Selector) -> FrozenDict:
    """Settings as immutable JSON data."""
    if not isinstance(settings, Mapping):
        where = f"{type(outer).__name__}.inner_settings"
        raise InvalidValue(where, "a mapping of settings", repr(settings))
    return FrozenDict(settings)


def _field_names(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _alone() -> list[str]:
    """Names of the selectors that need scores alone."""
    return [name for name in registry if not registry.get(name).needs & CALLABLES]
