"""Follows what projections put out to where it has been added to something else: the stream after a
sub-layer.

No architecture is known here. While a model runs, every operation is seen; one that only rearranges
a projection's output is remembered with the way back, an addition makes the sum the tensor that is
followed, and the first operation of another kind ends the trail. So a pre-norm block ends at its
residual's addition, a post-norm block before its norm, a parallel block after both additions. A
norm, a scale or a gate on the output itself ends it before any addition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headprune.model.running import tensors

Back: TypeAlias = Callable[[Tensor], Tensor]

_ATEN = torch.ops.aten
_SUMS = {_ATEN.add, _ATEN.add_}
_SAME = {
    _ATEN.alias,
    _ATEN.detach,
    _ATEN.clone,
    _ATEN._to_copy,
    _ATEN.expand,
    _ATEN.slice,
}  # if the shape stays
_RESHAPED = {_ATEN.view, _ATEN._unsafe_view, _ATEN._reshape_alias, _ATEN.unsqueeze, _ATEN.squeeze}


class _Reached(BaseException):
    """Leaves a forward pass once all is known; no ``except Exception`` of a model holds it up."""


@dataclass(eq=False)
class Trail:
    """One call of a projection, and what became of its output.

    Args:
        number: Of the projection.
        given: What it read.
        output: What it put out.
        inputs: What told the padding when it ran.
        added: Whether activations were added to that, not only parameters.
    """

    number: int
    given: Tensor
    output: Tensor
    inputs: Any = None
    added: bool = False
    _sum: tuple[Tensor, Back] | None = None

    @property
    def summed(self) -> bool:
        """Whether anything was added."""
        return self._sum is not None

    def stream(self, summed: bool) -> Tensor:
        """The sum, its tokens in the order of ``output``; the output itself where it is not
        ``summed``."""
        if not summed:
            return self.output
        assert self._sum is not None
        total, back = self._sum
        return back(total)

    def keep(self, memory: int) -> None:
        """Takes copies of what lies in this memory, before it is written to."""
        if _memory(self.given) == memory:
            self.given = self.given.clone()
        if _memory(self.output) == memory:
            self.output = self.output.clone()
        if self._sum is not None and _memory(self._sum[0]) == memory:
            self._sum = (self._sum[0].clone(), self._sum[1])


@dataclass(frozen=True)
class _Alias:
    """A tensor that is a trail's output or sum rearranged, and the way back."""

    trail: Trail
    tensor: Tensor
    back: Back


class _Follower(TorchDispatchMode):
    """Follows trails while it is active.

    Args:
        expected: Leave the pass by ``_Reached`` when so many trails have ended; None runs it to its
            end.
        biases: By identity the biases of projections that may not be called, for they read no
            heads: with the number of the projection. What they are first added to is its output.
        inputs: Says what tells the padding.
    """

    def __init__(
        self, expected: int | None, biases: Mapping[int, int], inputs: Callable[[], Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trails: list[Trail] = []
        self.inside = 0  # calls of followed projections that are running
        self._expected, self._biases, self._inputs = expected, biases, inputs
        self._ended: list[Trail] = []
        self._aliases: dict[int, list[_Alias]] = {}

    def begin(self, number: int, given: Tensor, output: Tensor) -> None:
        """A projection has returned."""
        self.trails.append(Trail(number, given, output, self._inputs()))
        self._note(self.trails[-1], output, lambda x: x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [a for t in tensors((args, kwargs)) for a in self._aliases.get(id(t), ())]
        for alias in found:
            if sum(a.trail is alias.trail for a in found) > 1 or not _followed(
                func, alias.tensor, args, kwargs
            ):
                self._end(alias.trail)
            elif (
                func.overloadpacket is _ATEN.add_
                and args[0] is alias.tensor
                and not alias.trail.summed
            ):
                alias.trail.output = alias.trail.output.clone()
        if func._schema.is_mutable:
            self._rescue(func, args, kwargs)
        out = func(*args, **kwargs)
        for alias in found:
            if any(a is alias for a in self._aliases.get(id(alias.tensor), ())):
                self._moved(func, alias, args, out)
        if self._biases and not self.inside and func.overloadpacket is _ATEN.add:
            number = next((self._biases[id(a)] for a in args if id(a) in self._biases), None)
            if number is not None:
                self.begin(number, out.new_empty(*out.shape[:-1], 0), out)
        return out

    def _moved(self, func: Any, alias: _Alias, args: Any, out: Tensor) -> None:
        shape = alias.tensor.shape
        if func.overloadpacket in _SUMS:
            if out.shape != shape:
                self._end(alias.trail)
                return
            other = args[1] if args[0] is alias.tensor else args[0]
            self._forget(alias.trail)
            alias.trail.added |= not isinstance(other, nn.Parameter)
            alias.trail._sum = (out, alias.back)
            self._note(alias.trail, out, alias.back)
            return
        undo = _undone(func, alias.tensor.shape, args)
        if func.overloadpacket in _SAME and out.shape != shape:
            self._end(alias.trail)
        else:
            self._note(alias.trail, out, lambda x: alias.back(undo(x)))

    def _note(self, trail: Trail, tensor: Tensor, back: Back) -> None:
        self._aliases.setdefault(id(tensor), []).append(_Alias(trail, tensor, back))

    def _forget(self, trail: Trail) -> None:
        left = {
            i: [a for a in aliases if a.trail is not trail] for i, aliases in self._aliases.items()
        }
        self._aliases = {i: aliases for i, aliases in left.items() if aliases}

    def _end(self, trail: Trail) -> None:
        if any(a.trail is trail for aliases in self._aliases.values() for a in aliases):
            self._forget(trail)
            self._ended.append(trail)
        if len(self._ended) == self._expected:
            raise _Reached

    def _rescue(self, func: Any, args: Any, kwargs: Any) -> None:
        """What has been followed to its end stays as it was then, though code goes on to change it
        in place."""
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = {
            a.name
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        }
        for tensor in tensors([v for n, v in named.items() if n in written]):
            for trail in self._ended:
                trail.keep(_memory(tensor))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _followed(func: Any, tensor: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether an operation adds something to a tensor or only rearranges it."""
    packet = func.overloadpacket
    if packet in _SUMS:
        return isinstance(args[1], Tensor) and (args[0] is tensor or kwargs.get("alpha", 1) == 1)
    known = (
        packet in _SAME
        or packet in _RESHAPED
        or packet in (_ATEN.transpose, _ATEN.t, _ATEN.permute, _ATEN.roll)
    )
    return known and args[0] is tensor


def _undone(func: Any, shape: torch.Size, args: Any) -> Back:
    """What takes back a rearrangement of a tensor of this shape."""
    packet = func.overloadpacket
    if packet in _RESHAPED:
        return lambda x: x.reshape(shape)
    if packet is _ATEN.transpose:
        return lambda x: x.transpose(args[1], args[2])
    if packet is _ATEN.t:
        return lambda x: x.t()
    if packet is _ATEN.permute:
        order = [d % len(shape) for d in args[1]]
        return lambda x: x.permute([order.index(d) for d in range(len(order))])
    if packet is _ATEN.roll:
        return lambda x: x.roll([-s for s in args[1]], *args[2:])
    return lambda x: x


def follow(
    run: Callable[[], Any],
    projections: Mapping[int, nn.Module],
    expected: int | None = None,
    inputs: Callable[[], Any] = lambda: None,
) -> list[Trail]:
    """Runs a pass and follows what some projections put out, in the order of their calls.

    Args:
        run: The pass, without gradients.
        projections: By their numbers. One that reads no heads may have its bias added by other code
            than its own.
        expected: Leave the pass when so many calls have been followed to their end.
        inputs: Says what tells the padding of the call that is running.
    """
    parameters = {
        n: (m._parameters.get("weight"), m._parameters.get("bias")) for n, m in projections.items()
    }
    empty = {
        n: b
        for n, (w, b) in parameters.items()
        if w is not None and b is not None and not w.numel()
    }
    follower = _Follower(expected, {id(bias): n for n, bias in empty.items()}, inputs)

    def called(module: nn.Module, args: Any) -> None:
        follower.inside += 1

    def returned(number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            follower.inside -= 1
            follower.begin(number, args[0], output)

        return hook

    with ExitStack() as stack:
        for number, module in projections.items():
            stack.callback(module.register_forward_pre_hook(called).remove)
            stack.callback(module.register_forward_hook(returned(number)).remove)
        try:
            with follower:
                run()
        except _Reached:
            pass
    return follower.trails
