"""Whether a module is of a layout, and the head counts and widths that its weights have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from headprune.attention.linear import base_of, is_conv1d
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab, HeadState, Width
from headprune.core.mixin import has_own_forward, original_class
from headprune.core.slabs import HeadGeometry, infer_geometry
from headprune.layouts._code import is_of_library, own_methods

_MISSING = object()


def lookup(module: nn.Module, path: str) -> Any:
    """The attribute at a dotted path, or ``None`` where any step of it is missing."""
    target: Any = module
    for step in path.split("."):
        target = getattr(target, step, _MISSING)
        if target is _MISSING:
            return None
    return target


def slabs_of(layout: AttentionLayout, module: nn.Module) -> tuple[HeadSlab, ...]:
    """The slabs of a layout that a module has: all but optional ones that are not there."""
    return tuple(
        s
        for s in layout.slabs
        if not s.optional or isinstance(lookup(module, s.path), (Tensor, nn.Module))
    )


def reason_against(layout: AttentionLayout, module: nn.Module) -> str | None:
    """Why a module is not of this layout, in words; None when it is."""
    found = fitted(layout, module)
    return found if isinstance(found, str) else None


def fitted(layout: AttentionLayout, module: nn.Module) -> HeadGeometry | str:
    """The geometry of a module of this layout, or why it is not one, in words."""
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is not None and state.layout not in (None, layout.name):
        return f"it was cut as one of layout {state.layout!r}"
    for path in (*layout.requires, *(s.path for s in layout.slabs if not s.optional)):
        if lookup(module, path) is None:
            return f"it has no {path!r}"
    for path in layout.absent:
        found = lookup(module, path)
        if found is not None and found is not False:  # a flag that is off counts as absent
            return f"it has {path!r}"
    if layout.exposed is not None and has_own_forward(module):
        return "its forward is replaced, which would hide the one that calls its output projection"
    try:
        now = geometry(layout, module)
    except HeadPruneError as error:
        return str(error)
    if layout.exposed is not None and is_of_library(layout.exposed):
        own = next(own_methods(original_class(module)), None)
        if own is not None:
            return f"{own[0]} is not the library's, and code of ours would run in its place"
    accounted = (*layout.untouched, *layout.per_head, *(s.path for s in layout.slabs))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not _under(name, accounted):
            return f"its parameter {name!r} is not accounted for"
        if _under(name, layout.per_head) and not _of_one_head(module, name, now.head_dim):
            return (
                f"{name!r} has shape {list(parameter.shape)}, more than one head's width: cutting"
                " is not exact"
            )
    return now


def _of_one_head(module: nn.Module, name: str, head_dim: int) -> bool:
    """Whether a parameter is a norm's of one head's width, or a linear layer's that takes one head
    at a time."""
    owner = module.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Linear):
        return owner.in_features == head_dim
    return tuple(module.get_parameter(name).shape) == (head_dim,)


def _under(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def slab_length(module: nn.Module, slab: HeadSlab) -> int:
    """Length of the axis that a slab describes; for a list of modules, how many there are."""
    target = lookup(module, slab.path)
    where = f"HeadSlab({slab.path!r}).axis"
    if (slab.axis == "list") != isinstance(target, nn.ModuleList):
        raise InvalidValue(
            where,
            "'list' for a ModuleList, and only for one",
            f"{slab.axis!r} of a {type(target).__name__}",
        )
    if isinstance(target, nn.ModuleList):
        return len(target)
    if isinstance(target, Tensor):
        if isinstance(slab.axis, str) or not -target.ndim <= slab.axis < target.ndim:
            raise InvalidValue(
                where, f"a dimension of the tensor {list(target.shape)}", repr(slab.axis)
            )
        return target.shape[slab.axis]
    if not isinstance(slab.axis, str):
        raise InvalidValue(where, "'in' or 'out', because it is a projection", repr(slab.axis))
    target = base_of(target)
    weight = getattr(target, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        where = f"{type(module).__name__}.{slab.path}"
        got = f"{type(target).__module__}.{type(target).__name__}"
        hint = "Find its sites before it is quantised." if "quant" in got.lower() else ""
        raise InvalidValue(where, "a projection or a tensor", got, hint)
    return int(weight.shape[(slab.axis == "in") != is_conv1d(target)])  # a Conv1D's is [in, out]


def geometry(layout: AttentionLayout, module: nn.Module) -> HeadGeometry:
    """Head counts and widths of a module as it is now, read off the lengths of its weights."""
    head_dim, value_dim, key_dim = widths(layout, module)
    one = HeadGeometry(1, 1, head_dim, value_dim, key_dim)
    sizes = []
    for slab in slabs_of(layout, module):
        length = slab_length(module, slab)
        sizes.append(
            (
                slab.units,
                length * sum(map(one.width, slab.units)) if slab.axis == "list" else length,
            )
        )
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)

    def share(n_query: int, n_kv: int) -> tuple[int, ...] | None:
        if state is not None and len(state.heads) == n_query:
            uncut = _sharing(layout, state.n_query_heads, state.n_kv_heads)
            used = sorted({uncut[h] for h in state.heads})
            return tuple(used.index(uncut[h]) for h in state.heads)
        return None if layout.grouping == "contiguous" else _sharing(layout, n_query, n_kv)

    return infer_geometry(sizes, head_dim, value_dim, key_dim, share)


def _sharing(layout: AttentionLayout, n_query: int, n_kv: int) -> tuple[int, ...]:
    """The key/value head of every query head of an uncut module."""
    if not n_kv or n_query % n_kv:
        raise InvalidValue("n_kv_heads", f"a divisor of the {n_query} query heads", n_kv)
    return tuple(
        h // (n_query // n_kv) if layout.grouping == "contiguous" else h % n_kv
        for h in range(n_query)
    )


def widths(layout: AttentionLayout, module: nn.Module) -> tuple[int, int, int | None]:
    """Widths of a query, a value and (where it differs from a query's) a key."""
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is not None and state.widths is not None:
        return state.widths

    def width(given: Width | None) -> int | None:
        name = given if isinstance(given, str) else layout.name
        number = (
            lookup(module, given)
            if isinstance(given, str)
            else given(module)
            if callable(given)
            else given
        )
        if number is not None and (not isinstance(number, int) or number < 1):
            raise InvalidValue(f"{type(module).__name__}.{name}", "a head width >= 1", number)
        return number

    head_dim = width(layout.head_dim)
    if head_dim is None:
        raise InvalidValue(
            f"{type(module).__name__}.{layout.head_dim}", "the width of a head", None
        )
    return head_dim, width(layout.value_dim) or head_dim, width(layout.key_dim)
