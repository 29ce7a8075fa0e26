"""Code in an attention that its layout was not proven on: a ``forward`` of one's own, a hook, a
patch.

A layout is found by the parts of a module and their sizes. What the libraries' own classes do with
them is run by the laws and the coverage record; what somebody else's code does with them shows on
an example.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import nn

from headprune.core.mixin import FORWARDS
from headprune.layouts import registry
from headprune.layouts._code import from_libraries, function_of, own_globals, own_methods
from headprune.model.noting import only_notes
from headprune.model.sites import BoundSite

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def own_code(bound: BoundSite) -> str | None:
    """Where other code than a library's runs in a site, in words; None where there is none.

    Layouts that are not the package's own were written for such code, or have proven themselves on
    it. Those that run a module's code before they take it (``AttentionLayout.proves``) know its
    class, not its hooks and projections.
    """
    layout, module = bound.layout, bound.module
    if not registry.is_own(layout.name) or registry.get(layout.name) != layout:
        return None
    proven = layout.proves(module) if callable(layout.proves) else layout.proves
    lists = tuple(
        f"{s.path}." for s in layout.slabs if s.axis == "list"
    )  # whole modules leave with all their code
    cut = {s.path for s in layout.slabs if s.axis in ("in", "out")}
    for path, part in module.named_modules():
        if path.startswith(lists):
            continue
        where = ".".join(filter(None, (bound.site.name, path))) or type(part).__name__
        found = next(_on_instance(part), None)
        if found is None and not (proven and path not in cut):
            found = _of_class(type(part))
        if found is not None:
            return f"{found} at {where!r}"
    return _kernel(module)


def _on_instance(part: nn.Module) -> Iterator[str]:
    """Functions that an instance holds in place of its class's, and its hooks."""
    for name, value in part.__dict__.items():
        in_place = name in FORWARDS or (
            callable(value) and callable(getattr(type(part), name, None))
        )
        if in_place and not isinstance(value, (type, nn.Module)) and not from_libraries(value):
            yield f"a {name.lstrip('_')} put on one module ({_told(value)})"
    for hooks in _HOOKS:
        for hook in part.__dict__.get(hooks, {}).values():
            if not from_libraries(hook) and not only_notes(hook, part):
                yield f"a forward hook ({_told(hook)})"


def _of_class(kind: type) -> str | None:
    """A method or a function of somebody's own that a class calls."""
    found = next(chain(own_methods(kind), own_globals(kind)), None)
    return None if found is None else f"{found[0]} ({_told(found[1])})"


def _kernel(module: Any) -> str | None:
    """The function by which Transformers computes attention, where somebody registered another
    one."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    library: Any = sys.modules.get("transformers.modeling_utils")
    known: Callable[..., Any] | None = getattr(library, "ALL_ATTENTION_FUNCTIONS", {}).get(chosen)
    if known is None or from_libraries(known):
        return None
    return f"the attention function {chosen!r} ({_told(known)})"


def _told(value: Any) -> str:
    function = function_of(value)
    if function is None:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{function.__globals__.get('__name__')}.{function.__qualname__}"
