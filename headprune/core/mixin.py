"""Correct the code of one module after a cut: a class of ours is put in front of its class.

The module keeps its class name and its place, and it is still an instance of its original class.
Copies and pickles keep the change. ``torch.compile`` guards on classes, so a compiled model uses
the new class too.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any

from headprune.core.errors import UnsupportedModel

#: Attributes of an instance that may hold a ``forward``: its own, and the one that accelerate's
#: hooks (``device_map``) call.
FORWARDS = ("_old_forward", "forward")
#: Requirement in the error about a module that cannot lose all its heads.
WITHOUT_HEADS = "cut so that it keeps a head"


class Mixin:
    """Base of the classes that are put in front.

    A subclass overrides methods and calls ``super()``.
    """

    headprune_original: type
    headprune_mixins: tuple[type, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return remade(type(self), dict(self.__dict__))


def mix_in(module: Any, mixin: type[Mixin], must: str = "cut by a change of its class") -> bool:
    """Put ``mixin`` in front of the class of ``module``.

    Args:
        module: The module.
        mixin: The class.
        must: Requirement that the error names.

    Returns:
        Whether it was not there before.

    Raises:
        UnsupportedModel: the module has a ``forward`` of its own, which would hide that of its new
            class.
    """
    kind: Any = type(module)
    mixins: tuple[type, ...] = getattr(kind, "headprune_mixins", ())
    if mixin in mixins:
        return False
    refused = refusal(module, must)
    # A mixin that changes other methods works beside another forward.
    if refused is not None and _has_forward(mixin):
        raise refused
    _become(module, _mixed(getattr(kind, "headprune_original", kind), (mixin, *mixins)))
    return True


def _has_forward(mixin: type[Mixin]) -> bool:
    ours = [kind for kind in mixin.__mro__ if issubclass(kind, Mixin)]
    return any("forward" in kind.__dict__ for kind in ours)


def refusal(module: Any, must: str = "cut by a change of its class") -> UnsupportedModel | None:
    """Why nothing can be put in front of a module's class; None where it can."""
    if not has_own_forward(module):
        return None
    name = original_class(module).__name__
    return UnsupportedModel(
        name, f"{must}, which a replaced forward prevents", "a forward of its own"
    )


def mix_out(module: Any, mixin: type[Mixin]) -> None:
    """Remove ``mixin`` from the class of ``module``."""
    kind: Any = type(module)
    new_class = kind.headprune_original
    others = tuple(other for other in kind.headprune_mixins if other is not mixin)
    if others:
        new_class = _mixed(new_class, others)
    _become(module, new_class)


def has_own_forward(module: Any) -> bool:
    """Whether a ``forward`` of the instance hides its class's.

    The hooks of accelerate do not: they call the ``forward`` that was there.
    """
    # The first that exists is the one that is called in the end.
    for name in FORWARDS:
        if name in module.__dict__:
            own = module.__dict__[name]
            return own is not None and not _is_of_class(own, module)
    return False


def original_class(module: Any) -> type:
    """The class a module had before anything was put in front of it."""
    kind: Any = type(module)
    original: type = getattr(kind, "headprune_original", kind)
    return original


def _become(module: Any, kind: type) -> None:
    """Change the class of a module, and the ``forward`` that hooks have taken from the old one."""
    # Hooks keep a bound method of the old class, which would still be called.
    bound = [name for name in FORWARDS if _is_of_class(module.__dict__.get(name), module)]
    module.__class__ = kind
    for name in bound:
        module.__dict__[name] = MethodType(kind.forward, module)  # type: ignore[attr-defined]


def _is_of_class(method: Any, module: Any) -> bool:
    """Whether a method is the ``forward`` of the module's class, bound to the module."""
    if not isinstance(method, MethodType) or method.__self__ is not module:
        return False
    return method.__func__ is getattr(type(module), "forward", None)


@cache
def _mixed(original: type, mixins: tuple[type, ...]) -> type:
    """The class with ``mixins`` in front of ``original``; made once, so that types compare."""
    body = {
        "headprune_original": original,
        "headprune_mixins": mixins,
        "__doc__": original.__doc__,
        "__module__": original.__module__,
    }
    return type(original.__name__, (*mixins, original), body)


def remade(kind: Any, state: dict[str, Any]) -> Any:
    """The ``__reduce_ex__`` of a module whose class may have mixins.

    Such a class was made in this process, so a pickle must say how to make it again.
    """
    original = getattr(kind, "headprune_original", kind)
    mixins = getattr(kind, "headprune_mixins", ())
    return _blank, (original, mixins), state


def _blank(original: type, mixins: tuple[type, ...]) -> Any:
    kind: Any = _mixed(original, mixins) if mixins else original
    return kind.__new__(kind)
