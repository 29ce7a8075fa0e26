"""Find where a model computes softmax attention by running it once, without names or guesses.

An *attention core* is one softmax(QK)V computation together with the module that holds it: the
innermost module that calls the projections of the queries, keys and values, and the projection that
takes the heads' outputs. ``flow.py`` tracks the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from headprune.attention.linear import is_conv1d
from headprune.detect.flow import Event, ProvenanceMode, SoftmaxCall
from headprune.detect.prove import Scratch
from headprune.model.double import Doubled
from headprune.model.running import call


@dataclass(frozen=True)
class Projection:
    """A projection that a core called.

    Args:
        path: Relative to the core.
        input_shape: Shape of its input.
        output_shape: Shape of its output.
        linear: Whether it is a matrix (an ``nn.Linear`` or a ``Conv1D``), not a convolution.
    """

    path: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    linear: bool


@dataclass(frozen=True)
class CoreNorm:
    """A norm in a core.

    Args:
        name: Qualified name of the module, or ``F.`` and the name of the function.
        width: Features that it spans.
        of: Whether it takes queries or keys ("scores"), or the heads' outputs ("context").
    """

    name: str
    width: int
    of: Literal["scores", "context"]


@dataclass(frozen=True)
class AttentionCore:
    """One softmax(QK)V computation, and the module that holds it; paths are relative to that.

    Args:
        name: Qualified name of the module.
        softmax: The softmax, as it was recorded.
        before: Projections called before the softmax, in order.
        after: Projections called after it.
        outlets: Those of them that take the heads' outputs; the first is the output projection.
        leaks: Whether the heads' outputs leave the module by another way too.
        query_key_paths: Projections of the queries and keys.
        fused_paths: Those of them that make both.
        value_paths: Projections of the values.
        outside: Qualified names of such projections that the module did not call.
        norms: Norms of the queries, keys and heads' outputs.
    """

    name: str
    softmax: SoftmaxCall
    before: tuple[Projection, ...] = ()
    after: tuple[Projection, ...] = ()
    outlets: tuple[Projection, ...] = ()
    leaks: bool = False
    query_key_paths: tuple[str, ...] = ()
    fused_paths: tuple[str, ...] = ()
    value_paths: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    norms: tuple[CoreNorm, ...] = ()

    @property
    def gate(self) -> Projection | None:
        """The output projection, if it is a matrix."""
        if self.outlets and self.outlets[0].linear:
            return self.outlets[0]
        return None

    @property
    def context_width(self) -> int:
        """Features of all heads' outputs; 0 where that is not known."""
        if self.gate is None or not self.gate.input_shape:
            return 0
        return self.gate.input_shape[-1]

    @property
    def heads(self) -> int:
        """Number of heads whose outputs the output projection takes; 0 where that is not known."""
        width = self.softmax.value_dim
        if not width or self.context_width % width:
            return 0
        return self.context_width // width


def is_projection(module: nn.Module) -> bool:
    """Whether a module is a matrix or a convolution."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d)) or is_matrix(module)


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is an ``nn.Linear`` or a ``Conv1D``, plain or not."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def attention_cores(scratch: Scratch) -> list[AttentionCore]:
    """Every attention core of the scratch model, in the order of the calls."""
    modules = dict(scratch.model.named_modules())
    record = _recorded(scratch, modules)
    # A softmax whose probabilities no values are multiplied with is no attention.
    attentions = {i for i, softmax in enumerate(record.softmaxes) if softmax.used}
    cores: dict[str, AttentionCore] = {}
    for at, event in enumerate(record.events):
        if event.number not in attentions:
            continue
        core = _core_at(modules, record, at, attentions)
        if core is None:
            continue
        if core.name in cores:  # the module runs again
            cores[core.name].softmax.causal &= core.softmax.causal
        else:
            cores[core.name] = core
    return list(cores.values())


def _recorded(scratch: Scratch, modules: dict[str, nn.Module]) -> ProvenanceMode:
    """The record of one forward pass."""
    record = ProvenanceMode(scratch.example)
    handles = []

    # A function, so that each hook has a name of its own.
    def watch(name: str, module: nn.Module) -> None:
        projection = is_projection(module)

        def enter(module: Any, args: Any, kwargs: Any) -> None:
            record.enter(name, module, (args, kwargs), projection)

        def leave(_: Any, args: Any, output: Any) -> None:
            record.leave(name, args, output, projection)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))

    for name, module in modules.items():
        watch(name, module)
    try:
        with scratch.running(), torch.no_grad(), record, Doubled():
            call(scratch.model, scratch.example)
    finally:
        for handle in handles:
            handle.remove()
    return record


def _core_at(
    modules: dict[str, nn.Module], record: ProvenanceMode, at: int, attentions: set[int]
) -> AttentionCore | None:
    """The core of the softmax at an event; None where the softmax is no attention."""
    events = record.events
    softmax = record.softmaxes[events[at].number]
    innermost = ""
    best = None
    for start, end in _calls_around(events, at):
        name = events[start].name
        innermost = innermost or name
        # A module around several attentions holds none of them.
        if _holds_another(events, start, end, innermost, attentions):
            break
        if softmax.fused:
            return AttentionCore(name, softmax)
        core = _core_of_call(modules, record, start, at, end)
        if _is_better(core, best):
            best = core
        if best is core and core.outlets and not core.outside:
            break
    if best is None:
        outside = tuple(sorted(softmax.query_key_sources | softmax.value_sources))
        best = AttentionCore(innermost, softmax, outside=outside)
    # A softmax of products with a bare matrix is a router.
    return None if softmax.constant_factor and not best.query_key_paths else best


def _is_better(core: AttentionCore, best: AttentionCore | None) -> bool:
    """Whether a module is a better holder of an attention than one inside."""
    if not core.before:
        return False
    if best is None:
        return True
    # An outer module must call a projection after the softmax, the output projection at best.
    is_whole = bool(core.outlets) and not core.outside
    return bool(core.after) and (is_whole or (bool(core.outlets) and not best.outlets))


def _core_of_call(
    modules: dict[str, nn.Module], record: ProvenanceMode, start: int, at: int, end: int
) -> AttentionCore:
    """The core of a softmax, if the module of one call around holds it.

    Args:
        modules: All modules of the model, by name.
        record: The record of the forward pass.
        start: Index of the event at which the module is called.
        at: Index of the event of the softmax.
        end: Index of the event at which the module returns.
    """
    events = record.events
    number = events[at].number
    name = events[start].name
    softmax = record.softmaxes[number]
    # 1. Projections before and after the softmax.
    before = _projections(modules, events, start, at, name)
    after = _projections(modules, events, at, end, name)
    # 2. Modules that take its heads' outputs.
    takes_context = {
        e.name for e in events[at:end] if e.what == "enter" and number in e.provenance.context
    }
    called = {_absolute(p.path, name) for p in before}
    wanted = softmax.query_key_sources | softmax.value_sources

    # 3. Names become paths in the module.
    return AttentionCore(
        name,
        softmax,
        before,
        after,
        outlets=tuple(p for p in after if _absolute(p.path, name) in takes_context),
        leaks=number in events[end].provenance.context,
        query_key_paths=_paths(before, name, softmax.query_key_sources),
        fused_paths=_paths(before, name, softmax.fused_sources),
        value_paths=_paths(before, name, softmax.value_sources),
        outside=tuple(sorted(wanted - called)),
        norms=_norms(record, number, name, called & softmax.query_key_sources),
    )


def _paths(
    projections: tuple[Projection, ...], core: str, wanted: frozenset[str]
) -> tuple[str, ...]:
    """Paths of the projections with a wanted qualified name, in order."""
    return tuple(p.path for p in projections if _absolute(p.path, core) in wanted)


def _norms(
    record: ProvenanceMode, number: int, core: str, query_key_sources: frozenset[str] | set[str]
) -> tuple[CoreNorm, ...]:
    """Norms of a core: of the context of its softmax, of its queries and keys."""
    inside = f"{core}." if core else ""
    norms = []
    for norm in record.possible_norms:
        sources = norm.inputs.sources
        # Functions are called in some module: their context shows of which core they are.
        if number in norm.inputs.context and norm.name.startswith((inside, "F.")):
            norms.append(CoreNorm(norm.name, norm.width, "context"))
        elif sources and sources <= query_key_sources and not norm.inputs.products:
            norms.append(CoreNorm(norm.name, norm.width, "scores"))
    return tuple(dict.fromkeys(norms))


def _holds_another(
    events: list[Event], start: int, end: int, innermost: str, attentions: set[int]
) -> bool:
    """Whether another module's attention runs in the same call, so that it holds several."""
    if events[start].name == innermost:
        return False
    for other in range(start, end):
        if events[other].number in attentions:
            inner, _ = next(_calls_around(events, other))
            if events[inner].name != innermost:
                return True
    return False


def _calls_around(events: list[Event], at: int) -> Iterator[tuple[int, int]]:
    """``(enter, leave)`` of every call that is open at an event, innermost first."""
    depth = 0
    # Backwards: a call is open if it begins before the event and does not end before it.
    for start in range(at - 1, -1, -1):
        depth -= _opened(events[start])
        if depth < 0:
            depth = 0
            yield start, _end_of_call(events, start)


def _end_of_call(events: list[Event], start: int) -> int:
    """Index of the event at which the call that begins at ``start`` ends."""
    n_open = 1
    end = start
    while n_open and end + 1 < len(events):
        end += 1
        n_open += _opened(events[end])
    return end


def _opened(event: Event) -> int:
    """How many calls an event opens: 1, 0, or -1 where it ends one."""
    return (event.what == "enter") - (event.what == "leave")


def _projections(
    modules: dict[str, nn.Module], events: list[Event], start: int, end: int, core: str
) -> tuple[Projection, ...]:
    """Projections that are called between two events; the first call of each counts."""
    projections: dict[str, Projection] = {}
    for at in range(start + 1, end):
        event = events[at]
        name = event.name
        if event.what != "enter" or name in projections or name == core:
            continue
        if not is_projection(modules[name]):
            continue
        path = name.removeprefix(f"{core}.") if core else name
        output_shape = _output_shape(events, at)
        projections[name] = Projection(path, event.shape, output_shape, is_matrix(modules[name]))
    return tuple(projections.values())


def _output_shape(events: list[Event], start: int) -> tuple[int, ...]:
    """Shape of the output of the call that begins at ``start``."""
    for at in range(start, len(events)):
        if events[at].what == "leave" and events[at].name == events[start].name:
            return events[at].shape
    return ()


def _absolute(path: str, core: str) -> str:
    return f"{core}.{path}" if core else path
