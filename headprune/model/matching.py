"""Matches modules with layouts: head counts and widths, read off the weights."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from headprune.attention.linear import base_of, is_conv1d
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab, HeadState, Width
from headprune.core.mixin import has_own_forward, original_class
from headprune.core.slabs import HeadGeometry, infer_geometry
from headprune.layouts import is_registered
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
    """The slabs of a layout that a module has: all but missing optional ones."""
    return tuple(slab for slab in layout.slabs if _has_slab(module, slab))


def _has_slab(module: nn.Module, slab: HeadSlab) -> bool:
    return not slab.optional or isinstance(lookup(module, slab.path), (Tensor, nn.Module))


def reason_against(layout: AttentionLayout, module: nn.Module) -> str | None:
    """Explain why a module is not of a layout; None when it is."""
    match = matched_geometry(layout, module)
    return match if isinstance(match, str) else None


def matched_geometry(layout: AttentionLayout, module: nn.Module) -> HeadGeometry | str:
    """Read the geometry of a module of this layout, or explain why it is not one."""
    reason = _wrong_parts(layout, module)
    if reason is not None:
        return reason
    try:
        now = geometry(layout, module)
    except HeadPruneError as error:
        return str(error)
    return (
        _wrong_code(layout, module)
        or _wrong_parameters(layout, module, now)
        or _wrong_counts(layout, module, now)
        or now
    )


def _wrong_parts(layout: AttentionLayout, module: nn.Module) -> str | None:
    """Why a module's parts do not match a layout; None when they do."""
    # Two layouts may match the same parts; a cut decides for one.
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is not None and state.layout not in (None, layout.name):
        return f"it was cut as one of layout {state.layout!r}"
    # Whatever the layout requires, cuts, or rules out.
    needed = [*layout.requires]
    needed += [slab.path for slab in layout.slabs if not slab.optional]
    for path in needed:
        if lookup(module, path) is None:
            return f"it has no {path!r}"
    for path in layout.absent:
        part = lookup(module, path)
        if part is not None and part is not False:  # a flag that is off counts as absent
            return f"it has {path!r}"
    if layout.exposed is not None and has_own_forward(module):
        return "its forward is replaced, so headprune's, which calls the projection, never runs"
    return None


def _wrong_code(layout: AttentionLayout, module: nn.Module) -> str | None:
    """Why code of this package cannot run in place of a module's; None when it can."""
    if layout.exposed is None or not is_of_library(layout.exposed):
        return None
    own = next(own_methods(original_class(module)), None)
    if own is None:
        return None
    return f"{own[0]} is not the library's own code, and headprune would replace it"


def _wrong_parameters(layout: AttentionLayout, module: nn.Module, now: HeadGeometry) -> str | None:
    """Why some parameter is not explained by the layout; None when all are."""
    accounted = [*layout.untouched, *layout.per_head]
    accounted += [slab.path for slab in layout.slabs]
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not _is_under(name, accounted):
            return f"its parameter {name!r} is not accounted for"
        if _is_under(name, layout.per_head) and not _is_of_one_head(module, name, now.head_dim):
            return (
                f"{name!r} has shape {list(parameter.shape)}, not one head's width,"
                f" [{now.head_dim}]: cutting is not exact"
            )
    return None


def _wrong_counts(layout: AttentionLayout, module: nn.Module, now: HeadGeometry) -> str | None:
    """Why a module's own counts contradict a layout; None where they agree.

    Registered layouts may correct counts that a configuration shares. One that was found in another
    model may have the wrong width of a head.
    """
    if is_registered(layout) or hasattr(module, STATE_ATTRIBUTE):
        return None
    found = {"n_query_heads": now.n_query_heads, "n_kv_heads": now.n_kv_heads}
    for path, count in layout.counts:
        value = lookup(module, path)
        if type(value) is int and count in found and value != found[count]:
            return (
                f"its {path!r} is {value}, but heads of width {now.head_dim} would be"
                f" {found[count]}: is the layout's head_dim that of another model?"
            )
    return None


def _is_of_one_head(module: nn.Module, name: str, head_dim: int) -> bool:
    """Whether a parameter is a norm's of one head's width, or of a linear layer per head."""
    # A norm or a linear layer that sees one head at a time works for any number of heads.
    owner = module.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Linear):
        return owner.in_features == head_dim
    return tuple(module.get_parameter(name).shape) == (head_dim,)


def _is_under(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def slab_length(module: nn.Module, slab: HeadSlab) -> int:
    """Read the length of the axis that a slab describes; of a list, the number of modules.

    Raises:
        InvalidValue: the slab's axis does not suit what is there, or that is no plain projection.
    """
    target = lookup(module, slab.path)
    where = f"HeadSlab({slab.path!r}).axis"
    if (slab.axis == "list") != isinstance(target, nn.ModuleList):
        got = f"{slab.axis!r} of a {type(target).__name__}"
        raise InvalidValue(where, "'list' for a ModuleList, and only for one", got)
    if isinstance(target, nn.ModuleList):
        return len(target)
    if isinstance(target, Tensor):
        if isinstance(slab.axis, str) or not -target.ndim <= slab.axis < target.ndim:
            must = f"a dimension of the tensor {list(target.shape)}"
            raise InvalidValue(where, must, repr(slab.axis))
        return target.shape[slab.axis]
    if not isinstance(slab.axis, str):
        raise InvalidValue(where, "'in' or 'out', because it is a projection", repr(slab.axis))
    target = base_of(target)
    # Packed weights of quantised layers do not have a row per feature.
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
    one_head = HeadGeometry(1, 1, head_dim, value_dim, key_dim)
    sizes = []  # (units, length of the axis in numbers) per slab
    for slab in slabs_of(layout, module):
        length = slab_length(module, slab)
        if slab.axis == "list":  # one module per head: as wide as its units
            length *= sum(map(one_head.width, slab.units))
        sizes.append((slab.units, length))
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)

    def share(n_query: int, n_kv: int) -> tuple[int, ...] | None:
        # The kept query heads of a cut module use key/value heads as before the cut.
        if state is not None and len(state.heads) == n_query:
            uncut = _sharing(layout, state.n_query_heads, state.n_kv_heads)
            used = sorted({uncut[h] for h in state.heads})
            # A search by halves: there may be thousands of neurons.
            return tuple(bisect_left(used, uncut[h]) for h in state.heads)
        return None if layout.grouping == "contiguous" else _sharing(layout, n_query, n_kv)

    return infer_geometry(sizes, head_dim, value_dim, key_dim, share)


def _sharing(layout: AttentionLayout, n_query: int, n_kv: int) -> tuple[int, ...]:
    """The key/value head of every query head of an uncut module."""
    if not n_kv or n_query % n_kv:
        raise InvalidValue("n_kv_heads", f"a divisor of the {n_query} query heads", n_kv)
    group_size = n_query // n_kv
    if layout.grouping == "contiguous":
        return tuple(head // group_size for head in range(n_query))
    return tuple(head % n_kv for head in range(n_query))


def widths(layout: AttentionLayout, module: nn.Module) -> tuple[int, int, int | None]:
    """Read the widths of a query, a value and (where it differs from a query's) a key."""
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    # Functions read widths off the uncut module, so a cut records them.
    if state is not None and state.widths is not None:
        return state.widths
    head_dim = _width(layout, module, layout.head_dim)
    if head_dim is None:
        where = f"{type(module).__name__}.{layout.head_dim}"
        raise InvalidValue(where, "the width of a head", None)
    value_dim = _width(layout, module, layout.value_dim) or head_dim
    return head_dim, value_dim, _width(layout, module, layout.key_dim)


def _width(layout: AttentionLayout, module: nn.Module, given: Width | None) -> int | None:
    """A width that a layout gives by the name of an attribute, by a function, or as a number."""
    name, number = layout.name, given
    if isinstance(given, str):
        name, number = given, lookup(module, given)
    elif callable(given):
        number = given(module)
    if number is None:
        return None
    if not isinstance(number, int) or number < 1:
        raise InvalidValue(f"{type(module).__name__}.{name}", "a head width >= 1", number)
    return number
