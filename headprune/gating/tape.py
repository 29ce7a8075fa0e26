"""A tape of one forward pass, from which a second pass goes on in the middle: what comes before is
played back.

While a pass is recorded, every module that holds a gate, and every direct part of one, keeps what
it returned for as long as a later gate in the same call may need it. A pass that changes the gates
of one site only, or of that site and later ones, computes nothing that was computed before that
site's output projection: modules that had returned by then return what is on the tape, repeated for
every copy of the batch. Modules are named by their place in the calls, so that one which runs
several times (a shared layer, one dropout for all layers) is not confused with itself.

That holds for any code whose modules return the same for the same inputs. ``candidates`` proves it
on two examples.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from headprune.core.errors import HeadPruneError
from headprune.model.running import other_forwards, tensors
from headprune.model.sites import BoundSite

#: A call by the calls around it: the number of the module, and how often the surrounding call had
#: called it before.
Key: TypeAlias = tuple[tuple[int, int], ...]
#: What stands in for a gate's call: ``(site, original forward, args, kwargs) -> output``.
GateCaller: TypeAlias = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class CannotReplay(HeadPruneError):
    """A model whose passes do not repeat each other's calls."""


@dataclass
class GateCall:
    """The first call of a site's output projection in a recorded pass.

    Args:
        running: The calls that were running, outermost first, its own last.
        given: What it was called with, before gates.
        output: What it returned.
        version: Torch's count of that tensor's changes.
        returned_by: The outermost call inside the site that returned that very tensor; its own at
            least.
        returned: All that this call returned.
    """

    running: tuple[Key, ...]
    given: tuple[Any, ...]
    output: Any = None
    version: int = 0
    returned_by: Key = ()
    returned: Any = None


@dataclass
class _Frame:
    key: Key = ()
    counts: Counter[int] = field(default_factory=Counter)
    calls: list[Key] = field(default_factory=list)
    last_gate: int = -1


class Tape:
    """Records passes of a model and plays them back.

    Args:
        model: The model, in evaluation mode.
        bound: Its sites.
    """

    def __init__(self, model: nn.Module, bound: Sequence[BoundSite]) -> None:
        self.bound = bound
        gates = {id(b.gate): site for site, b in enumerate(bound)}
        holders = [m for m in model.modules() if any(id(part) in gates for part in m.modules())]
        parts = [m for holder in holders for m in (holder, *holder.children())]
        self.modules = [m for m in {id(m): m for m in parts}.values() if m is not model]
        self.site_of = {
            number: gates[id(m)] for number, m in enumerate(self.modules) if id(m) in gates
        }
        self.inside = {id(m): site for site, b in enumerate(bound) for m in b.module.modules()}
        self.mutable: set[Key] = set()  # calls whose outputs the model changes in place afterwards
        self.clear()

    def clear(self) -> None:
        """Forgets the recorded pass."""
        self.outputs: dict[Key, Any] = {}
        self.gates: dict[int, GateCall] = {}
        self._versions: dict[Key, list[int]] = {}
        self._stack: list[_Frame] = []

    def order(self) -> list[int]:
        """Sites in the order in which their gates were called first."""
        return list(self.gates)

    def run(self, run: Callable[[], Any], call_gate: GateCaller) -> Any:
        """Runs a whole pass under gates and keeps nothing of it."""

        def around(
            number: int, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            return call_gate(self.site_of[number], original, args, kwargs)

        with self._instead(around, self.site_of):
            return run()

    def record(self, run: Callable[[], Any], call_gate: GateCaller) -> Any:
        """Runs a pass and keeps what ``play`` needs of it; twice, if the model changes some of that
        in place."""
        for _ in range(2):
            self.clear()
            self._stack = [_Frame()]
            with self._instead(functools.partial(self._recording, call_gate)):
                result = run()
            changed = {
                k
                for k, v in self._versions.items()
                if [t._version for t in tensors(self.outputs[k])] != v
            }
            self.mutable |= changed
            if not changed:
                break
        self.outputs.update({call.returned_by: call.returned for call in self.gates.values()})
        return result

    def play(
        self,
        run: Callable[[], Any],
        site: int,
        changed: Callable[[GateCall], Tensor],
        call_gate: GateCaller,
        repeat: Callable[[Key, Tensor], Tensor],
    ) -> Any:
        """Runs a pass that differs from the recorded one from the first call of a site's gate on.

        Args:
            run: The pass.
            site: The first site whose gates differ.
            changed: What that call returns in this pass.
            call_gate: Called for every later call of a gate.
            repeat: Makes of a recorded tensor the one that this pass needs; a new one, for calls
                that are ``mutable``.
        """
        self._stack = [_Frame()]
        with self._instead(
            functools.partial(self._playing, self.gates[site], site, changed, call_gate, repeat)
        ):
            result = run()
            if self._stack:
                where = f"the gate of {self.bound[site].site.name}"
                raise CannotReplay(where, "reached", "a pass that never called it")
        return result

    def _recording(
        self,
        call_gate: GateCaller,
        number: int,
        original: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        outer = self._stack[-1]
        frame = self._enter(outer, number)
        site = self.site_of.get(number)
        first = site is not None and site not in self.gates
        if site is None:
            output = original(*args, **kwargs)
        else:
            if first:
                self.gates[site] = GateCall(tuple(f.key for f in self._stack[1:]), args)
            for f in self._stack[:-1]:
                f.last_gate = len(f.calls)
            output = call_gate(site, original, args, kwargs)
        self._stack.pop()
        for key in frame.calls[max(frame.last_gate, 0) :]:  # no gate of this call comes after them
            self.outputs.pop(key, None)
            self._versions.pop(key, None)
        outer.calls.append(frame.key)
        self.outputs[frame.key] = (
            mapped(output, Tensor.clone) if frame.key in self.mutable else output
        )
        self._versions[frame.key] = [t._version for t in tensors(self.outputs[frame.key])]
        if first and site is not None:
            call = self.gates[site]
            call.output, call.returned_by, call.returned = output, frame.key, output
            call.version = next((t._version for t in tensors(output)), 0)
        elif (
            within := self.inside.get(id(self.modules[number]))
        ) is not None and within in self.gates:
            self._returned(self.gates[within], frame.key, output)
        return output

    def _returned(self, call: GateCall, key: Key, output: Any) -> None:
        """Notes that a call returned the gate's own output, unchanged."""
        same = isinstance(call.output, Tensor) and call.output._version == call.version
        if same and key in call.running and sum(t is call.output for t in tensors(output)) == 1:
            call.returned_by, call.returned = key, output

    def _playing(
        self,
        target: GateCall,
        site: int,
        changed: Callable[[GateCall], Tensor],
        call_gate: GateCaller,
        repeat: Callable[[Key, Tensor], Tensor],
        number: int,
        original: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not self._stack:  # beyond the target
            later = self.site_of.get(number)
            return (
                original(*args, **kwargs)
                if later is None
                else call_gate(later, original, args, kwargs)
            )
        frame = self._enter(self._stack[-1], number)
        if frame.key == target.returned_by:
            self._stack = []
            if not self.bound[site].layout.gate:  # gates multiply what the module returns
                return call_gate(site, original, args, kwargs)
            output = changed(target)
            if frame.key == target.running[-1]:
                return output
            recorded = self.outputs[frame.key]
            return mapped(
                recorded, lambda t: output if t is target.output else repeat(frame.key, t)
            )
        if frame.key in target.running:
            output = original(*args, **kwargs)
            if self._stack:  # the target was not in it
                self._stack.pop()
            return output
        self._stack.pop()
        if frame.key not in self.outputs:
            kind = type(self.modules[number]).__name__
            raise CannotReplay(
                f"the call of a {kind}", "made in the recorded pass too", "a call that was not"
            )
        return mapped(self.outputs[frame.key], functools.partial(repeat, frame.key))

    def _enter(self, outer: _Frame, number: int) -> _Frame:
        frame = _Frame((*outer.key, (number, outer.counts[number])))
        outer.counts[number] += 1
        self._stack.append(frame)
        return frame

    @contextmanager
    def _instead(
        self, around: Callable[..., Any], numbers: Iterable[int] | None = None
    ) -> Iterator[None]:
        """Calls ``around(number, forward, args, kwargs)`` wherever the ``forward`` of a module
        would be called."""
        chosen = range(len(self.modules)) if numbers is None else numbers
        with other_forwards(
            (self.modules[n], functools.partial(_wrapped, around, n)) for n in chosen
        ):
            try:
                yield
            finally:
                self._stack = []


def _wrapped(around: Callable[..., Any], number: int, original: Any) -> Any:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(number, original, args, kwargs)

    return forward


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with ``function`` of every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {k: mapped(v, function) for k, v in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, (tuple, list)):
        parts = [mapped(item, function) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
