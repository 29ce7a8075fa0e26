"""Finds the attention modules of a model whose heads can be gated and cut, by structure alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headprune.core.errors import HeadPruneError, InvalidValue, UnknownName, UnsupportedModel, did_you_mean
from headprune.core.heads import POLICIES, AttentionSite, Policy
from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab, HeadState, Width
from headprune.core.slabs import HeadGeometry, infer_geometry
from headprune.layouts import registry

_MISSING = object()
_LISTED = 8


class Sites(tuple[AttentionSite, ...]):
    """The located sites of one model, in model order, with the layouts that located them."""

    layouts: dict[str, AttentionLayout]

    def __new__(cls, sites: Iterable[AttentionSite], layouts: Iterable[AttentionLayout]) -> Sites:
        self = super().__new__(cls, sites)
        self.layouts = {layout.name: layout for layout in layouts}
        return self

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Sites(found, self.layouts.values()) if isinstance(index, slice) else found

    def __reduce__(self) -> Any:
        return Sites, (tuple(self), tuple(self.layouts.values()))

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no sites"


@dataclass(frozen=True)
class BoundSite:
    """A site together with the live module it names."""

    site: AttentionSite
    layout: AttentionLayout
    module: nn.Module

    @property
    def gate(self) -> nn.Module:
        """The output projection, whose input is gated; the module itself where there is none."""
        return self.module.get_submodule(self.layout.gate)

    @property
    def slabs(self) -> tuple[HeadSlab, ...]:
        """The layout's slabs that this module has."""
        return slabs_of(self.layout, self.module)


def sites_of(bound: Iterable[BoundSite]) -> Sites:
    """The sites of bound sites, with their layouts."""
    bound = list(bound)
    return Sites((b.site for b in bound), (b.layout for b in bound))


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``'s wrapper, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


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
    return tuple(s for s in layout.slabs if not s.optional or isinstance(lookup(module, s.path), (Tensor, nn.Module)))


def find_sites(model: nn.Module, layouts: Iterable[AttentionLayout] = (), policy: Policy = "group") -> Sites:
    """Finds every attention module whose heads can be pruned.

    A module matches a layout when every slab of the layout is there, every length is explained by whole heads and
    every parameter is accounted for. Layouts given here are tried before the registered ones.

    Args:
        model: Any module; one wrapped by ``torch.compile`` is looked at from inside.
        layouts: Layouts for your own attention modules.
        policy: What may leave where query heads share a key/value head: ``group`` whole groups, so that the KV cache
            shrinks; ``balanced`` the same number of query heads in every group that stays; ``free`` any query heads.
            A single key/value head of all query heads (MQA) stays as long as one of them does, also with ``group``.

    Returns:
        The sites in model order. Pass them as ``sites=`` to the other verbs if you gave layouts of your own.

    Raises:
        UnsupportedModel: nothing was found; the message lists the attention-like modules and what each lacks. Or a
            site whose layout does not allow ``policy``.

    >>> import torch
    >>> from headprune import MultiHeadAttention
    >>> print(find_sites(torch.nn.Sequential(MultiHeadAttention(32, 4))))
    0: 4 heads of width 8 (multi_head_attention, self)
    """
    if not isinstance(model, nn.Module):
        raise InvalidValue("model", "a torch.nn.Module", type(model).__name__)
    if policy not in POLICIES:
        raise InvalidValue("policy", f"one of {', '.join(POLICIES)}", repr(policy))
    candidates = [*layouts, *(registry.get(name) for name in registry)]
    names: dict[int, list[str]] = {}
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    found: list[AttentionSite] = []
    used: dict[str, AttentionLayout] = {}
    inside: tuple[str, ...] = ()
    for name, module in unwrap(model).named_modules():
        if inside and name.startswith(inside):
            continue
        for layout in candidates:
            if reason_against(layout, module) is None:
                found.append(_site(layout, module, name, tuple(names[id(module)][1:]), policy))
                used[layout.name] = layout
                inside = (*inside, f"{name}." if name else "")
                break
    if not found:
        raise _nothing_found(unwrap(model), candidates)
    return Sites(found, used.values())


def bind(model: nn.Module, sites: Iterable[AttentionSite] | None = None) -> list[BoundSite]:
    """Ties sites to the live modules of ``model``, with the heads that are present now.

    Raises:
        UnknownName: the model has no module of a site's name.
        UnsupportedModel: the module there does not fit the site's layout.
    """
    if sites is None:
        sites = find_sites(model)
    own = sites.layouts if isinstance(sites, Sites) else {}
    modules = dict(unwrap(model).named_modules(remove_duplicate=False))
    bound = []
    for site in sites:
        if site.name not in modules:
            hint = did_you_mean(site.name, modules)
            raise UnknownName("sites", f"modules of {type(unwrap(model)).__name__}", repr(site.name), hint)
        layout = own.get(site.layout) or registry.get(site.layout)
        against = reason_against(layout, modules[site.name])
        if against is not None:
            must = f"an attention module of layout {site.layout!r}"
            raise UnsupportedModel(site.name, must, type(modules[site.name]).__name__, against)
        fresh = _site(layout, modules[site.name], site.name, site.shared_with, site.policy)
        bound.append(BoundSite(fresh, layout, modules[site.name]))
    return bound


def reason_against(layout: AttentionLayout, module: nn.Module) -> str | None:
    """Why a module is not of this layout, in words; None when it is."""
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
    try:
        geometry(layout, module)
    except HeadPruneError as error:
        return str(error)
    accounted = (*layout.untouched, *layout.per_head, *(s.path for s in layout.slabs))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not _under(name, accounted):
            return f"its parameter {name!r} is not accounted for"
        if _under(name, layout.per_head) and not _of_one_head(module, name, geometry(layout, module).head_dim):
            return f"{name!r} has shape {list(parameter.shape)}, more than one head's width: cutting is not exact"
    return None


def _of_one_head(module: nn.Module, name: str, head_dim: int) -> bool:
    """Whether a parameter is a norm's of one head's width, or a linear layer's that takes one head at a time."""
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
            where, "'list' for a ModuleList, and only for one", f"{slab.axis!r} of a {type(target).__name__}"
        )
    if isinstance(target, nn.ModuleList):
        return len(target)
    if isinstance(target, Tensor):
        if isinstance(slab.axis, str) or not -target.ndim <= slab.axis < target.ndim:
            raise InvalidValue(where, f"a dimension of the tensor {list(target.shape)}", repr(slab.axis))
        return target.shape[slab.axis]
    if not isinstance(slab.axis, str):
        raise InvalidValue(where, "'in' or 'out', because it is a projection", repr(slab.axis))
    target = getattr(target, "base_layer", target)  # of a projection with adapters
    weight = getattr(target, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        where = f"{type(module).__name__}.{slab.path}"
        raise InvalidValue(where, "a projection or a tensor", type(target).__name__)
    transposed = hasattr(target, "nf")  # Transformers' Conv1D keeps [in, out]
    return int(weight.shape[(slab.axis == "in") != transposed])


def geometry(layout: AttentionLayout, module: nn.Module) -> HeadGeometry:
    """Head counts and widths of a module as it is now, read off the lengths of its weights."""
    head_dim, value_dim, key_dim = widths(layout, module)
    one = HeadGeometry(1, 1, head_dim, value_dim, key_dim)
    sizes = []
    for slab in slabs_of(layout, module):
        length = slab_length(module, slab)
        sizes.append((slab.units, length * sum(map(one.width, slab.units)) if slab.axis == "list" else length))
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
    return tuple(h // (n_query // n_kv) if layout.grouping == "contiguous" else h % n_kv for h in range(n_query))


def widths(layout: AttentionLayout, module: nn.Module) -> tuple[int, int, int | None]:
    """Widths of a query, a value and (where it differs from a query's) a key."""
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is not None and state.widths is not None:
        return state.widths

    def width(given: Width | None) -> int | None:
        name = given if isinstance(given, str) else layout.name
        number = lookup(module, given) if isinstance(given, str) else given(module) if callable(given) else given
        if number is not None and (not isinstance(number, int) or number < 1):
            raise InvalidValue(f"{type(module).__name__}.{name}", "a head width >= 1", number)
        return number

    head_dim = width(layout.head_dim)
    if head_dim is None:
        raise InvalidValue(f"{type(module).__name__}.{layout.head_dim}", "the width of a head", None)
    return head_dim, width(layout.value_dim) or head_dim, width(layout.key_dim)


def _site(
    layout: AttentionLayout, module: nn.Module, name: str, shared: tuple[str, ...], policy: Policy
) -> AttentionSite:
    now = geometry(layout, module)
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is None:
        state = HeadState(now.n_query_heads, now.n_kv_heads, tuple(range(now.n_query_heads)))
    where = f"{name} ({type(module).__name__})"
    if len(state.heads) != now.n_query_heads:
        must = f"cut only through headprune ({len(state.heads)} heads on record)"
        raise UnsupportedModel(where, must, f"{now.n_query_heads} heads in the weights")
    if state.n_query_heads == state.n_kv_heads:
        policy = "group"  # all policies are the same then
    elif state.n_kv_heads == 1 and policy == "group" and "balanced" in layout.policies:
        policy = "balanced"  # the one group is the whole layer
    elif policy not in layout.policies:
        must = f"found with a policy that layout {layout.name!r} allows: {', '.join(layout.policies)}"
        raise UnsupportedModel(where, must, repr(policy))
    return AttentionSite(
        name=name,
        layout=layout.name,
        kind=layout.kind(module, name) if callable(layout.kind) else layout.kind,
        n_query_heads=state.n_query_heads,
        n_kv_heads=state.n_kv_heads,
        head_dim=now.head_dim,
        value_dim=now.value_dim,
        heads=state.heads,
        shared_with=shared,
        policy=policy,
        grouping=layout.grouping,
        key_dim=now.key_dim,
    )


def attention_like(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that a person would call attention: by their class name, with parameters."""
    for name, module in model.named_modules():
        if "attention" in type(module).__name__.lower() and any(True for _ in module.parameters()):
            yield name, module


def closest_reason(module: nn.Module, layouts: Iterable[AttentionLayout]) -> str:
    """What a module lacks for the layout that it is nearest to: that which finds most of what it needs there; of
    equals the one with most slabs, then the one with least that must not be there."""

    def found(layout: AttentionLayout) -> tuple[float, int, int, int]:
        slabs = [s.path for s in layout.slabs if not s.optional]
        there = [path for path in (*slabs, *layout.requires) if lookup(module, path) is not None]
        share = len(there) / len((*slabs, *layout.requires))
        odd = sum(lookup(module, path) is not None and lookup(module, path) is not False for path in layout.absent)
        return share, sum(path in slabs for path in there), -odd, -len(layout.requires)

    best = max(layouts, key=found)
    return f"nearest layout {best.name!r}: {reason_against(best, module)}"


def _nothing_found(model: nn.Module, layouts: list[AttentionLayout]) -> UnsupportedModel:
    seen = list(attention_like(model))
    lines = [f"{n or 'the model itself'} ({type(m).__name__}; {closest_reason(m, layouts)})" for n, m in seen[:_LISTED]]
    more = f" and {len(seen) - _LISTED} more" if len(seen) > _LISTED else ""
    got = (
        ("attention-like modules that fit no layout: " + "; ".join(lines) + more)
        if seen
        else "no attention-like module"
    )
    hint = "Describe your module with headprune.AttentionLayout and pass find_sites(model, layouts=[...])."
    if any(isinstance(m, nn.MultiheadAttention) for _, m in seen):
        hint += " Or replace torch.nn.MultiheadAttention by headprune.MultiHeadAttention.from_torch(module)."
    return UnsupportedModel(type(model).__name__, "a model with attention that headprune knows", got, hint)
