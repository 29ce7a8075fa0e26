"""Applies a plan's slabs to the tensors of a model: every new tensor is computed first, then all
are put in place.

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
from headprune.layouts._own_code import OwnCode
from headprune.model.offloaded import Away, offloaders, own_tensors
from headprune.model.offloaded_cut import Rehomed, Shortening, bring_home_, check_fetched, rehomed
from headprune.model.refusals import check_cut
from headprune.model.sites import BoundSite, lookup, unwrap
from headprune.model.transfers import copies, sent

_KEPT_BY_TORCH = frozenset(nn.Module().__dict__)


@dataclass(frozen=True)
class Shortened:
    """A tensor of a module that is cut along one dimension.

    Args:
        owner: The module.
        name: The tensor's name there.
        old: The tensor before.
        dimension: Along which.
        rows: Positions along it that stay.
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
    """Everything that a model's modules hold, to be put back as it was; of tensors, the numbers of
    those that are kept. Of a cut, also what was shortened."""

    modules: list[tuple[nn.Module, type, dict[str, Any], dict[str, Any]]] = field(
        default_factory=list
    )
    parameters: list[tuple[nn.Parameter, bool, Tensor | None]] = field(default_factory=list)
    numbers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    hooks: list[tuple[Any, Mapping[str, Tensor]]] = field(default_factory=list)
    kept: Rehomed = field(default_factory=Rehomed)
    shortened: list[Shortened] = field(default_factory=list)

    def remember(self, module: nn.Module) -> None:
        """Notes tensors, attributes, children, hooks, mode and class of a module and of those in
        it; call before any change."""
        for part in module.modules():
            held = dict(part.__dict__)
            # Tensors, children and hooks lie in mappings of torch's own, to which handles refer.
            inside = {name: copy(value) for name, value in held.items() if name in _KEPT_BY_TORCH}
            self.modules.append((part, type(part), held, inside))
        self.parameters += [(p, p.requires_grad, p.grad) for p in module.parameters()]

    def keep(self, *tensors: Tensor) -> None:
        """Notes the numbers of tensors; call before they are changed in place. What is changed
        together should be given
        together: whether there is room on the device is asked for all of it (``copies``)."""
        self.numbers += zip(tensors, copies(tensors), strict=True)

    def restore(self) -> None:
        """Puts everything back."""
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
    """One slab of one site, with the positions that stay."""

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
        """The modules whose tensors change, each with its new tensors by name; nothing is changed.
        A list of modules has none: see ``shorten_``."""
        if isinstance(self.target, nn.ModuleList):
            return
        if isinstance(self.target, nn.Module):
            for part, axis in self._projections():
                yield part, cut_features(part, axis, self.rows, self.where)
            return
        owner, name = self._owner()
        check_plain(
            self.target, self.where, kind=nn.Parameter if name in owner._parameters else Tensor
        )
        index = sent(self.rows, self.target.device, torch.long)
        yield owner, {name: self.target.detach().index_select(int(self.slab.axis), index)}

    def dimensions(self) -> Iterator[tuple[nn.Module, dict[str, int]]]:
        """The modules whose tensors change, each with the dimension of its tensors that is cut, by
        name."""
        if isinstance(self.target, nn.ModuleList):
            hint = "Load the model and cut it with prune_."
            raise UnsupportedModel(
                self.where, "a tensor that is cut along one dimension", "a list of modules", hint
            )
        if isinstance(self.target, nn.Module):
            yield from (
                (part, feature_dimensions(part, axis)) for part, axis in self._projections()
            )
            return
        owner, name = self._owner()
        yield owner, {name: int(self.slab.axis)}

    def _projections(self) -> Iterator[tuple[nn.Module, Axis]]:
        assert isinstance(self.target, nn.Module)
        axis = self.slab.axis
        if axis not in ("in", "out"):
            raise UnsupportedModel(self.where, "cut along 'in' or 'out'", axis)
        yield from ((part, axis) for part in projections(self.target, axis, self.where))

    def _owner(self) -> tuple[nn.Module, str]:
        parent, _, name = self.slab.path.rpartition(".")
        return self.bound.module.get_submodule(parent), name

    def shorten_(self) -> None:
        """Keeps the kept modules of a list."""
        if isinstance(self.target, nn.ModuleList):
            kept = [self.target[i] for i in self.rows]
            self.target._modules.clear()
            self.target.extend(kept)


def cut_(model: nn.Module, bound: Iterable[BoundSite], mask: HeadMask) -> Undo:
    """Cuts the sites to the heads that ``mask`` keeps, in place; all of them or, on an error, none.

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
    work, cuts = _planned(bound, mask)
    check_cut(model, [(c.bound, c.slab.path) for c in cuts])
    plan = _new_tensors(model, cuts)
    shortened = list(_shortened(cuts))
    shortenings = list(_shortenings(shortened))
    undo = Undo(kept=rehomed(unwrap(model), shortenings), shortened=shortened)
    try:
        undo.remember(unwrap(model))
        undo.hooks = undo.kept.install_()
        for cut in cuts:
            cut.shorten_()
        for owner, tensors in plan:
            _install(owner, tensors)
        for cut in cuts:
            if isinstance(cut.target, nn.Module):
                recount_(cut.target)
        for b, keep, now in work:
            _mark(b, keep, now)
            if b.layout.exposed is not None:
                mix_in(b.module, b.layout.exposed)
            if b.layout.adapt is not None:
                b.layout.adapt(b.module, unwrap(model))
            if not keep:
                _empty(b)
            _say_heads(b, keep)
        if shortenings:
            check_fetched(
                unwrap(model),
                ((module, inside) for module, _, _, inside in undo.modules),
                shortenings,
            )
    except BaseException:
        undo.restore()
        raise
    return undo


def _empty(b: BoundSite) -> None:
    """Makes a cut module run without heads."""
    if callable(b.layout.empty):
        b.layout.empty(b.module)
        if b.layout.gate:
            bring_home_(b.gate)  # its bias is read, and the module not called
    else:
        mix_in(b.module, OwnCode, WITHOUT_HEADS)


def _say_heads(b: BoundSite, keep: tuple[int, ...]) -> None:
    """Makes a state dict say which heads the module has: in a buffer, where its weights alone do
    not decide what it computes; in the metadata otherwise, so that a model that was built as small
    takes them."""
    ours = isinstance(b.module, MultiHeadAttention)
    corrected = any(isinstance(part, Mixin) for part in b.module.modules())
    fetched = any(
        hook.offload_buffers for hook in offloaders(b.module)
    )  # from where there is no such buffer
    store_heads_(b.module, bool(keep) and (ours or corrected or not _in_state(b)) and not fetched)
    if not ours:
        watch_heads_(b.module)


def _in_state(b: BoundSite) -> bool:
    """Whether all that is cut is in state dicts: tables may be plain attributes, or buffers that
    are not stored."""
    stored = b.module.state_dict(keep_vars=True)
    tables = [slab.path for slab in b.slabs if isinstance(lookup(b.module, slab.path), Tensor)]
    return all(path in stored for path in tables)


def _shortened(cuts: Iterable[_Cut]) -> Iterator[Shortened]:
    """What the cuts do to single tensors; heads that are modules of a list leave whole."""
    for cut in cuts:
        for owner, dimensions in () if isinstance(cut.target, nn.ModuleList) else cut.dimensions():
            for name, dimension in dimensions.items():
                yield Shortened(owner, name, getattr(owner, name), dimension, cut.rows)


def _shortenings(shortened: Iterable[Shortened]) -> Iterator[Shortening]:
    """What the cuts do to tensors that accelerate offloads."""
    for s in shortened:
        tensor = own_tensors(s.owner).get(s.name) if offloaders(s.owner) else None
        if tensor is not None and tensor.is_meta:  # not a plain attribute, which stays where it is
            yield Away(s.owner, s.name, tensor), s.dimension, s.rows


def kept_rows_of(
    model: nn.Module, bound: Iterable[BoundSite], mask: HeadMask
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """What ``cut_`` would do, for tensors that lie elsewhere; nothing is changed.

    Returns:
        By name of every tensor that a cut shortens, the dimension and the positions along it that
        stay.

    Raises:
        UnsupportedModel: as ``cut_``; also for heads that are modules of a list.
    """
    cuts = _planned(bound, mask)[1]
    check_cut(model, [(c.bound, c.slab.path) for c in cuts])
    names = {id(module): name for name, module in unwrap(model).named_modules()}
    return {
        f"{names[id(owner)]}.{name}".removeprefix("."): (dimension, cut.rows)
        for cut in cuts
        for owner, dimensions in cut.dimensions()
        for name, dimension in dimensions.items()
    }


def _planned(
    bound: Iterable[BoundSite], mask: HeadMask
) -> tuple[list[tuple[BoundSite, tuple[int, ...], HeadGeometry]], list[_Cut]]:
    """The sites that change, with their heads and geometry afterwards; and every slab that is
    cut."""
    work: list[tuple[BoundSite, tuple[int, ...], HeadGeometry]] = []
    cuts: list[_Cut] = []
    for b in bound:
        keep = b.site.check(h for h in b.site.heads if h in mask.kept(b.site.name))
        if keep == b.site.heads:
            continue
        if GATES_ATTRIBUTE in b.gate.__dict__:
            hint = "Leave the hp.gated block first: its gates are for the heads that are there now."
            raise UnsupportedModel(b.site.name, "cut outside of gated blocks", "gates on it", hint)
        refused = None if keep else b.layout.refusal(b.module)
        if refused is not None:
            raise UnsupportedModel(b.site.name, refused.must, refused.got, refused.hint)
        before, positions = b.site.geometry, [b.site.heads.index(h) for h in keep]
        work.append((b, keep, before.keep(positions)))
        cuts += [_Cut(b, s, _rows(s, before, positions)) for s in b.slabs]
    return work, cuts


def _rows(slab: HeadSlab, geometry: HeadGeometry, positions: list[int]) -> tuple[int, ...]:
    """The indices of a slab's axis that stay with the heads at these positions; of a list, the
    modules."""
    groups = used_groups(geometry, positions)
    if slab.axis == "list":
        return tuple(groups if slab.units[0] in ("key", "value", "kv_head") else positions)
    return tuple(kept_rows(geometry, slab.units, slab.packing, positions, groups))


def _new_tensors(model: nn.Module, cuts: list[_Cut]) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """Every new tensor, with shared parameters made once; checks that no parameter is shared beyond
    the cuts."""
    references: dict[int, list[str]] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        references.setdefault(id(parameter), []).append(name)
    names = {id(m): n for n, m in unwrap(model).named_modules()}
    made: dict[int, tuple[tuple[Any, ...], Tensor, set[int]]] = {}
    plan: dict[int, tuple[nn.Module, dict[str, Tensor]]] = {}
    for cut, owner, tensors in [(c, *made) for c in cuts for made in c.tensors()]:
        planned = plan.setdefault(id(owner), (owner, {}))[1]
        if not planned.keys().isdisjoint(tensors):
            hint = "Untie the projections first, for example by a deep copy of one."
            raise UnsupportedModel(
                cut.where, "a projection of its own", "one shared with another slab", hint
            )
        for name, tensor in tensors.items():
            old = getattr(owner, name)
            key = (cut.slab.axis, cut.rows)
            if isinstance(old, nn.Parameter):
                before = made.get(id(old))
                if before is not None and before[0] != key:
                    raise UnsupportedModel(
                        f"{cut.where}.{name}", "cut in one way", "shared and cut in two ways"
                    )
                new = before[1] if before else nn.Parameter(tensor, requires_grad=old.requires_grad)
                if before is None:
                    new.__dict__.update(old.__dict__)
                tensors[name] = new
                made[id(old)] = (key, new, (before[2] if before else set()) | {id(owner)})
        planned.update(tensors)
    for identity, (_, _, owners) in made.items():
        used = {n.rpartition(".")[0] for n in references.get(identity, [])}
        beyond = sorted(used - {names.get(o, "") for o in owners})
        aliases = {
            id(m) for n, m in unwrap(model).named_modules(remove_duplicate=False) if n in beyond
        }
        if aliases - owners:
            hint = "Untie it first: give one of the two a parameter of its own."
            raise UnsupportedModel(
                "a parameter of the attention", "its own", f"one shared with {beyond}", hint
            )
    return list(plan.values())


def _install(owner: nn.Module, tensors: dict[str, Tensor]) -> None:
    if "weight" in tensors and (isinstance(owner, nn.Linear) or is_conv1d(owner)):
        replace_features_(owner, tensors)
        return
    for name, tensor in tensors.items():
        homes: list[dict[str, Any]] = [owner._parameters, owner._buffers]
        next((home for home in homes if name in home), owner.__dict__)[name] = tensor


def _mark(bound: BoundSite, keep: tuple[int, ...], now: HeadGeometry) -> None:
    """Keeps the count attributes true and remembers the original heads."""
    site, module = bound.site, bound.module
    values = {
        "n_query_heads": now.n_query_heads,
        "n_kv_heads": now.n_kv_heads,
        "group_size": now.group_size or site.group_size,
        "query_width": now.n_query_heads * now.head_dim,
        "value_width": now.n_query_heads * now.value_dim,
    }
    known = any(
        callable(w) for w in (bound.layout.head_dim, bound.layout.value_dim, bound.layout.key_dim)
    )
    given = (site.head_dim, site.value_dim, site.key_dim) if known else None  # of the uncut module
    state = HeadState(site.n_query_heads, site.n_kv_heads, keep, given, site.layout)
    for path, count in bound.layout.counts:
        if lookup(module, path) is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, values[count])
    setattr(module, STATE_ATTRIBUTE, state)
