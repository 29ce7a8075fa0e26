"""Finds the attention modules whose heads can be gated and cut, by structure alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headprune.attention.kept_heads import KEPT_HEADS, check_stored
from headprune.attention.sharded import check_no_tensor_parallel
from headprune.core.coverage import NotTaken
from headprune.core.errors import (
    HeadPruneError,
    InvalidValue,
    UnknownName,
    UnsupportedModel,
    check_one_of,
    did_you_mean,
)
from headprune.core.heads import POLICIES, AttentionSite, Policy
from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab, HeadState
from headprune.core.slabs import HeadGeometry
from headprune.layouts import registry
from headprune.model import near_misses
from headprune.model.matching import (
    geometry,
    lookup,
    matched_geometry,
    reason_against,
    slab_length,
    slabs_of,
)
from headprune.model.near_misses import (
    attention_like,
    closest_reason,
    no_feed_forwards_error,
    no_sites_error,
)
from headprune.model.transfers import in_main_memory

# Other packages import all of these from here, wherever they are defined.
__all__ = [
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
        not_taken: The model's attention and, if asked for, feed-forwards that no layout takes, and
            why.
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
        sites = super().__getitem__(index)
        if isinstance(index, slice):
            return Sites(sites, self.layouts.values(), self.not_taken)
        return sites

    def __reduce__(self) -> Any:
        return Sites, (tuple(self), tuple(self.layouts.values()), self.not_taken)

    def __repr__(self) -> str:
        plain = super().__repr__()
        if not self.not_taken:
            return plain
        return f"Sites({plain}, not_taken={self.not_taken!r})"

    def __str__(self) -> str:
        lines = [*map(str, self)]
        lines += [f"not recognised: {group}" for group in self.not_taken]
        return "\n".join(lines) or "no sites"


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
    """List the attention that is no site and that no layout takes.

    Attention that a layout takes is not listed, even if it is not among the sites: the caller left
    it out on purpose. The same holds for feed-forwards, where one of them is a site.

    Args:
        model: The model.
        sites: Its sites.
        layouts: Layouts besides those of the sites and the registered ones.
    """
    own = list(layouts)
    if isinstance(sites, Sites):
        own += sites.layouts.values()
    sites = list(sites)
    model = unwrap(model)
    names = [site.name for site in sites if not site.is_feed_forward]
    found = near_misses.unmatched_attention(model, names, _with_registered(own))
    if any(site.is_feed_forward for site in sites):
        neurons = _with_registered(own, feed_forward=True)
        found += near_misses.unmatched_feed_forwards(model, sites, neurons)
    return found


def _with_registered(
    own: Iterable[AttentionLayout], feed_forward: bool = False
) -> list[AttentionLayout]:
    """The layouts of attention, or those of feed-forwards: some of one's own, then the registered
    ones."""
    layouts = [*own, *(registry.get(name) for name in registry)]
    return [layout for layout in layouts if layout.is_feed_forward == feed_forward]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``'s wrapper, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def find_sites(
    model: nn.Module,
    layouts: Iterable[AttentionLayout] = (),
    policy: Policy = "group",
    feed_forward: bool = False,
) -> Sites:
    """Find every attention module whose heads can be pruned, and every feed-forward if asked to.

    A module matches a layout when every slab of the layout is there, every length is explained by
    whole heads and every parameter is accounted for.

    Args:
        model: Any module, or ``torch.compile``'s wrapper of one.
        layouts: Layouts for your own modules, tried before the registered ones.
        policy: What may be removed where query heads share a key/value head: ``group`` whole
            groups, so that the KV cache shrinks; ``balanced`` the same number of query heads from
            every kept group; ``free`` any query heads. With a single key/value head for all query
            heads (MQA), ``group`` acts as ``balanced``.
        feed_forward: Whether to find feed-forwards too: their heads are neurons.

    Returns:
        The sites in model order. Pass them as ``sites=`` to the other verbs if you gave layouts of
        your own. Their ``not_taken`` lists similar modules, and why no layout takes them.

    Raises:
        UnsupportedModel: no site, or no feed-forward that was asked for; the message lists similar
            modules. Or a site whose layout does not allow ``policy``.

    >>> import torch
    >>> from headprune import MultiHeadAttention
    >>> print(find_sites(torch.nn.Sequential(MultiHeadAttention(32, 4))))
    0: 4 heads of width 8 (multi_head_attention, self)
    """
    _check(model, policy)
    layouts = tuple(layouts)
    sites = sites_of(_located(model, layouts, policy, feed_forward))
    return Sites(sites, sites.layouts.values(), not_taken(model, sites, layouts))


def _check(model: object, policy: str) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValue("model", "a torch.nn.Module", type(model).__name__)
    check_one_of("policy", policy, POLICIES)


# ``sites_for`` and ``all_cut_sites`` do not fill ``not_taken``.


def sites_for(
    model: nn.Module,
    names: Iterable[str],
    policy: Policy = "group",
    layouts: Iterable[AttentionLayout] = (),
) -> Sites:
    """Find the attention of a model, and its feed-forwards where one of these names is theirs."""
    _check(model, policy)
    layouts, unknown = tuple(layouts), set(names)
    sites, no_attention = Sites((), ()), None
    try:
        sites = sites_of(_located(model, layouts, policy))
    except UnsupportedModel as error:
        no_attention = error  # its feed-forwards may fit a layout all the same
    unknown.difference_update(site.name for site in sites)
    if not unknown and no_attention is None:
        return sites
    more = Sites((), ())
    with suppress(HeadPruneError):
        more = sites_of(_located(model, layouts, policy, feed_forward=True))
    # Names of neither kind are another model's, which the caller reports.
    if unknown.intersection(site.name for site in more):
        return more
    if no_attention is not None:
        raise no_attention
    return sites


def layouts_of_cuts(model: nn.Module) -> list[AttentionLayout]:
    """Layouts that are no files of this library, by which modules of the model were cut."""
    layouts: dict[str, AttentionLayout] = {}
    for module in unwrap(model).modules():
        state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
        if state is not None and state.own is not None:
            layouts.setdefault(state.own.name, state.own)
    return list(layouts.values())


def all_cut_sites(model: nn.Module) -> Sites:
    """Find the attention of a model, and its feed-forwards where one of them lost neurons."""
    return sites_of(_located(model, feed_forward=has_cut_neurons(model)))


def has_cut_neurons(model: nn.Module) -> bool:
    """Whether a feed-forward lost neurons."""
    for module in unwrap(model).modules():
        state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
        if state is None or state.layout is None:
            continue
        layout = state.own or registry.get(state.layout)
        if layout.is_feed_forward:
            return True
    return False


def _located(
    model: nn.Module,
    layouts: Iterable[AttentionLayout] = (),
    policy: Policy = "group",
    feed_forward: bool = False,
) -> list[BoundSite]:
    """Bind every module that matches a layout; raise if there is none."""
    model = unwrap(model)
    own = _with_those_of_cuts(model, layouts, feed_forward)
    # 1. Attention.
    attention = _with_registered(own)
    bound = _matched(model, attention, policy)
    # 2. Feed-forwards; layouts of the user's own are always tried.
    if feed_forward:
        neurons = _with_registered(own, feed_forward=True)
    else:
        neurons = [layout for layout in own if layout.is_feed_forward]
    if neurons:
        found = _matched(model, neurons, policy)
        # A layout of the user's own may be for a model of feed-forwards alone.
        if not found and (feed_forward or not bound):
            raise no_feed_forwards_error(model, neurons)
        bound = _in_model_order(model, [*bound, *found])
    if not bound:
        raise no_sites_error(model, attention)
    _check_stored(bound)
    return bound


def _with_those_of_cuts(
    model: nn.Module, layouts: Iterable[AttentionLayout], feed_forward: bool
) -> list[AttentionLayout]:
    """Layouts, and after them those by which modules of the model were cut."""
    own = list(layouts)
    names = {layout.name for layout in own}
    more = [layout for layout in layouts_of_cuts(model) if layout.name not in names]
    # Feed-forwards only where they are asked for.
    return own + [layout for layout in more if feed_forward or not layout.is_feed_forward]


def _matched(
    model: nn.Module, candidates: Iterable[AttentionLayout], policy: Policy
) -> list[BoundSite]:
    """Bind every module that matches one of these layouts."""
    candidates = list(candidates)
    # A module may be in several places (ALBERT's layers): its first name counts.
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    bound: list[BoundSite] = []
    inside: tuple[str, ...] = ()  # prefixes of modules that are sites already
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        # An expert of a mixture sees some tokens of some examples: no gate fits them.
        is_expert = near_misses.is_expert(name)
        for layout in candidates:
            if is_expert and layout.is_feed_forward:
                continue
            now = matched_geometry(layout, module)
            if isinstance(now, str):
                continue
            if layout.is_feed_forward and near_misses.is_tokens_first(model, name):
                continue
            check_no_tensor_parallel(model, name, module)
            shared = tuple(names[id(module)][1:])
            bound.append(_bound(layout, module, now, name, shared, policy))
            inside = (*inside, f"{name}." if name else "")
            break
    return bound


def _in_model_order(model: nn.Module, bound: Iterable[BoundSite]) -> list[BoundSite]:
    """Sort sites by their gates: a layer that is a feed-forward comes before its own attention."""
    order = {id(module): number for number, module in enumerate(model.modules())}
    return sorted(bound, key=lambda b: order[id(b.gate)])


def bind(model: nn.Module, sites: Iterable[AttentionSite] | None = None) -> list[BoundSite]:
    """Tie sites to the live modules of a model, with the heads that are present now.

    Args:
        model: The model.
        sites: Its sites; by default those that ``find_sites`` finds.

    Raises:
        UnknownName: the model has no module of a site's name.
        UnsupportedModel: the module there does not match the site's layout.
    """
    if sites is None:
        return _located(model)
    own = {layout.name: layout for layout in layouts_of_cuts(model)}
    own.update(sites.layouts if isinstance(sites, Sites) else {})
    modules = dict(unwrap(model).named_modules(remove_duplicate=False))
    bound = []
    for site in sites:
        if site.name not in modules:
            must = f"modules of {type(unwrap(model)).__name__}"
            raise UnknownName("sites", must, repr(site.name), did_you_mean(site.name, modules))
        module = modules[site.name]
        layout = own.get(site.layout) or registry.get(site.layout)
        now = matched_geometry(layout, module)
        if isinstance(now, str):
            must = f"an attention module of layout {site.layout!r}"
            raise UnsupportedModel(site.name, must, type(module).__name__, now)
        check_no_tensor_parallel(unwrap(model), site.name, module)
        bound.append(_bound(layout, module, now, site.name, site.shared_with, site.policy))
    _check_stored(bound)
    return bound


def _check_stored(bound: Iterable[BoundSite]) -> None:
    """Check that no weights of other heads were put into cut modules past ``load_state_dict``.

    Accelerate does so.

    Raises:
        InvalidValue: the heads that came with the weights are not those of the module.
    """
    stored: list[tuple[BoundSite, Tensor]] = []
    for b in bound:
        kept_heads = b.module._buffers.get(KEPT_HEADS)
        if kept_heads is not None and not kept_heads.is_meta:
            stored.append((b, kept_heads))
    # One copy from the accelerator for all sites.
    copied = in_main_memory([kept_heads for _, kept_heads in stored])
    for (b, _), kept_heads in zip(stored, copied, strict=True):
        check_stored(b.module, kept_heads, f"the heads that came with the weights of {b.site.name}")


def _bound(
    layout: AttentionLayout,
    module: nn.Module,
    now: HeadGeometry,
    name: str,
    shared: tuple[str, ...],
    policy: Policy,
) -> BoundSite:
    """The site of a module, with the heads that it has.

    Args:
        layout: The module's layout.
        module: The module.
        now: Its geometry.
        name: Its name.
        shared: Other names of the same module.
        policy: What may be removed where query heads share a key/value head.
    """
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is None:  # not cut yet: all heads are present
        state = HeadState(now.n_query_heads, now.n_kv_heads, tuple(range(now.n_query_heads)))
    where = f"{name} ({type(module).__name__})"
    # Someone else has cut the weights, or replaced them by those of another cut.
    if len(state.heads) != now.n_query_heads:
        must = f"cut only through headprune ({len(state.heads)} heads on record)"
        raise UnsupportedModel(where, must, f"{now.n_query_heads} heads in the weights")
    # MHA has groups of one head, MQA a single group; only GQA leaves a choice.
    if state.n_query_heads == state.n_kv_heads:
        policy = "group"  # all policies are the same then
    elif state.n_kv_heads == 1 and policy == "group" and "balanced" in layout.policies:
        policy = "balanced"  # the one group is the whole layer
    elif policy not in layout.policies:
        allowed = ", ".join(layout.policies)
        must = f"cut by a policy of layout {layout.name!r} ({allowed})"
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
