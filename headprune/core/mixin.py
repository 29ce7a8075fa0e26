"""Puts a class of ours in front of one module's class, in place: how a module's code is corrected after a cut.

The module keeps its class name, its place and its type (it stays an instance of its original class); copies and
pickles keep the change. ``torch.compile`` guards on classes, so a compiled model sees it too.
"""

from __future__ import annotations

from functools import cache
from typing import Any


class Mixin:
    """Base of the classes that are put in front. A subclass overrides methods and calls ``super()``."""

    headprune_original: type
    headprune_mixins: tuple[type, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made here and now: a pickle must say how to make it again.
        kind = type(self)
        return _blank, (kind.headprune_original, kind.headprune_mixins), dict(self.__dict__)


def mix_in(module: Any, mixin: type[Mixin]) -> bool:
    """Puts ``mixin`` in front of the class of ``module``; returns whether it was not there before."""
    kind: Any = type(module)
    mixins: tuple[type, ...] = getattr(kind, "headprune_mixins", ())
    if mixin in mixins:
        return False
    module.__class__ = _mixed(getattr(kind, "headprune_original", kind), (mixin, *mixins))
    return True


def mix_out(module: Any, mixin: type[Mixin]) -> None:
    """Takes ``mixin`` out again."""
    kind: Any = type(module)
    left = tuple(m for m in kind.headprune_mixins if m is not mixin)
    module.__class__ = _mixed(kind.headprune_original, left) if left else kind.headprune_original


def original_class(module: Any) -> type:
    """The class a module had before anything was put in front of it."""
    kind: Any = type(module)
    found: type = getattr(kind, "headprune_original", kind)
    return found


@cache
def _mixed(original: type, mixins: tuple[type, ...]) -> type:
    ours = {"headprune_original": original, "headprune_mixins": mixins}
    body = {**ours, "__doc__": original.__doc__, "__module__": original.__module__}
    return type(original.__name__, (*mixins, original), body)


def _blank(original: type, mixins: tuple[type, ...]) -> Any:
    kind: Any = _mixed(original, mixins)
    return kind.__new__(kind)
