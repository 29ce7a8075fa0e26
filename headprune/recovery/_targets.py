"""Finds what a layer-wise recovery refits: output projections of attention and of feed-forwards,
in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.attention.linear import feature_count, is_conv1d
from headprune.core.errors import HeadPruneError, InvalidValue, UnsupportedModel
from headprune.core.heads import Kind
from headprune.core.slabs import rows_by_head as columns_by_head
from headprune.model.contexts import counted, kind_of_queries, rows_of, tokens_first
from headprune.model.padding import PaddingInfo, query_mask
from headprune.model.refusals import check_unshared
from headprune.model.running import batch_size, device_of, to_device
from headprune.model.sites import BoundSite
from headprune.recovery._follow import FollowedCall, follow

#: A site of the model and the same site of the teacher.
SitePair: TypeAlias = tuple[BoundSite, BoundSite]
#: Runs a model on a batch.
RunBatch: TypeAlias = Callable[[nn.Module, Any], Any]
#: The calls in one pass by the number of the projection, in the order of the first calls.
CallsByNumber: TypeAlias = dict[int, list[FollowedCall]]

_PARAMETERS = ("weight", "bias")
#: Names in a note.
_MAX_LISTED = 4


@dataclass(frozen=True)
class Target:
    """An output projection and its counterpart in the teacher.

    Args:
        name: Qualified name of the projection.
        module: The model's projection.
        teacher_module: The teacher's.
        kind: Kind of its queries, which determines their padding.
        bound: The site, an attention or a feed-forward; None for a feed-forward that is no site.
        removed: Heads or neurons that the teacher has and the model lacks.
        summed: Whether both models add its output to activations. If not, the outputs themselves
            are compared.
        tokens_first: Whether a feed-forward's states have the tokens before the examples.
    """

    name: str
    module: nn.Module
    teacher_module: nn.Module
    kind: Kind = "self"
    bound: BoundSite | None = None
    removed: tuple[int, ...] = ()
    summed: bool = True
    tokens_first: bool = False

    @property
    def heads(self) -> list[list[int]]:
        """The columns of the projection's input by kept head."""
        assert self.bound is not None
        site, layout = self.bound.site, self.bound.layout
        slab = next(slab for slab in layout.slabs if slab.path == layout.gate)
        # The same function gives rows of weights and columns of activations.
        return columns_by_head(site.geometry, slab.units, slab.packing, "context")

    @property
    def weight(self) -> Tensor:
        """The model's weight as ``[out, in]``."""
        return _weight_of(self.module)

    @property
    def teacher_weight(self) -> Tensor:
        """The teacher's weight as ``[out, in]``."""
        return _weight_of(self.teacher_module)

    def tokens(self, x: Tensor, batch: Any) -> Tensor:
        """Flatten the projection's input or output to ``[tokens, width]``."""
        if self.bound is None:
            return x.flatten(0, -2)
        return rows_of(self.bound, x, batch).flatten(0, 1)

    def examples(self, x: Tensor, batch: Any, size: int) -> Tensor:
        """Return which example each row of ``tokens(x)`` belongs to.

        The first axis counts as the examples, or as parts of them that follow one another. If it
        is no multiple of ``size``, each of its places counts as an example.

        Args:
            x: The projection's input or output.
            batch: The batch.
            size: Number of examples in the batch.

        Returns:
            ``[tokens]``, in main memory.
        """
        if self.bound is not None:
            n_rows, n_tokens = rows_of(self.bound, x, batch).shape[:2]
        elif x.ndim != 3:
            # Tokens without an axis of examples.
            n_rows, n_tokens = x.shape[:-1].numel(), 1
        elif self.tokens_first or x.shape[0] != size == x.shape[1]:
            # [tokens, examples, width]: the examples alternate.
            return _example_of_each(x.shape[1], size).repeat(x.shape[0])
        else:
            # [examples, tokens, width]
            n_rows, n_tokens = x.shape[:2]
        return _example_of_each(n_rows, size).repeat_interleave(n_tokens)

    def counted(self, model: nn.Module, x: Tensor, padding_info: PaddingInfo) -> Tensor | None:
        """Return which tokens are no padding.

        Returns:
            ``[tokens]``; None if nothing is known about padding.
        """
        if self.bound is not None:
            rows = rows_of(self.bound, x, padding_info.batch)
            mask = counted(model, self.bound, rows, padding_info)
        else:
            mask = self._feed_forward_mask(model, x, padding_info)
        return None if mask is None else mask.reshape(-1).to(x.device)

    def _feed_forward_mask(
        self, model: nn.Module, x: Tensor, padding_info: PaddingInfo
    ) -> Tensor | None:
        """Return the mask of a feed-forward's tokens in the order of ``x``."""

        def mask_of(shape: tuple[int, int]) -> Tensor | None:
            return query_mask(model, self.kind, padding_info, shape)

        if x.ndim != 3:
            # All axes but the last may be flattened, with the examples first.
            n_rows, n_examples = x.shape[:-1].numel(), batch_size(padding_info.batch)
            if n_rows % n_examples:
                return None
            return mask_of((n_examples, n_rows // n_examples))
        if not self.tokens_first:
            mask = mask_of((x.shape[0], x.shape[1]))
            if mask is not None:
                return mask
        # [tokens, examples, width]
        mask = mask_of((x.shape[1], x.shape[0]))
        return None if mask is None else mask.T


def _weight_of(module: nn.Module) -> Tensor:
    """Return a projection's weight as ``[out, in]``."""
    weight = module.get_parameter("weight").detach()
    # Conv1D keeps [in, out].
    return weight if isinstance(module, nn.Linear) else weight.T


def modules_of(targets: Iterable[Target]) -> list[nn.Module]:
    """Return the model's projections."""
    return [target.module for target in targets]


def teacher_modules_of(targets: Iterable[Target]) -> list[nn.Module]:
    """Return the teacher's projections."""
    return [target.teacher_module for target in targets]


def _example_of_each(n_rows: int, size: int) -> Tensor:
    """Return which of ``size`` examples each row belongs to, ``[rows]``."""
    rows = torch.arange(n_rows)
    return rows // (n_rows // size) if n_rows % size == 0 else rows


@dataclass(frozen=True)
class TargetList:
    """The targets in the order of the network, and notes for the user about the other layers."""

    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()


def sites_as_targets(pairs: Iterable[SitePair]) -> list[Target]:
    """Return the output projection of every site, attention or feed-forward, each once."""
    # By identity of the module: several sites may share one projection.
    targets: dict[int, Target] = {}
    for ours, theirs in pairs:
        present = frozenset(ours.site.heads)
        removed = tuple(head for head in theirs.site.heads if head not in present)
        if ours.layout.gate:
            name = f"{ours.site.name}.{ours.layout.gate}".lstrip(".")
            target = Target(name, ours.gate, theirs.gate, kind_of_queries(ours), ours, removed)
            targets.setdefault(id(ours.gate), target)
        elif removed:
            must = "an attention with an output projection"
            raise UnsupportedModel(ours.site.name, must, "one without")
    return list(targets.values())


def counts_by_kind(removed: Iterable[tuple[Target, Sequence[int]]]) -> dict[str, int]:
    """Return how many heads and, where there are any, neurons the projections lost.

    Args:
        removed: Projections, each with its removed heads or neurons.
    """
    counts = {"heads": 0}
    for target, numbers in removed:
        is_feed_forward = target.bound is not None and target.bound.layout.is_feed_forward
        kind = "neurons" if is_feed_forward else "heads"
        counts[kind] = counts.get(kind, 0) + len(numbers)
    return counts


def without_columns(targets: Iterable[Target]) -> list[Target]:
    """Return the targets whose heads were all removed.

    Other code may add their biases without calling them, so only a bias shows that they ran.
    """
    return [t for t in targets if t.removed and not feature_count(t.module, "in", t.name)]


def find_targets(
    model: nn.Module,
    teacher: nn.Module,
    pairs: Sequence[SitePair],
    batch: Any,
    run: RunBatch,
    feed_forward: bool = False,
    refit: bool = True,
) -> TargetList:
    """Find the projections from the first one on that was cut, by one pass of each model.

    Args:
        model: The model.
        teacher: Its teacher.
        pairs: Sites of both; one of the model's is cut.
        batch: The batch of the passes.
        run: Runs a model on a batch.
        feed_forward: Whether to include feed-forwards that are no sites, which lost no neurons.
        refit: Whether they are to be changed, not only compared.

    Raises:
        UnsupportedModel: a projection that is no plain linear layer, that shares its parameters
            with another module, or that was cut and does not run.
    """
    # 1. Candidates: output projections of the sites and, if wanted, all other linear layers.
    of_sites = sites_as_targets(pairs)
    candidates = list(of_sites)
    narrower: list[str] = []
    if feed_forward:
        linear, narrower = _linear_layers(model, teacher, pairs)
        candidates += linear

    # 2. One pass of each model shows which of them run, in which order, and what is added.
    model_calls = _calls_of(model, modules_of(candidates), batch, run)
    teacher_calls = _calls_of(teacher, teacher_modules_of(candidates), batch, run)
    _check_reached(model, of_sites, model_calls, teacher_calls)
    running: list[Target] = []
    widths: list[set[int]] = []  # of the outputs
    for number, calls in model_calls.items():
        if number in teacher_calls:
            both = calls + teacher_calls[number]
            running.append(replace(candidates[number], summed=all(c.added for c in both)))
            widths.append({c.output.shape[-1] for c in both})

    # 3. Choose those from the first site on that was cut.
    chosen, unchanged = _chosen(model, running, widths)
    if refit:
        _check_own(model, teacher, chosen)
    return TargetList(tuple(chosen), _notes(chosen, unchanged, narrower, feed_forward))


def _chosen(
    model: nn.Module, running: Sequence[Target], widths: Sequence[set[int]]
) -> tuple[list[Target], list[str]]:
    """Return the targets, and the names and reasons of feed-forwards that cannot be refitted.

    A linear layer counts as a feed-forward's output projection if its output has the model's
    width and is added to activations.
    """
    first = next(number for number, target in enumerate(running) if target.removed)
    kind, tokens_come_first = running[first].kind, False
    width: set[int] = {0}
    chosen: list[Target] = []
    unchanged: list[str] = []
    for number, (target, own_width) in enumerate(zip(running, widths, strict=True)):
        if target.bound is not None:
            # The feed-forward after it has the same queries, token order and width.
            kind, tokens_come_first = target.kind, tokens_first(target.bound)
            width = own_width
            if number >= first:
                chosen.append(target)
        elif number > first and target.summed and own_width == width:
            reason = _reason_against(model, target)
            if reason:
                # Not an error: the attentions can be refitted without it.
                unchanged.append(f"{target.name} ({reason})")
            else:
                chosen.append(replace(target, kind=kind, tokens_first=tokens_come_first))
    return chosen, unchanged


def _linear_layers(
    model: nn.Module, teacher: nn.Module, pairs: Sequence[SitePair]
) -> tuple[list[Target], list[str]]:
    """Return the linear layers outside of the sites that the teacher has in the same shape.

    Returns:
        The layers, and the names of those that read fewer channels than the teacher's.
    """
    inside: set[int] = set()
    for ours, _ in pairs:
        inside.update(map(id, ours.module.modules()))
    teacher_modules = dict(teacher.named_modules())
    targets = []
    narrower = []
    for name, module in model.named_modules():
        other = teacher_modules.get(name)
        if other is None or id(module) in inside:
            continue
        if not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        weight = module._parameters.get("weight")
        other_weight = other._parameters.get("weight")
        # Quantized weights are no plain parameters, and cannot be added to.
        if type(weight) is not nn.Parameter or type(other_weight) is not nn.Parameter:
            continue
        target = Target(name, module, other)
        if weight.shape == other_weight.shape:
            targets.append(target)
        elif target.weight.shape[0] == target.teacher_weight.shape[0]:
            narrower.append(name)
    return targets, narrower


def _calls_of(
    model: nn.Module, projections: Sequence[nn.Module], batch: Any, run: RunBatch
) -> CallsByNumber:
    """Run one pass and return the calls of these projections."""
    batch = to_device(batch, device_of(model))
    calls: CallsByNumber = {}
    for call in follow(lambda: run(model, batch), dict(enumerate(projections))):
        calls.setdefault(call.number, []).append(call)
    return calls


def _check_reached(
    model: nn.Module,
    targets: Sequence[Target],
    model_calls: CallsByNumber,
    teacher_calls: CallsByNumber,
) -> None:
    """Refuse a projection that was cut and does not run as often as the teacher's."""
    for number, target in enumerate(targets):
        ours = len(model_calls.get(number, ()))
        theirs = len(teacher_calls.get(number, ()))
        if target.removed and (not ours or ours != theirs):
            must = f"run in a pass of {type(model).__name__}, as often as the teacher's"
            got = f"{ours} runs, and {theirs} of the teacher's"
            raise UnsupportedModel(target.name, must, got)


def _reason_against(model: nn.Module, target: Target) -> str:
    """Return why a feed-forward's projection cannot be refitted; empty if it can."""
    try:
        feature_count(target.module, "in", target.name)
        check_own_parameters(model, target)
    except HeadPruneError as error:
        return f"is {error.got}"
    return ""


def _check_own(model: nn.Module, teacher: nn.Module, targets: Sequence[Target]) -> None:
    """Refuse targets that are no plain linear layers or share parameters."""
    check_unshared(model, [(t.bound, t.bound.layout.gate) for t in targets if t.bound is not None])
    for target in targets:
        feature_count(target.module, "in", target.name)
        feature_count(target.teacher_module, "in", target.name)
        check_own_parameters(model, target)
    check_apart(teacher, targets)


def check_own_parameters(
    model: nn.Module, target: Target, names: Sequence[str] = _PARAMETERS
) -> None:
    """Refuse a projection whose parameters belong to another module too.

    Raises:
        UnsupportedModel: the other module would change with the projection.
    """
    for name in names:
        parameter = target.module._parameters.get(name)
        if parameter is None:
            continue
        owners = []
        for owner, module in model.named_modules():
            if id(parameter) in map(id, module._parameters.values()):
                owners.append(owner)
        if len(owners) > 1:
            must = "used by one projection only"
            hint = f"Give each of them a {name} of its own first."
            raise UnsupportedModel(f"{target.name}.{name}", must, f"shared by {owners}", hint)


def check_apart(
    teacher: nn.Module, targets: Iterable[Target], names: Sequence[str] = _PARAMETERS
) -> None:
    """Refuse parameters that the teacher has too: it would change with the model.

    Raises:
        InvalidValue: model and teacher share a parameter.
    """
    teacher_parameters = set(map(id, teacher.parameters()))
    for target in targets:
        own = [id(target.module._parameters.get(name)) for name in names]
        if not teacher_parameters.isdisjoint(own):
            must = f"a model with its own parameters at {target.name}"
            hint = "Keep a teacher of its own before you cut: teacher = copy.deepcopy(model)."
            raise InvalidValue("teacher", must, "one that shares them", hint)


def _notes(
    targets: Sequence[Target],
    unchanged: Sequence[str],
    narrower: Sequence[str],
    feed_forward: bool,
) -> tuple[str, ...]:
    """Return notes on targets without an addition and on layers that are not refitted.

    Args:
        targets: What is refitted.
        unchanged: Names and reasons of feed-forwards that cannot be refitted.
        narrower: Names of layers outside of the sites that lost inputs.
        feed_forward: Whether feed-forwards were to be refitted.
    """
    notes = []
    apart = [target.name for target in targets if not target.summed]
    if apart:
        notes.append(
            f"{_listed(apart)}: compared with the teacher's at the projection's output, because"
            " another operation comes before the residual addition."
        )
    alone = _without_feed_forward(targets) if feed_forward else []
    if narrower:
        notes.append(
            f"Not refitted: {_listed(narrower)}. Neurons were removed there, but `sites` does not"
            " name them. Give sites=hp.find_sites(model, feed_forward=True)."
        )
    elif alone:
        why = "no plain linear layer that is added to the stream was found there"
        notes.append(f"No feed-forward refitted after {_listed(alone)}: {why}.")
    if unchanged:
        notes.append(f"Not refitted: {_listed(unchanged)}.")
    return tuple(notes)


def _without_feed_forward(targets: Sequence[Target]) -> list[str]:
    """Return the attentions that no refitted feed-forward follows in their layer.

    Cross-attention belongs to the layer of the attention before it.
    """
    alone: list[str] = []
    current_layer: list[str] = []
    for target in targets:
        if target.bound is None or target.bound.site.is_feed_forward:
            current_layer = []
        elif target.kind == "cross":
            current_layer.append(target.name)
        else:
            alone += current_layer
            current_layer = [target.name]
    return alone + current_layer


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_MAX_LISTED])
    more = len(names) - _MAX_LISTED
    return f"{listed} and {more} more" if more > 0 else listed


def check_as_often(
    target: Target, model_calls: Sequence[Any], teacher_calls: Sequence[Any]
) -> None:
    """Refuse a projection that model and teacher did not call equally often.

    Raises:
        UnsupportedModel: they did not, or neither called it.
    """
    if len(model_calls) != len(teacher_calls) or not model_calls:
        got = f"{len(model_calls)} runs, and {len(teacher_calls)} of the teacher's"
        raise UnsupportedModel(target.name, "run as often as the teacher's on every batch", got)
