"""What a layer-wise recovery refits: output projections of attention, and of feed-forwards, in the
order they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.linear import feature_count, is_conv1d
from headprune.core.errors import HeadPruneError, InvalidValue, UnsupportedModel
from headprune.core.heads import Kind
from headprune.core.slabs import rows_of as columns_of
from headprune.model.contexts import counted, rows_of, tokens_first
from headprune.model.padding import PaddingInfo, query_mask
from headprune.model.refusals import check_unshared
from headprune.model.running import batch_size, device_of, to_device
from headprune.model.sites import BoundSite
from headprune.recovery._follow import Trail, follow

Pair = tuple[BoundSite, BoundSite]
Run = Callable[[nn.Module, Any], Any]

_LISTED = 4  # names in a note


@dataclass(frozen=True)
class Target:
    """An output projection and its counterpart in the teacher.

    Args:
        name: Of the projection.
        ours: The model's.
        theirs: The teacher's.
        kind: What its queries are, which tells their padding.
        bound: The site; None for a feed-forward.
        gone: Heads that the teacher has and the model lacks.
        summed: Whether what it is added to was found, in both models; else its own outputs are
            compared.
        tokens_first: Whether a feed-forward's states have the tokens before the examples.
    """

    name: str
    ours: nn.Module
    theirs: nn.Module
    kind: Kind = "self"
    bound: BoundSite | None = None
    gone: tuple[int, ...] = ()
    summed: bool = True
    tokens_first: bool = False

    @property
    def heads(self) -> list[list[int]]:
        """The columns of every head that is left."""
        assert self.bound is not None
        site, slab = (
            self.bound.site,
            next(s for s in self.bound.layout.slabs if s.path == self.bound.layout.gate),
        )
        heads = range(len(site.heads))
        return [columns_of(site.geometry, slab.units, slab.packing, "context", [h]) for h in heads]

    @property
    def weight(self) -> Tensor:
        """``[out, in]``."""
        weight = self.ours.get_parameter("weight").detach()
        return weight if isinstance(self.ours, nn.Linear) else weight.T  # Conv1D keeps [in, out]

    def tokens(self, x: Tensor, batch: Any) -> Tensor:
        """``[tokens, width]`` of what the projection reads or of what has the order of its
        output."""
        return (
            x.flatten(0, -2) if self.bound is None else rows_of(self.bound, x, batch).flatten(0, 1)
        )

    def examples(self, x: Tensor, batch: Any, size: int) -> Tensor:
        """``[tokens]``, in main memory: which of ``size`` examples a row of ``tokens(x)`` is of.

        The first axis is taken for the examples, or for parts of them that follow one another;
        where it is not a multiple of their number, each of its places stands for itself.
        """
        if self.bound is not None:
            rows, each = rows_of(self.bound, x, batch).shape[:2]
        elif x.ndim == 3 and (self.tokens_first or x.shape[0] != size == x.shape[1]):
            return _spread(x.shape[1], size).repeat(x.shape[0])
        else:
            rows, each = (x.shape[0], x.shape[1]) if x.ndim == 3 else (x.shape[:-1].numel(), 1)
        return _spread(rows, size).repeat_interleave(each)

    def counted(self, model: nn.Module, x: Tensor, told: PaddingInfo) -> Tensor | None:
        """``[tokens]``: True where a token is no padding; None where nothing is known."""
        if self.bound is not None:
            mask = counted(model, self.bound, rows_of(self.bound, x, told.batch), told)
        elif x.ndim == 3:
            mask = (
                None
                if self.tokens_first
                else query_mask(model, self.kind, told, (x.shape[0], x.shape[1]))
            )
            if mask is None:
                mask = query_mask(model, self.kind, told, (x.shape[1], x.shape[0]))
                mask = None if mask is None else mask.T
        else:
            rows, examples = x.shape[:-1].numel(), batch_size(told.batch)
            mask = (
                None
                if rows % examples
                else query_mask(model, self.kind, told, (examples, rows // examples))
            )
        return None if mask is None else mask.reshape(-1).to(x.device)


def _spread(rows: int, size: int) -> Tensor:
    """``[rows]``: which example each is of."""
    return torch.arange(rows) // (rows // size) if rows % size == 0 else torch.arange(rows)


@dataclass(frozen=True)
class Found:
    """What is to be refitted, in the order of the network, and what a user should know about the
    rest."""

    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()


def sites_as_targets(pairs: Iterable[Pair]) -> list[Target]:
    """Every output projection of attention once."""
    targets: dict[int, Target] = {}
    for ours, theirs in pairs:
        gone = tuple(h for h in theirs.site.heads if h not in ours.site.heads)
        if not ours.layout.gate:
            if gone:
                raise UnsupportedModel(
                    ours.site.name, "an attention with an output projection", "one without"
                )
            continue
        name = f"{ours.site.name}.{ours.layout.gate}".lstrip(".")
        targets.setdefault(
            id(ours.gate), Target(name, ours.gate, theirs.gate, ours.site.kind, ours, gone)
        )
    return list(targets.values())


def without_columns(targets: Iterable[Target]) -> list[Target]:
    """Those whose last heads have left: other code may add their biases, and is seen by that
    alone."""
    return [t for t in targets if t.gone and not feature_count(t.ours, "in", t.name)]


def find(
    model: nn.Module,
    teacher: nn.Module,
    pairs: Sequence[Pair],
    batch: Any,
    run: Run,
    feed_forward: bool = False,
    refit: bool = True,
) -> Found:
    """The projections from the first one on that lost heads, told by one pass of each model.

    Args:
        model: The model.
        teacher: Its teacher.
        pairs: Sites of both; one of the model's has lost heads.
        batch: For the passes.
        run: Runs a model on a batch.
        feed_forward: Those of feed-forwards too.
        refit: Whether they are to be changed; else they are only looked at.

    Raises:
        UnsupportedModel: a projection that is no plain one, that shares its parameters with another
            module, or that lost heads and does not run.
    """
    targets = sites_as_targets(pairs)
    extra = _linear(model, teacher, pairs) if feed_forward else []
    everything = [*targets, *extra]
    seen = [
        _dry_run(m, everything, own, batch, run)
        for m, own in ((model, "ours"), (teacher, "theirs"))
    ]
    _check_reached(model, targets, seen)
    order = list(dict.fromkeys(t.number for t in seen[0]))
    known = [_as_seen(everything[n], n, seen) for n in order if any(t.number == n for t in seen[1])]
    first = next(i for i, t in enumerate(known) if t.gone)
    kind, turned, width = known[first].kind, False, 0
    chosen, left = [], []
    for i, target in enumerate(known):
        if target.bound is not None:
            turned = tokens_first(target.bound)
            kind, width = target.kind, _calls(target, everything, seen)[0].output.shape[-1]
            if i >= first:
                chosen.append(target)
        elif i > first and _adds(target, everything, seen, width):
            reason = _unfit(model, target)
            if reason:
                left.append(f"{target.name} ({reason})")
            else:
                chosen.append(replace(target, kind=kind, tokens_first=turned))
    if refit:
        _check_own(model, teacher, chosen)
    return Found(tuple(chosen), _notes(chosen, left, feed_forward))


def _linear(model: nn.Module, teacher: nn.Module, pairs: Sequence[Pair]) -> list[Target]:
    """Every plain linear layer outside of the attentions, with the teacher's of the same name and
    shape."""
    inside = {id(m) for ours, _ in pairs for m in ours.module.modules()}
    named = dict(teacher.named_modules())
    targets = []
    for name, module in model.named_modules():
        other = named.get(name)
        if id(module) in inside or not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        weight = module._parameters.get("weight")
        theirs = None if other is None else other._parameters.get("weight")
        if (
            other is not None
            and type(weight) is type(theirs) is nn.Parameter
            and weight.shape == theirs.shape
        ):
            targets.append(Target(name, module, other))
    return targets


def _dry_run(
    model: nn.Module, targets: Sequence[Target], side: str, batch: Any, run: Run
) -> list[Trail]:
    batch = to_device(batch, device_of(model))
    return follow(lambda: run(model, batch), {n: getattr(t, side) for n, t in enumerate(targets)})


def _check_reached(
    model: nn.Module, targets: Sequence[Target], seen: Sequence[Sequence[Trail]]
) -> None:
    for number, target in enumerate(targets):
        calls = [sum(t.number == number for t in trails) for trails in seen]
        if target.gone and (not calls[0] or calls[0] != calls[1]):
            must = f"a module that runs when {type(model).__name__} does, as often as the teacher's"
            raise UnsupportedModel(
                target.name, must, f"{calls[0]} runs in a pass, the teacher's {calls[1]}"
            )


def _as_seen(target: Target, number: int, seen: Sequence[Sequence[Trail]]) -> Target:
    mine = [[t for t in trails if t.number == number] for trails in seen]
    return replace(target, summed=all(t.added for trails in mine for t in trails))


def _adds(
    target: Target, everything: Sequence[Target], seen: Sequence[Sequence[Trail]], width: int
) -> bool:
    """Whether a linear layer's output is of the model's width and is added to activations, in both
    models."""
    calls = _calls(target, everything, seen)
    return all(t.added and t.output.shape[-1] == width for t in calls)


def _calls(
    target: Target, everything: Sequence[Target], seen: Sequence[Sequence[Trail]]
) -> list[Trail]:
    """A target's calls in both models."""
    return [t for trails in seen for t in trails if everything[t.number].ours is target.ours]


def _unfit(model: nn.Module, target: Target) -> str:
    """Why a feed-forward's projection cannot be refitted; empty if it can."""
    try:
        feature_count(target.ours, "in", target.name)
        check_own_parameters(model, target)
    except HeadPruneError as error:
        return f"is {error.got}"
    return ""


def _check_own(model: nn.Module, teacher: nn.Module, targets: Sequence[Target]) -> None:
    check_unshared(model, [(t.bound, t.bound.layout.gate) for t in targets if t.bound is not None])
    for target in targets:
        for module in (target.ours, target.theirs):
            feature_count(module, "in", target.name)
        check_own_parameters(model, target)
    check_apart(teacher, targets)


def check_own_parameters(
    model: nn.Module, target: Target, names: Sequence[str] = ("weight", "bias")
) -> None:
    """Refuses a projection whose parameters belong to another module too, which would change with
    it."""
    for name in names:
        parameter = target.ours._parameters.get(name)
        owners = [
            n
            for n, m in model.named_modules()
            if any(p is parameter for p in m._parameters.values())
        ]
        if parameter is not None and len(owners) > 1:
            must, hint = (
                f"the {name} of one projection",
                f"Give each of them a {name} of its own first.",
            )
            raise UnsupportedModel(f"{target.name}.{name}", must, f"shared by {owners}", hint)


def check_apart(
    teacher: nn.Module, targets: Iterable[Target], names: Sequence[str] = ("weight", "bias")
) -> None:
    """Refuses parameters that the teacher has too: it would change with the model."""
    theirs = {id(p) for p in teacher.parameters()}
    for target in targets:
        if any(id(target.ours._parameters.get(name)) in theirs for name in names):
            hint = "Keep a teacher of its own before you cut: teacher = copy.deepcopy(model)."
            raise InvalidValue(
                "teacher",
                f"without the parameters of the model's {target.name}",
                "one with them",
                hint,
            )


def _notes(targets: Sequence[Target], left: Sequence[str], feed_forward: bool) -> tuple[str, ...]:
    notes = []
    apart = [t.name for t in targets if not t.summed]
    if apart:
        notes.append(
            f"{_listed(apart)}: compared with the teacher's at the projection's own output, for"
            " that passes something else before it is added to the stream."
        )
    alone = _without_feed_forward(targets) if feed_forward else []
    if alone:
        must = "no plain linear layer that is added to the stream was found there"
        notes.append(f"No feed-forward refitted after {_listed(alone)}: {must}.")
    if left:
        notes.append(f"Left as they are: {_listed(left)}.")
    return tuple(notes)


def _without_feed_forward(targets: Sequence[Target]) -> list[str]:
    """Attentions after which none comes before the next attention of a layer; one to another
    sequence is its second."""
    alone: list[str] = []
    open_: list[str] = []
    for target in targets:
        if target.bound is None:
            open_ = []
        elif target.kind == "cross":
            open_.append(target.name)
        else:
            alone, open_ = [*alone, *open_], [target.name]
    return [*alone, *open_]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def check_as_often(target: Target, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Refuses a projection that model and teacher called differently often.

    Raises:
        UnsupportedModel: they did, or neither did.
    """
    if len(ours) != len(theirs) or not ours:
        got = f"{len(ours)} runs, and {len(theirs)} of the teacher's"
        raise UnsupportedModel(target.name, "run as often as the teacher's on every batch", got)
