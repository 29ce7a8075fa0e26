"""Where a model computes softmax attention, seen by running it once: no names of classes, no guess.

Every call of softmax or of an attention kernel is noted with the modules that are being called at that moment. The
innermost of them that also called projections before and one after holds an attention: its *core*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.model.double import Doubled
from headprune.model.running import call
from headprune.surgery.prove import Scratch

_KERNELS = {"softmax", "scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention", "_softmax"}
_FUSED = {"multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"}


@dataclass(frozen=True)
class Projection:
    """A projection that a core called, by its path in the core.

    Args:
        path: Relative to the core.
        given: Shape of its input.
        made: Shape of its output.
        linear: Whether it is a plain matrix (an ``nn.Linear`` or a ``Conv1D``), not a convolution.
    """

    path: str
    given: tuple[int, ...]
    made: tuple[int, ...]
    linear: bool


@dataclass(frozen=True)
class Core:
    """A module that holds one attention.

    Args:
        name: Qualified name.
        before: Projections called before its softmax, in order.
        after: Projections called after it; the output projection is among the first of them, if there is one.
        scores: Shape of what the softmax, or of the queries that the kernel, was given.
        fused: Whether one native function does everything, projections included.
        norms: Paths of modules called between the softmax and the end that are no projections but have parameters.
    """

    name: str
    before: tuple[Projection, ...]
    after: tuple[Projection, ...]
    scores: tuple[int, ...]
    fused: bool
    norms: tuple[str, ...]


@dataclass
class _Event:
    what: str  # "enter", "leave" or "softmax"
    name: str
    given: tuple[int, ...] = ()
    made: tuple[int, ...] = ()


class _Watch(TorchFunctionMode):
    def __init__(self, events: list[_Event]) -> None:
        self.events = events

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _KERNELS or name in _FUSED:
            shape = next((tuple(a.shape) for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), ())
            self.events.append(_Event("softmax", name, shape))
        return func(*args, **kwargs)


def is_projection(module: nn.Module) -> bool:
    """Whether a module is a leaf with a matrix or a convolution: something that makes features of features."""
    weight = getattr(module, "weight", None)
    called = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) or hasattr(module, "nf")
    return called and isinstance(weight, Tensor) and weight.ndim >= 2


def cores(scratch: Scratch) -> list[Core]:
    """Every module of the scratch model that holds a softmax attention, in the order of their calls."""
    modules = dict(scratch.model.named_modules())
    events = _events(scratch, modules)
    found: dict[str, Core] = {}
    for at, event in enumerate(events):
        if event.what == "softmax" and (len(event.given) >= 3 or event.name in _FUSED):
            core = _core(modules, events, at)
            if core is not None and core.name not in found:
                found[core.name] = core
    return list(found.values())


def _events(scratch: Scratch, modules: dict[str, nn.Module]) -> list[_Event]:
    events: list[_Event] = []
    handles = []

    def shape(value: Any) -> tuple[int, ...]:
        value = value[0] if isinstance(value, (tuple, list)) and value else value
        return tuple(value.shape) if isinstance(value, Tensor) else ()

    for name, module in modules.items():

        def enter(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
            events.append(_Event("enter", name, shape(args) or shape(list(kwargs.values()))))

        def leave(_: Any, args: Any, out: Any, name: str = name) -> None:
            events.append(_Event("leave", name, (), shape(out)))

        handles += [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]
    try:
        with scratch.running(), torch.no_grad(), _Watch(events), Doubled():
            call(scratch.model, scratch.example)
    finally:
        for handle in handles:
            handle.remove()
    return events


def _core(modules: dict[str, nn.Module], events: list[_Event], at: int) -> Core | None:
    innermost = ""
    for start, end in _calls_around(events, at):
        name = events[start].name
        innermost = innermost or name
        if name != innermost and _holds_another(events, start, end, innermost):
            break
        before = tuple(_projections(modules, events, start, at, name))
        after = tuple(_projections(modules, events, at, end, name))
        if events[at].name in _FUSED:
            return Core(name, (), after, events[at].given, True, ())
        if before and after:
            if before[-1].made == events[at].given:
                return None  # a softmax over what one projection made: a router or a pooling
            gate = f"{name}.{after[0].path}".lstrip(".")
            upto = next(i for i in range(at, end) if events[i].name == gate)
            norms = [
                _relative(e.name, name)
                for e in events[at:upto]
                if e.what == "enter" and list(modules[e.name].parameters(recurse=False))
            ]
            return Core(name, before, after, events[at].given, False, tuple(dict.fromkeys(norms)))
    return Core(innermost, (), (), events[at].given, False, ())


def _holds_another(events: list[_Event], start: int, end: int, innermost: str) -> bool:
    """Whether another module's softmax falls into the same call: then it is not the place of one attention."""
    for other in range(start, end):
        if events[other].what == "softmax":
            inner, _ = next(_calls_around(events, other))
            if events[inner].name != innermost:
                return True
    return False


def _calls_around(events: list[_Event], at: int) -> Iterator[tuple[int, int]]:
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
    modules: dict[str, nn.Module], events: list[_Event], start: int, end: int, core: str
) -> Iterator[Projection]:
    seen = set()
    for at in range(start + 1, end):
        event = events[at]
        if event.what != "enter" or event.name in seen or event.name == core or not is_projection(modules[event.name]):
            continue
        seen.add(event.name)
        made = next((e.made for e in events[at:] if e.what == "leave" and e.name == event.name), ())
        module = modules[event.name]
        linear = isinstance(module, nn.Linear) or hasattr(module, "nf")
        yield Projection(_relative(event.name, core), event.given, made, linear)


def _relative(name: str, core: str) -> str:
    return name.removeprefix(f"{core}.") if core else name
