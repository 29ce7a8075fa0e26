"""Finds the attention modules of a model whose heads can be gated and cut, by structure alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from headprune.attention.kept_heads import KEPT_HEADS, check_stored
from headprune.attention.sharded import check_no_tensor_parallel
from headprune.core.coverage import NotTaken
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel, did_you_mean
from headprune.core.heads import POLICIES, AttentionSite, Policy
from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab, HeadState
from headprune.core.slabs import HeadGeometry
from headprune.layouts import registry
from headprune.model import near_misses
from headprune.model.matching import fitted, geometry, lookup, reason_against, slab_length, slabs_of
from headprune.model.near_misses import attention_like, closest_reason, nothing_found
from headprune.model.transfers import in_main_memory

__all__ = [  # what is asked of sites elsewhere, wherever it is written
    "BoundSite",
    "Sites",
    "attention_like",
    "bind",
    "closest_reason",
    "find_sites",
    "geometry",
    "lookup",
    "not_taken",
    "reason_against",
    "sites_of",
    "slab_length",
    "slabs_of",
    "unwrap",
]


class Sites(tuple[AttentionSite, ...]):
    """The located sites of one model, in model order.

    Attributes:
        layouts: The layouts that located them, by name.
        not_taken: The model's attention that no layout takes, and why; empty where all of it is
            taken.
    """

    layouts: dict[str, AttentionLayout]
    not_taken: tuple[NotTaken, ...]

    def __new__(
        cls,
        sites: Iterable[AttentionSite],
        layouts: Iterable[AttentionLayout],
        not_taken: Iterable[NotTaken] = (),
    ) -> Sites:
        self = super().__new__(cls, sites)
        self.layouts = {layout.name: layout for layout in layouts}
        self.not_taken = tuple(not_taken)
        return self

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return (
            Sites(found, self.layouts.values(), self.not_taken)
            if isinstance(index, slice)
            else found
        )

    def __reduce__(self) -> Any:
        return Sites, (tuple(self), tuple(self.layouts.values()), self.not_taken)

    def __repr__(self) -> str:
        plain = super().__repr__()
        return f"Sites({plain}, not_taken={self.not_taken!r})" if self.not_taken else plain

    def __str__(self) -> str:
        missing = [f"not taken: {group}" for group in self.not_taken]
        return "\n".join([*map(str, self), *missing]) or "no sites"


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


def not_taken(
    model: nn.Module, sites: Iterable[AttentionSite], layouts: Iterable[AttentionLayout] = ()
) -> tuple[NotTaken, ...]:
    """The attention of a model that none of these sites is at, and that neither these layouts nor
    registered ones take.

    Sites that layouts would take, and that are not among these, are nobody's oversight.
    """
    own = sites.layouts.values() if isinstance(sites, Sites) else ()
    known = [*layouts, *own, *(registry.get(name) for name in registry)]
    return near_misses.not_taken(unwrap(model), [site.name for site in sites], known)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``'s wrapper, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def find_sites(
    model: nn.Module, layouts: Iterable[AttentionLayout] = (), policy: Policy = "group"
) -> Sites:
    """Finds every attention module whose heads can be pruned.

    A module matches a layout when every slab of the layout is there, every length is explained by
    whole heads and every parameter is accounted for. Layouts given here are tried before the
    registered ones.

    Args:
        model: Any module; one wrapped by ``torch.compile`` is looked at from inside.
        layouts: Layouts for your own attention modules.
        policy: What may leave where query heads share a key/value head: ``group`` whole groups, so
            that the KV cache shrinks; ``balanced`` the same number of query heads in every group
            that stays; ``free`` any query heads. A single key/value head of all query heads (MQA)
            stays as long as one of them does, also with ``group``.

    Returns:
        The sites in model order. Pass them as ``sites=`` to the other verbs if you gave layouts of
        your own. Their ``not_taken`` says which other modules look like attention, and why no
        layout takes them.

    Raises:
        UnsupportedModel: nothing was found; the message lists the attention-like modules and what
            each lacks. Or a site whose layout does not allow ``policy``.

    >>> import torch
    >>> from headprune import MultiHeadAttention
    >>> print(find_sites(torch.nn.Sequential(MultiHeadAttention(32, 4))))
    0: 4 heads of width 8 (multi_head_attention, self)
    """
    if not isinstance(model, nn.Module):
        raise InvalidValue("model", "a torch.nn.Module", type(model).__name__)
    if policy not in POLICIES:
        raise InvalidValue("policy", f"one of {', '.join(POLICIES)}", repr(policy))
    layouts = tuple(layouts)
    found = sites_of(_located(model, layouts, policy))
    return Sites(found, found.layouts.values(), not_taken(model, found, layouts))


def _located(
    model: nn.Module, layouts: Iterable[AttentionLayout] = (), policy: Policy = "group"
) -> list[BoundSite]:
    candidates = [*layouts, *(registry.get(name) for name in registry)]
    names: dict[int, list[str]] = {}
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    found: list[BoundSite] = []
    inside: tuple[str, ...] = ()
    for name, module in unwrap(model).named_modules():
        if inside and name.startswith(inside):
            continue
        for layout in candidates:
            now = fitted(layout, module)
            if not isinstance(now, str):
                check_no_tensor_parallel(unwrap(model), name, module)
                found.append(
                    _bound(layout, module, now, name, tuple(names[id(module)][1:]), policy)
                )
                inside = (*inside, f"{name}." if name else "")
                break
    if not found:
        raise nothing_found(unwrap(model), candidates)
    _check_stored(found)
    return found


def bind(model: nn.Module, sites: Iterable[AttentionSite] | None = None) -> list[BoundSite]:
    """Ties sites to the live modules of ``model``, with the heads that are present now.

    Raises:
        UnknownName: the model has no module of a site's name.
        UnsupportedModel: the module there does not fit the site's layout.
    """
    if sites is None:
        return _located(model)
    own = sites.layouts if isinstance(sites, Sites) else {}
    modules = dict(unwrap(model).named_modules(remove_duplicate=False))
    bound = []
    for site in sites:
        if site.name not in modules:
            hint = did_you_mean(site.name, modules)
            raise UnknownName(
                "sites", f"modules of {type(unwrap(model)).__name__}", repr(site.name), hint
            )
        layout = own.get(site.layout) or registry.get(site.layout)
        now = fitted(layout, modules[site.name])
        if isinstance(now, str):
            must = f"an attention module of layout {site.layout!r}"
            raise UnsupportedModel(site.name, must, type(modules[site.name]).__name__, now)
        check_no_tensor_parallel(unwrap(model), site.name, modules[site.name])
        bound.append(
            _bound(layout, modules[site.name], now, site.name, site.shared_with, site.policy)
        )
    _check_stored(bound)
    return bound


def _check_stored(bound: Iterable[BoundSite]) -> None:
    """Checks that nobody put weights of other heads into cut modules past ``load_state_dict``, as
    accelerate does.

    Raises:
        InvalidValue: the heads that came with the weights are not those of the module.
    """
    cut = [b for b in bound if b.module._buffers.get(KEPT_HEADS) is not None]
    buffers = [b.module._buffers[KEPT_HEADS] for b in cut]
    here = [(b, x) for b, x in zip(cut, buffers, strict=True) if x is not None and not x.is_meta]
    for (b, _), stored in zip(here, in_main_memory([x for _, x in here]), strict=True):
        check_stored(b.module, stored, f"the heads that came with the weights of {b.site.name}")


def _bound(
    layout: AttentionLayout,
    module: nn.Module,
    now: HeadGeometry,
    name: str,
    shared: tuple[str, ...],
    policy: Policy,
) -> BoundSite:
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
        must = (
            f"found with a policy that layout {layout.name!r} allows: {', '.join(layout.policies)}"
        )
        raise UnsupportedModel(where, must, repr(policy))
    site = AttentionSite(
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
        least=0 if layout.refusal(module) is None else 1,
    )
    return BoundSite(site, layout, module)
