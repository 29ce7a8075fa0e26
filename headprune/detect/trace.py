"""Where a model computes softmax attention, seen by running it once: no names of classes, no guess.

``flow.py`` follows the tensors. The innermost module around a softmax that called the projections
of its queries, keys and values, and the one that is given its heads' outputs, holds an attention:
its *core*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.attention.linear import is_conv1d
from headprune.detect.flow import Event, Flow, Softmax
from headprune.detect.prove import Scratch
from headprune.model.double import Doubled
from headprune.model.running import call


@dataclass(frozen=True)
class Projection:
    """A projection that a core called, by its path in the core.

    Args:
        path: Relative to the core.
        given: Shape of its input.
        made: Shape of its output.
        linear: Whether it is a matrix (an ``nn.Linear`` or a ``Conv1D``), not a convolution.
    """

    path: str
    given: tuple[int, ...]
    made: tuple[int, ...]
    linear: bool


@dataclass(frozen=True)
class Core:
    """A module that holds one attention; all paths are relative to it.

    Args:
        name: Qualified name.
        softmax: What the softmax showed.
        before: Projections called before its softmax, in order.
        after: Projections called after it.
        outlets: Those of them that are given the heads' outputs; the first is the output
            projection.
        leaks: Whether the heads' outputs leave the core by another way too.
        scoring: Projections of its queries and keys.
        both: Those of them that both are made of.
        valued: Projections of its values.
        elsewhere: Qualified names of such projections that the core did not call.
        norms: Norms of its queries, keys and heads' outputs: name, features, and of what ("scores"
            or "context").
    """

    name: str
    softmax: Softmax
    before: tuple[Projection, ...] = ()
    after: tuple[Projection, ...] = ()
    outlets: tuple[Projection, ...] = ()
    leaks: bool = False
    scoring: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    valued: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    norms: tuple[tuple[str, int, str], ...] = ()

    @property
    def gate(self) -> Projection | None:
        """The output projection, if it is a matrix."""
        return self.outlets[0] if self.outlets and self.outlets[0].linear else None

    @property
    def heads(self) -> int:
        """How many heads' outputs the output projection is given; 0 where that is not known."""
        width = self.softmax.width
        features = self.gate.given[-1] if self.gate and self.gate.given else 0
        return features // width if width and features % width == 0 else 0


def is_projection(module: nn.Module) -> bool:
    """Whether a module is a leaf with a matrix or a convolution: something that makes features of
    features."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d)) or is_matrix(module)


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is an ``nn.Linear`` or a ``Conv1D``, plain or not."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def cores(scratch: Scratch) -> list[Core]:
    """Every module of the scratch model that holds a softmax attention, in the order of their
    calls."""
    modules = dict(scratch.model.named_modules())
    flow = _followed(scratch, modules)
    attentions = {i for i, s in enumerate(flow.softmaxes) if s.used}
    found: dict[str, Core] = {}
    for at, event in enumerate(flow.events):
        if event.number in attentions:
            core = _core(modules, flow, at, attentions)
            if core is not None and core.name in found:  # it runs again
                found[core.name].softmax.causal &= core.softmax.causal
            elif core is not None:
                found[core.name] = core
    return list(found.values())


def _followed(scratch: Scratch, modules: dict[str, nn.Module]) -> Flow:
    flow, handles = Flow(scratch.example), []
    for name, module in modules.items():
        projection = is_projection(module)

        def enter(
            module: Any, args: Any, kwargs: Any, name: str = name, projection: bool = projection
        ) -> None:
            flow.called(name, module, (args, kwargs), projection)

        def leave(
            _: Any, args: Any, out: Any, name: str = name, projection: bool = projection
        ) -> None:
            flow.returned(name, args, out, projection)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with scratch.running(), torch.no_grad(), flow, Doubled():
            call(scratch.model, scratch.example)
    finally:
        for handle in handles:
            handle.remove()
    return flow


def _core(modules: dict[str, nn.Module], flow: Flow, at: int, attentions: set[int]) -> Core | None:
    events, number = flow.events, flow.events[at].number
    softmax = flow.softmaxes[number]
    innermost, nearest = "", None
    wanted = softmax.scoring | softmax.valued
    for start, end in _calls_around(events, at):
        name = events[start].name
        innermost = innermost or name
        if name != innermost and _holds_another(events, start, end, innermost, attentions):
            break
        if softmax.fused:
            return Core(name, softmax)
        before = tuple(_projections(modules, events, start, at, name))
        after = tuple(_projections(modules, events, at, end, name))
        fed = {e.name for e in events[at:end] if e.what == "enter" and number in e.trail.context}
        if before and (after or nearest is None):
            inside = {_absolute(p.path, name) for p in before}
            core = Core(
                name,
                softmax,
                before,
                after,
                tuple(p for p in after if _absolute(p.path, name) in fed),
                number in events[end].trail.context,
                _ordered(before, name, softmax.scoring),
                _ordered(before, name, softmax.both),
                _ordered(before, name, softmax.valued),
                tuple(sorted(wanted - inside)),
                _norms(flow, number, softmax, name, before),
            )
            if core.outlets and not core.elsewhere:
                nearest = core
                break
            if nearest is None or (core.outlets and not nearest.outlets):
                nearest = core
    if softmax.learned and (nearest is None or not nearest.scoring):
        return None  # a softmax of what a bare matrix made: a router
    return nearest or Core(innermost, softmax, elsewhere=tuple(sorted(wanted)))


def _ordered(before: tuple[Projection, ...], name: str, wanted: frozenset[str]) -> tuple[str, ...]:
    return tuple(p.path for p in before if _absolute(p.path, name) in wanted)


def _norms(
    flow: Flow, number: int, softmax: Softmax, name: str, before: tuple[Projection, ...]
) -> tuple[tuple[str, int, str], ...]:
    own = {_absolute(p.path, name) for p in before} & softmax.scoring
    found = []
    for norm in flow.norms:
        if number in norm.given.context and norm.name.startswith(
            (f"{name}." if name else "", "F.")
        ):
            found.append((norm.name, norm.width, "context"))
        elif norm.given.sources and norm.given.sources <= own and not norm.given.products:
            found.append((norm.name, norm.width, "scores"))
    return tuple(dict.fromkeys(found))


def _holds_another(
    events: list[Event], start: int, end: int, innermost: str, attentions: set[int]
) -> bool:
    """Whether another module's attention falls into the same call: then it is not the place of one
    attention."""
    for other in range(start, end):
        if events[other].number in attentions:
            inner, _ = next(_calls_around(events, other))
            if events[inner].name != innermost:
                return True
    return False


def _calls_around(events: list[Event], at: int) -> Iterator[tuple[int, int]]:
    """``(enter, leave)`` of every call that is going on at an event, innermost first."""
    depth = 0
    for start in range(at - 1, -1, -1):
        depth += (events[start].what == "leave") - (events[start].what == "enter")
        if depth < 0:
            depth, balance, end = 0, 1, start
            while balance and end + 1 < len(events):
                end += 1
                balance += (events[end].what == "enter") - (events[end].what == "leave")
            yield start, end


def _projections(
    modules: dict[str, nn.Module], events: list[Event], start: int, end: int, core: str
) -> Iterator[Projection]:
    seen = set()
    for at in range(start + 1, end):
        event = events[at]
        if (
            event.what != "enter"
            or event.name in seen
            or event.name == core
            or not is_projection(modules[event.name])
        ):
            continue
        seen.add(event.name)
        made = next(
            (e.shape for e in events[at:] if e.what == "leave" and e.name == event.name), ()
        )
        yield Projection(
            _relative(event.name, core), event.shape, made, is_matrix(modules[event.name])
        )


def _relative(name: str, core: str) -> str:
    return name.removeprefix(f"{core}.") if core else name


def _absolute(path: str, core: str) -> str:
    return f"{core}.{path}" if core else path
