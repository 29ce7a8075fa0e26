"""A tape of one forward pass: a later pass replays its unchanged part.

While a pass is recorded, every module that holds a gate, and every direct child of one, keeps its
output for as long as a later gate in the same call may need it. A later pass may change only the
gates of one site and of the sites after it. Then modules that had returned before that site's
output projection return their recorded outputs, repeated for every copy of the batch.

For example, of a model of three layers: to change gates of layer 2, a pass takes the outputs of the
embeddings and layer 1 from the tape, and computes from the output projection of layer 2 on.

A call is named by its place in the tree of calls. So a module that runs several times (a shared
layer, one dropout for all layers) has one name per run.

This is right for any code whose modules return the same for the same inputs; module ``candidates``
proves it on two examples.
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

#: The name of a call, outermost call first. Each step is the number of the module, and how often
#: the surrounding call had called that module before.
Key: TypeAlias = tuple[tuple[int, int], ...]
#: Replaces a gate's call: ``(site, original forward, args, kwargs) -> output``.
GateCaller: TypeAlias = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class CannotReplay(HeadPruneError):
    """A model whose passes do not repeat each other's calls."""


@dataclass
class GateCall:
    """The first call of a site's output projection in a recorded pass.

    Args:
        running: The calls that were running, outermost first, its own last.
        given: Its positional arguments, before gates.
        output: Its output.
        version: Torch's count of that tensor's changes in place.
        returned_by: The outermost call inside the site that returned that very tensor; its own call
            at least.
        returned: The whole output of that outermost call.
    """

    running: tuple[Key, ...]
    given: tuple[Any, ...]
    output: Any = None
    version: int = 0
    returned_by: Key = ()
    returned: Any = None


@dataclass
class _Frame:
    """A running call.

    Args:
        key: Its name.
        counts: How often it has called each module, by number.
        calls: The calls that it has made and that have returned.
        last_gate: How many calls it had made when the last gate was called; -1 before any.
    """

    key: Key = ()
    counts: Counter[int] = field(default_factory=Counter)
    calls: list[Key] = field(default_factory=list)
    last_gate: int = -1


@dataclass(frozen=True)
class _Change:
    """The arguments of ``Tape.play``, with the recorded call at which the pass changes."""

    target: GateCall
    site: int
    changed: Callable[[GateCall], Tensor]
    call_gate: GateCaller
    repeat: Callable[[Key, Tensor], Tensor]


class Tape:
    """Record a pass of a model, and play it back with other gates from some site on.

    ``record`` keeps the outputs of calls; ``play`` runs the model with every recorded call replaced
    by its output, until the site's gate is reached; then everything runs as usual.

    Args:
        model: The model, in evaluation mode.
        bound: Its sites.
    """

    def __init__(self, model: nn.Module, bound: Sequence[BoundSite]) -> None:
        self.bound = bound
        # Modules on the tape: those that contain a gate, and their direct children.
        self.modules: list[nn.Module] = []
        # Numbers of the modules that are gates.
        self.site_of: dict[int, int] = {}
        # Sites by the ids of all modules inside them.
        self.inside: dict[int, int] = {}
        # Calls whose outputs the model later changes in place.
        self.mutable: set[Key] = set()

        gates = {id(b.gate): site for site, b in enumerate(bound)}
        # The model itself has no surrounding call.
        seen = {id(model)}
        for holder in model.modules():
            if not any(id(part) in gates for part in holder.modules()):
                continue
            for module in (holder, *holder.children()):
                if id(module) in seen:
                    continue
                seen.add(id(module))
                if id(module) in gates:
                    self.site_of[len(self.modules)] = gates[id(module)]
                self.modules.append(module)
        for site, b in enumerate(bound):
            for module in b.module.modules():
                self.inside[id(module)] = site
        self.clear()

    def clear(self) -> None:
        """Forget the recorded pass."""
        self.outputs: dict[Key, Any] = {}
        self.gates: dict[int, GateCall] = {}
        self._versions: dict[Key, list[int]] = {}
        self._stack: list[_Frame] = []

    def order(self) -> list[int]:
        """Return the sites in the order in which their gates were called first."""
        return list(self.gates)

    def run(self, run: Callable[[], Any], call_gate: GateCaller) -> Any:
        """Run a whole pass under gates and keep nothing of it."""

        def around(
            number: int, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            return call_gate(self.site_of[number], original, args, kwargs)

        with self._instead(around, self.site_of):
            return run()

    def record(self, run: Callable[[], Any], call_gate: GateCaller) -> Any:
        """Run a pass and keep the outputs that ``play`` needs.

        It runs twice if the model changes some of these outputs in place: then copies are kept.
        """
        for _ in range(2):
            self.clear()
            self._stack = [_Frame()]
            with self._instead(functools.partial(self._recording, call_gate)):
                result = run()
            changed = set()
            for key, before in self._versions.items():
                if self._changes(key) != before:
                    changed.add(key)
            self.mutable |= changed
            if not changed:
                break
        for call in self.gates.values():
            self.outputs[call.returned_by] = call.returned
        return result

    def play(
        self,
        run: Callable[[], Any],
        site: int,
        changed: Callable[[GateCall], Tensor],
        call_gate: GateCaller,
        repeat: Callable[[Key, Tensor], Tensor],
    ) -> Any:
        """Run a pass that differs from the recorded one from the first call of a site's gate on.

        Args:
            run: The pass.
            site: The first site whose gates differ.
            changed: Gives the output of that call in this pass.
            call_gate: Replaces every later call of a gate.
            repeat: Turns a recorded tensor into the one that this pass needs; a new tensor for
                calls that are ``mutable``.

        Raises:
            CannotReplay: the pass makes other calls than the recorded one.
        """
        change = _Change(self.gates[site], site, changed, call_gate, repeat)
        self._stack = [_Frame()]
        with self._instead(functools.partial(self._playing, change)):
            result = run()
            if self._stack:
                where = f"the gate of {self.bound[site].site.name}"
                raise CannotReplay(where, "reached", "a pass that never called it")
        return result

    # ------------------------------------------------------------- recording

    def _recording(
        self,
        call_gate: GateCaller,
        number: int,
        original: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one module's forward and record it."""
        # 1. Run it.
        outer = self._stack[-1]
        frame = self._enter(outer, number)
        site = self.site_of.get(number)
        first_call: GateCall | None = None
        if site is None:
            output = original(*args, **kwargs)
        else:
            # Later calls of a shared gate are computed again in a played pass.
            if site not in self.gates:
                running = tuple(f.key for f in self._stack[1:])
                first_call = GateCall(running, args)
                self.gates[site] = first_call
            for f in self._stack[:-1]:
                f.last_gate = len(f.calls)
            output = call_gate(site, original, args, kwargs)
        self._stack.pop()

        # 2. Forget the inner calls after its last gate: no later gate of this call needs them.
        for key in frame.calls[max(frame.last_gate, 0) :]:
            self.outputs.pop(key, None)
            self._versions.pop(key, None)

        # 3. Keep its output.
        outer.calls.append(frame.key)
        if frame.key in self.mutable:
            self.outputs[frame.key] = mapped(output, Tensor.clone)
        else:
            self.outputs[frame.key] = output
        self._versions[frame.key] = self._changes(frame.key)

        # 4. Note which call returns the gate's output.
        if first_call is not None:
            first_call.output = output
            first_call.version = next((t._version for t in tensors(output)), 0)
            first_call.returned_by = frame.key
            first_call.returned = output
        else:
            around = self.inside.get(id(self.modules[number]))
            if around is not None and around in self.gates:
                self._note_return(self.gates[around], frame.key, output)
        return output

    def _note_return(self, call: GateCall, key: Key, output: Any) -> None:
        """Note that an outer call returned the gate's own output, unchanged."""
        if not isinstance(call.output, Tensor) or call.output._version != call.version:
            return
        same = [t for t in tensors(output) if t is call.output]
        if key in call.running and len(same) == 1:
            call.returned_by = key
            call.returned = output

    def _changes(self, key: Key) -> list[int]:
        """How often each recorded tensor of a call was changed in place, as torch counts it."""
        return [t._version for t in tensors(self.outputs[key])]

    # ------------------------------------------------------------- playing back

    def _playing(
        self,
        change: _Change,
        number: int,
        original: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Play one module's forward back, or run it where the pass has changed."""
        # Beyond the target everything runs.
        if not self._stack:
            later = self.site_of.get(number)
            if later is None:
                return original(*args, **kwargs)
            return change.call_gate(later, original, args, kwargs)

        frame = self._enter(self._stack[-1], number)
        if frame.key == change.target.returned_by:
            self._stack = []
            return self._play_target(change, frame.key, original, args, kwargs)

        # The target is inside this call, so it has to run.
        if frame.key in change.target.running:
            output = original(*args, **kwargs)
            if self._stack:  # the target was not reached
                self._stack.pop()
            return output

        # Before the target: the recorded output.
        self._stack.pop()
        if frame.key not in self.outputs:
            where = f"the call of a {type(self.modules[number]).__name__}"
            raise CannotReplay(where, "made in the recorded pass too", "a call that was not")
        return mapped(self.outputs[frame.key], functools.partial(change.repeat, frame.key))

    def _play_target(
        self, change: _Change, key: Key, original: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return the changed output of the call that returns the gate's output."""
        # Without an output projection, gates multiply the module's output.
        if not self.bound[change.site].layout.gate:
            return change.call_gate(change.site, original, args, kwargs)
        target = change.target
        output = change.changed(target)
        if key == target.running[-1]:
            return output

        def replace(tensor: Tensor) -> Tensor:
            return output if tensor is target.output else change.repeat(key, tensor)

        return mapped(self.outputs[key], replace)

    # ------------------------------------------------------------- calls

    def _enter(self, outer: _Frame, number: int) -> _Frame:
        # The n-th call of a module inside a surrounding call has its own name.
        frame = _Frame((*outer.key, (number, outer.counts[number])))
        outer.counts[number] += 1
        self._stack.append(frame)
        return frame

    @contextmanager
    def _instead(
        self, around: Callable[..., Any], numbers: Iterable[int] | None = None
    ) -> Iterator[None]:
        """Call ``around(number, forward, args, kwargs)`` in place of the modules' ``forward``."""
        if numbers is None:
            numbers = range(len(self.modules))
        with other_forwards(
            (self.modules[n], functools.partial(_wrapped, around, n)) for n in numbers
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
    """Apply ``function`` to every tensor of a nested structure and return the same structure."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {k: mapped(v, function) for k, v in value.items()}
        if type(value) is dict:
            return items
        return type(value)(**items)  # model outputs of Transformers
    if isinstance(value, (tuple, list)):
        parts = [mapped(item, function) for item in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*parts)
        return type(value)(parts)
    return value
