"""Finds code in an attention that its layout was not proven on: a forward, a hook, a patch.

A module matches a layout by its parts and their sizes. What the libraries' own classes do with them
is tested. What other code does with them has to be proven on an example.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import nn

from headprune.core.layout import AttentionLayout
from headprune.core.mixin import FORWARDS
from headprune.layouts import registry
from headprune.layouts._code import from_libraries, function_of, own_globals, own_methods
from headprune.model.noting import only_notes
from headprune.model.sites import BoundSite

#: Attributes of a module that hold its hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def own_code(bound: BoundSite) -> str | None:
    """Describe the first code in a site that is no library's; None where there is none.

    Layouts that are not the package's own were written for such code, or were proven on it, so
    there is nothing to report. Layouts that run a module's code before they take it
    (``AttentionLayout.proves``) know its class, not its hooks and projections.
    """
    layout, module = bound.layout, bound.module
    if not registry.is_builtin(layout.name) or registry.get(layout.name) != layout:
        return None
    proven = _is_proven(layout, module)
    # Modules of a list are removed whole, with all their code.
    prefixes = tuple(f"{slab.path}." for slab in layout.slabs if slab.axis == "list")
    cut_paths = {slab.path for slab in layout.slabs if slab.axis in ("in", "out")}
    for path, part in module.named_modules():
        if path.startswith(prefixes):
            continue
        # A proven layout knows the code of classes, except that of the projections it cuts.
        trusts_class = proven and path not in cut_paths
        code = _of_part(part, trusts_class)
        if code is not None:
            where = f"{bound.site.name}.{path}".strip(".") or type(part).__name__
            return f"{code} at {where!r}"
    # Transformers lets a user register the function that computes attention.
    return _attention_function(module)


def _is_proven(layout: AttentionLayout, module: nn.Module) -> bool:
    """Whether a layout runs a module's code before it takes the module."""
    if callable(layout.proves):
        return bool(layout.proves(module))
    return bool(layout.proves)


def _of_part(part: nn.Module, trusts_class: bool) -> str | None:
    """The first code of a module that is no library's."""
    code = next(_on_instance(part), None)
    if code is not None:
        return code
    return None if trusts_class else _of_class(type(part))


def _on_instance(part: nn.Module) -> Iterator[str]:
    """Functions that an instance has instead of its class's, and its hooks."""
    for name, value in part.__dict__.items():
        if isinstance(value, (type, nn.Module)):
            continue
        # An attribute hides the class's method of the same name.
        replaces_method = callable(value) and callable(getattr(type(part), name, None))
        if (name in FORWARDS or replaces_method) and not from_libraries(value):
            yield f"a {name.lstrip('_')} put on one module ({_qualified_name(value)})"
    for hooks in _HOOKS:
        for hook in part.__dict__.get(hooks, {}).values():
            if not from_libraries(hook) and not only_notes(hook, part):
                yield f"a forward hook ({_qualified_name(hook)})"


def _of_class(kind: type) -> str | None:
    """A method, or a function that a class calls, that is no library's."""
    code = next(chain(own_methods(kind), own_globals(kind)), None)
    if code is None:
        return None
    name, function = code
    return f"{name} ({_qualified_name(function)})"


def _attention_function(module: Any) -> str | None:
    """The function that computes attention, if another one is registered with Transformers."""
    # Transformers chooses by a name in the configuration, from a table that users may extend.
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    # If nobody has imported Transformers, nothing is registered there.
    library: Any = sys.modules.get("transformers.modeling_utils")
    known: Callable[..., Any] | None = getattr(library, "ALL_ATTENTION_FUNCTIONS", {}).get(chosen)
    if known is None or from_libraries(known):
        return None
    return f"the attention function {chosen!r} ({_qualified_name(known)})"


def _qualified_name(value: Any) -> str:
    """Module and name of a function, or of the class of another callable."""
    function = function_of(value)
    if function is None:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{function.__globals__.get('__name__')}.{function.__qualname__}"
