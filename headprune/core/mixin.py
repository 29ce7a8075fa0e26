"""Puts a class of ours in front of one module's class, in place: how a module's code is corrected
after a cut.

The module keeps its class name, its place and its type (it stays an instance of its original
class); copies and pickles keep the change. ``torch.compile`` guards on classes, so a compiled model
sees it too.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any

from headprune.core.errors import UnsupportedModel

#: Where an instance may keep a ``forward``: its own, and the one that accelerate's hooks
#: (``device_map``) call.
FORWARDS = ("_old_forward", "forward")
#: What a module must be that cannot lose all its heads.
WITHOUT_HEADS = "left with a head"


class Mixin:
    """Base of the classes that are put in front. A subclass overrides methods and calls
    ``super()``."""

    headprune_original: type
    headprune_mixins: tuple[type, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return remade(type(self), dict(self.__dict__))


def mix_in(module: Any, mixin: type[Mixin], must: str = "cut to this") -> bool:
    """Puts ``mixin`` in front of the class of ``module``; returns whether it was not there before.

    Raises:
        UnsupportedModel: the module has a ``forward`` of its own, which would hide that of its new
            class; ``must`` says what it then cannot be.
    """
    kind: Any = type(module)
    mixins: tuple[type, ...] = getattr(kind, "headprune_mixins", ())
    if mixin in mixins:
        return False
    refused = refusal(module, must)
    if refused is not None and _has_forward(mixin):
        raise refused
    _become(module, _mixed(getattr(kind, "headprune_original", kind), (mixin, *mixins)))
    return True


def _has_forward(mixin: type[Mixin]) -> bool:
    return any("forward" in kind.__dict__ for kind in mixin.__mro__ if issubclass(kind, Mixin))


def refusal(module: Any, must: str = "cut to this") -> UnsupportedModel | None:
    """Why nothing can be put in front of a module's class; None where it can."""
    if not has_own_forward(module):
        return None
    name = original_class(module).__name__
    return UnsupportedModel(name, f"{must}, for its forward is replaced", "another forward")


def mix_out(module: Any, mixin: type[Mixin]) -> None:
    """Takes ``mixin`` out again."""
    kind: Any = type(module)
    left = tuple(m for m in kind.headprune_mixins if m is not mixin)
    _become(module, _mixed(kind.headprune_original, left) if left else kind.headprune_original)


def has_own_forward(module: Any) -> bool:
    """Whether a ``forward`` of the instance hides its class's. Accelerate's hooks do not: they call
    what was there."""
    own = next((module.__dict__[name] for name in FORWARDS if name in module.__dict__), None)
    return own is not None and not _is_of_class(own, module)


def original_class(module: Any) -> type:
    """The class a module had before anything was put in front of it."""
    kind: Any = type(module)
    found: type = getattr(kind, "headprune_original", kind)
    return found


def _become(module: Any, kind: type) -> None:
    """Changes the class, and with it the ``forward`` that hooks have taken from the class and bound
    to the module."""
    bound = [name for name in FORWARDS if _is_of_class(module.__dict__.get(name), module)]
    module.__class__ = kind
    for name in bound:
        module.__dict__[name] = MethodType(kind.forward, module)  # type: ignore[attr-defined]


def _is_of_class(method: Any, module: Any) -> bool:
    if not isinstance(method, MethodType) or method.__self__ is not module:
        return False
    return method.__func__ is getattr(type(module), "forward", None)


@cache
def _mixed(original: type, mixins: tuple[type, ...]) -> type:
    ours = {"headprune_original": original, "headprune_mixins": mixins}
    body = {**ours, "__doc__": original.__doc__, "__module__": original.__module__}
    return type(original.__name__, (*mixins, original), body)


def remade(kind: Any, state: dict[str, Any]) -> Any:
    """What ``__reduce_ex__`` returns for a module of a class that may be mixed: such a class was
    made here and now, so a pickle must say how to make it again."""
    return (
        _blank,
        (getattr(kind, "headprune_original", kind), getattr(kind, "headprune_mixins", ())),
        state,
    )


def _blank(original: type, mixins: tuple[type, ...]) -> Any:
    kind: Any = _mixed(original, mixins) if mixins else original
    return kind.__new__(kind)
