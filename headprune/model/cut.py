"""Cuts a model's tensors: every new tensor is computed first, then all are put in place.

Parameters are replaced, never resized: an optimizer or a graph made before the cut keeps the old
ones. Parameters that are shared between projections stay shared; one that is shared with something
that is not cut is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import store_heads_, watch_heads_
from headprune.attention.linear import (
    Axis,
    check_plain,
    cut_features,
    feature_dimensions,
    is_conv1d,
    projections,
    recount_,
    replace_features_,
)
from headprune.attention.multi_head import MultiHeadAttention
from headprune.core.errors import UnsupportedModel
from headprune.core.heads import HeadMask
from headprune.core.layout import GATES_ATTRIBUTE, STATE_ATTRIBUTE, HeadSlab, HeadState
from headprune.core.mixin import WITHOUT_HEADS, Mixin, mix_in
from headprune.core.slabs import HeadGeometry, kept_rows, used_groups
from headprune.layouts import is_builtin
from headprune.layouts._own_code import OwnCode
from headprune.model.offloaded import OffloadedTensor, offloaders, own_tensors
from headprune.model.offloaded_cut import (
    ShortenedWeights,
    Shortening,
    bring_home_,
    check_fetched,
    store_shortened,
)
from headprune.model.refusals import check_cut
from headprune.model.saves import describe_saves
from headprune.model.sites import BoundSite, lookup, unwrap
from headprune.model.transfers import copies, sent

#: Attributes of every module: parameters, buffers, children, hooks ...
_KEPT_BY_TORCH = frozenset(nn.Module().__dict__)


@dataclass(frozen=True)
class Shortened:
    """A tensor of a module that is cut along one dimension.

    Args:
        owner: The module.
        name: The tensor's name there.
        old: The tensor before.
        dimension: The dimension along which it is cut.
        rows: Kept positions along it.
    """

    owner: nn.Module
    name: str
    old: Any
    dimension: int
    rows: tuple[int, ...]

    @property
    def new(self) -> nn.Parameter | None:
        """The parameter that is there now; None where there is none."""
        return self.owner._parameters.get(self.name)


@dataclass
class Undo:
    """Everything that a model's modules hold, to be put back after an error.

    Args:
        modules: Modules with their class, their attributes, and copies of torch's own mappings.
        parameters: Parameters with their ``requires_grad`` and their gradient.
        numbers: Tensors that are changed in place, with copies of their numbers.
        hooks: Hooks of accelerate with the mappings that they read from.
        kept: What was written for offloaded tensors.
        shortened: What a cut has shortened.
    """

    modules: list[tuple[nn.Module, type, dict[str, Any], dict[str, Any]]] = field(
        default_factory=list
    )
    parameters: list[tuple[nn.Parameter, bool, Tensor | None]] = field(default_factory=list)
    numbers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    hooks: list[tuple[Any, Mapping[str, Tensor]]] = field(default_factory=list)
    kept: ShortenedWeights = field(default_factory=ShortenedWeights)
    shortened: list[Shortened] = field(default_factory=list)

    def remember(self, module: nn.Module) -> None:
        """Remember a module and those in it; call before any change.

        That is tensors, attributes, children, hooks, mode and class.
        """
        for part in module.modules():
            held = dict(part.__dict__)
            # Tensors, children and hooks lie in mappings of torch's own, to which handles refer.
            inside = {name: copy(value) for name, value in held.items() if name in _KEPT_BY_TORCH}
            self.modules.append((part, type(part), held, inside))
        # Flags and gradients belong to parameters, which are shared, not copied.
        self.parameters += [(p, p.requires_grad, p.grad) for p in module.parameters()]

    def keep(self, *tensors: Tensor) -> None:
        """Copy the numbers of tensors; call before they are changed in place.

        Pass together what is changed together: the device needs room for all of it (``copies``).
        """
        self.numbers += zip(tensors, copies(tensors), strict=True)

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, numbers in reversed(self.numbers):
                tensor.copy_(numbers)
        for hook, weights_map in self.hooks:
            hook.weights_map = weights_map
        self.kept.discard()
        for module, kind, held, inside in self.modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(held)
            # Handles of hooks refer to these mappings, so their content is put back in place.
            for name, content in inside.items():
                if isinstance(content, (dict, set)):
                    held[name].clear()
                    held[name].update(content)
        for parameter, needed, grad in self.parameters:
            if parameter.requires_grad != needed:
                parameter.requires_grad_(needed)
            parameter.grad = grad


@dataclass(frozen=True)
class _Cut:
    """One slab of one site, with the kept positions."""

    bound: BoundSite
    slab: HeadSlab
    rows: tuple[int, ...]

    @property
    def where(self) -> str:
        return f"{self.bound.site.name}.{self.slab.path}"

    @property
    def target(self) -> nn.Module | Tensor:
        target: nn.Module | Tensor = lookup(self.bound.module, self.slab.path)
        return target

    def tensors(self) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
        """Compute the new tensors of each module that changes, by name; change nothing.

        A list of modules has none: see ``shorten_``.
        """
        target = self.target
        if isinstance(target, nn.ModuleList):
            return
        if isinstance(target, nn.Module):
            for part, axis in self._projections():
                yield part, cut_features(part, axis, self.rows, self.where)
            return
        owner, name = self._owner()
        kind = nn.Parameter if name in owner._parameters else Tensor
        check_plain(target, self.where, kind=kind)
        index = sent(self.rows, target.device, torch.long)
        yield owner, {name: target.detach().index_select(int(self.slab.axis), index)}

    def dimensions(self) -> Iterator[tuple[nn.Module, dict[str, int]]]:
        """The dimension along which each tensor of a module is cut, by name."""
        target = self.target
        if isinstance(target, nn.ModuleList):
            must = "a tensor that is cut along one dimension"
            hint = "Load the model and cut it with prune_."
            raise UnsupportedModel(self.where, must, "a list of modules", hint)
        if isinstance(target, nn.Module):
            for part, axis in self._projections():
                yield part, feature_dimensions(part, axis)
            return
        owner, name = self._owner()
        yield owner, {name: int(self.slab.axis)}

    def _projections(self) -> Iterator[tuple[nn.Module, Axis]]:
        """The parts of an adapted projection, or the projection alone, with the axis."""
        assert isinstance(self.target, nn.Module)
        axis = self.slab.axis
        if axis not in ("in", "out"):
            raise UnsupportedModel(self.where, "cut along 'in' or 'out'", axis)
        for part in projections(self.target, axis, self.where):
            yield part, axis

    def _owner(self) -> tuple[nn.Module, str]:
        parent, _, name = self.slab.path.rpartition(".")
        return self.bound.module.get_submodule(parent), name

    def shorten_(self) -> None:
        """Remove all but the kept modules of a list."""
        if isinstance(self.target, nn.ModuleList):
            kept = [self.target[i] for i in self.rows]
            self.target._modules.clear()
            self.target.extend(kept)


@dataclass(frozen=True)
class _SiteCut:
    """One site that changes.

    Args:
        bound: The site.
        heads: Its kept heads, in original indices.
        geometry: Head counts and widths after the cut.
    """

    bound: BoundSite
    heads: tuple[int, ...]
    geometry: HeadGeometry


def cut_(model: nn.Module, bound: Iterable[BoundSite], mask: HeadMask) -> Undo:
    """Cut the sites to the heads that a mask keeps, in place; on an error change nothing.

    Args:
        model: The whole model, searched for parameters that are shared.
        bound: Sites to cut.
        mask: Kept heads in original indices.

    Returns:
        What puts the model back.

    Raises:
        UnsupportedModel: a projection that cannot be cut, a parameter shared with one that is not
            cut, a site that must keep a head, or what ``check_cut`` refuses.
    """
    # 1. Compute everything that is new; nothing changes yet.
    sites, cuts = _planned(model, bound, mask)
    new_tensors = _new_tensors(model, cuts)
    shortened = list(_shortened(cuts))
    shortenings = list(_offloaded_shortenings(shortened))
    undo = Undo(kept=store_shortened(unwrap(model), shortenings), shortened=shortened)
    try:
        undo.remember(unwrap(model))
        undo.hooks = undo.kept.install_()
        # 2. Put the new tensors in place.
        for cut in cuts:
            cut.shorten_()
        for owner, tensors in new_tensors:
            _install(owner, tensors)
        for cut in cuts:
            if isinstance(cut.target, nn.Module):
                recount_(cut.target)
        # 3. Adapt the modules to their heads.
        for site in sites:
            _finish_site(model, site)
        if shortenings:
            before = ((module, inside) for module, _, _, inside in undo.modules)
            check_fetched(unwrap(model), before, shortenings)
    except BaseException:
        undo.restore()
        raise
    describe_saves()
    return undo


def _finish_site(model: nn.Module, cut: _SiteCut) -> None:
    """Set the counts of a cut module, its code and its record of kept heads."""
    bound = cut.bound
    layout, module = bound.layout, bound.module
    _record(cut)
    if layout.exposed is not None:
        mix_in(module, layout.exposed)
    if layout.adapt is not None:
        layout.adapt(module, unwrap(model))
    if not cut.heads:
        _empty(bound)
    _store_kept_heads(bound, cut.heads)


def _empty(b: BoundSite) -> None:
    """Make a cut module run without heads."""
    # The layout knows how, or the package's own forward stands in for the module's.
    if callable(b.layout.empty):
        b.layout.empty(b.module)
        if b.layout.gate:
            bring_home_(b.gate)  # its bias is read, and the module not called
    else:
        mix_in(b.module, OwnCode, WITHOUT_HEADS)


def _store_kept_heads(b: BoundSite, keep: tuple[int, ...]) -> None:
    """Make a state dict show which heads the module has.

    They are stored in a buffer where the weights alone do not decide what the module computes. In
    all other cases they are in the metadata, so that a model that was built as small loads them.
    """
    ours = isinstance(b.module, MultiHeadAttention)
    # The module of a feed-forward may hold attention, which stores its own heads.
    corrected = not b.layout.is_feed_forward and any(
        isinstance(part, Mixin) for part in b.module.modules()
    )
    in_buffer = bool(keep) and (ours or corrected or not _in_state(b))
    # Accelerate would fetch the buffer from where there is none.
    if any(hook.offload_buffers for hook in offloaders(b.module)):
        in_buffer = False
    store_heads_(b.module, in_buffer)
    if not ours:
        watch_heads_(b.module)


def _in_state(b: BoundSite) -> bool:
    """Whether all that is cut is in state dicts.

    Tables may be plain attributes, or buffers that are not stored.
    """
    stored = b.module.state_dict(keep_vars=True)
    for slab in b.slabs:
        if isinstance(lookup(b.module, slab.path), Tensor) and slab.path not in stored:
            return False
    return True


def _shortened(cuts: Iterable[_Cut]) -> Iterator[Shortened]:
    """What the cuts do to single tensors; heads that are modules of a list are removed whole."""
    for cut in cuts:
        if isinstance(cut.target, nn.ModuleList):
            continue
        for owner, dimensions in cut.dimensions():
            for name, dimension in dimensions.items():
                yield Shortened(owner, name, getattr(owner, name), dimension, cut.rows)


def _offloaded_shortenings(shortened: Iterable[Shortened]) -> Iterator[Shortening]:
    """What the cuts do to tensors that accelerate offloads."""
    for s in shortened:
        if not offloaders(s.owner):
            continue
        tensor = own_tensors(s.owner).get(s.name)
        if tensor is not None and tensor.is_meta:  # a plain attribute is never offloaded
            yield OffloadedTensor(s.owner, s.name, tensor), s.dimension, s.rows


def kept_rows_of(
    model: nn.Module, bound: Iterable[BoundSite], mask: HeadMask
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Plan a cut for tensors that lie elsewhere; change nothing.

    Returns:
        By name of every tensor that ``cut_`` would shorten, the dimension and the kept positions
        along it.

    Raises:
        UnsupportedModel: as ``cut_``; also for heads that are modules of a list.
    """
    _, cuts = _planned(model, bound, mask)
    names = {id(module): name for name, module in unwrap(model).named_modules()}
    kept = {}
    for cut in cuts:
        for owner, dimensions in cut.dimensions():
            for leaf, dimension in dimensions.items():
                name = f"{names[id(owner)]}.{leaf}".removeprefix(".")
                kept[name] = (dimension, cut.rows)
    return kept


def _planned(
    model: nn.Module, bound: Iterable[BoundSite], mask: HeadMask
) -> tuple[list[_SiteCut], list[_Cut]]:
    """The sites that change, and every slab that is cut; raises what ``check_cut`` refuses."""
    sites: list[_SiteCut] = []
    cuts: list[_Cut] = []
    for b in bound:
        kept = frozenset(mask.kept(b.site.name))
        heads = b.site.check(head for head in b.site.heads if head in kept)
        if heads == b.site.heads:  # nothing to remove
            continue
        if GATES_ATTRIBUTE in b.gate.__dict__:
            hint = "Leave the hp.gated block first: its gates are for the heads that are there now."
            raise UnsupportedModel(b.site.name, "cut outside of gated blocks", "gates on it", hint)
        refused = None if heads else b.layout.refusal(b.module)
        if refused is not None:
            raise UnsupportedModel(b.site.name, refused.must, refused.got, refused.hint)
        before = b.site.geometry
        positions = b.site.positions(heads)
        sites.append(_SiteCut(b, heads, before.keep(positions)))
        cuts += [_Cut(b, slab, _rows(slab, before, positions)) for slab in b.slabs]
    check_cut(model, [(cut.bound, cut.slab.path) for cut in cuts])
    return sites, cuts


def _rows(slab: HeadSlab, geometry: HeadGeometry, positions: list[int]) -> tuple[int, ...]:
    """Indices of a slab's axis, or modules of its list, that the kept heads use.

    Args:
        slab: The slab.
        geometry: Head counts and widths before the cut.
        positions: Places of the kept heads among the present ones.
    """
    groups = used_groups(geometry, positions)
    if slab.axis == "list":
        return tuple(groups if slab.units[0] in ("key", "value", "kv_head") else positions)
    return tuple(kept_rows(geometry, slab.units, slab.packing, positions, groups))


@dataclass
class _NewParameter:
    """The parameter that takes the place of an old one, perhaps in several modules.

    Args:
        how: Axis and kept rows of the cut.
        where: The projection that it was cut in.
        value: The parameter.
        owners: Ids of the modules that hold it.
    """

    how: tuple[Any, ...]
    where: str
    value: nn.Parameter
    owners: set[int] = field(default_factory=set)


def _new_tensors(model: nn.Module, cuts: list[_Cut]) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """Compute every new tensor; shared parameters are made once.

    Raises:
        UnsupportedModel: a parameter is shared with something that is cut otherwise, or not cut.
    """
    by_old: dict[int, _NewParameter] = {}  # by id of the old parameter
    plan: dict[int, tuple[nn.Module, dict[str, Tensor]]] = {}  # by id of the module
    for cut in cuts:
        for owner, tensors in cut.tensors():
            _, planned = plan.setdefault(id(owner), (owner, {}))
            # A tensor that two slabs cut: which rows are kept would depend on the order.
            if not planned.keys().isdisjoint(tensors):
                must, got = "a projection of its own", "one shared with another slab"
                hint = "Untie the projections first, for example by a deep copy of one."
                raise UnsupportedModel(cut.where, must, got, hint)
            for name, tensor in tensors.items():
                old = getattr(owner, name)
                if isinstance(old, nn.Parameter):
                    tensor = _new_parameter(cut, owner, name, tensor, by_old)
                planned[name] = tensor
    _check_shared(model, by_old)
    return list(plan.values())


def _new_parameter(
    cut: _Cut, owner: nn.Module, name: str, tensor: Tensor, by_old: dict[int, _NewParameter]
) -> nn.Parameter:
    """The parameter for a new tensor: one that another module got already, or a new one."""
    old: nn.Parameter = getattr(owner, name)
    how = (cut.slab.axis, cut.rows)
    new = by_old.get(id(old))
    if new is None:
        value = nn.Parameter(tensor, requires_grad=old.requires_grad)
        value.__dict__.update(old.__dict__)  # attributes that a user put on the parameter
        new = by_old[id(old)] = _NewParameter(how, cut.where, value)
    elif new.how != how:
        must = f"cut as {new.where} is, with which it is shared"
        hint = "Untie them first: give one of the two a parameter of its own."
        raise UnsupportedModel(
            f"{cut.where}.{name}", must, "a cut of other rows, or of another axis", hint
        )
    new.owners.add(id(owner))
    return new.value


def _check_shared(model: nn.Module, by_old: dict[int, _NewParameter]) -> None:
    """Check that every module that holds a replaced parameter gets the new one."""
    users: dict[int, list[str]] = {}  # names of modules, by id of a parameter
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    names = {id(module): name for name, module in unwrap(model).named_modules()}
    for identity, new in by_old.items():
        cut = {names.get(owner, "") for owner in new.owners}
        beyond = sorted(set(users.get(identity, [])) - cut)
        if not beyond:
            continue
        # The same module may be in several places, under several names.
        others = set()
        for name, module in unwrap(model).named_modules(remove_duplicate=False):
            if name in beyond:
                others.add(id(module))
        if others - new.owners:
            hint = "Untie it first: give one of the two a parameter of its own."
            raise UnsupportedModel(
                "a parameter that is cut", "its own", f"one shared with {beyond}", hint
            )


def _install(owner: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put new tensors into a module: a linear layer, parameters, buffers or attributes."""
    # A linear layer also counts its features, so it installs its tensors itself.
    if "weight" in tensors and (isinstance(owner, nn.Linear) or is_conv1d(owner)):
        replace_features_(owner, tensors)
        return
    for name, tensor in tensors.items():
        home: dict[str, Any] = owner.__dict__
        if name in owner._parameters:
            home = owner._parameters
        elif name in owner._buffers:
            home = owner._buffers
        home[name] = tensor


def _record(cut: _SiteCut) -> None:
    """Update the count attributes of a cut module, and record the original heads."""
    site, layout, module = cut.bound.site, cut.bound.layout, cut.bound.module
    now = cut.geometry
    values = {
        "n_query_heads": now.n_query_heads,
        "n_kv_heads": now.n_kv_heads,
        "group_size": now.group_size or site.group_size,
        "query_width": now.n_query_heads * now.head_dim,
        "value_width": now.n_query_heads * now.value_dim,
    }
    # Functions of the layout read widths off the uncut module, so the widths are recorded.
    widths = None
    if any(map(callable, (layout.head_dim, layout.value_dim, layout.key_dim))):
        widths = (site.head_dim, site.value_dim, site.key_dim)
    # So that the model's sites are found, and saved, where nobody passes the layout again.
    own = None if is_builtin(layout) else layout
    state = HeadState(site.n_query_heads, site.n_kv_heads, cut.heads, widths, site.layout, own)
    for path, count in layout.counts:
        if lookup(module, path) is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, values[count])
    setattr(module, STATE_ATTRIBUTE, state)
