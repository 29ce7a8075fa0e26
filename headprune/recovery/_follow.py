"""Follows the outputs of projections through a forward pass, up to the residual additions.

No architecture is known here. While a model runs, every operation is seen:

- One that only rearranges a projection's output is remembered with its inverse.
- An addition makes the sum the tensor that is followed.
- The first operation of another kind ends the following of that call.

So a pre-norm block ends at its residual addition, a post-norm block before its norm, a parallel
block after both additions. A norm, a scale or a gate on the output itself ends it before any
addition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headprune.model.running import tensors

#: Reverses a rearrangement of a tensor.
Inverse: TypeAlias = Callable[[Tensor], Tensor]

_ATEN = torch.ops.aten
_SUMS = {_ATEN.add, _ATEN.add_}
# These keep the order of the numbers; they are followed as long as the shape is kept, too.
_COPIES = {
    _ATEN.alias,
    _ATEN.detach,
    _ATEN.clone,
    _ATEN._to_copy,
    _ATEN.expand,
    _ATEN.slice,
}
_RESHAPES = {_ATEN.view, _ATEN._unsafe_view, _ATEN._reshape_alias, _ATEN.unsqueeze, _ATEN.squeeze}
_REORDERINGS = {_ATEN.transpose, _ATEN.t, _ATEN.permute, _ATEN.roll}
_REARRANGEMENTS = _COPIES | _RESHAPES | _REORDERINGS


class _AllFollowed(BaseException):
    """Leaves a forward pass early. A model's ``except Exception`` does not catch it."""


@dataclass(eq=False)
class FollowedCall:
    """One call of a projection, and what its output was added to.

    Args:
        number: Number of the projection.
        input: What the projection read.
        output: What it returned.
        padding_info: What determined the padding when it ran.
        added: Whether activations were added to the output, not only parameters.
    """

    number: int
    input: Tensor
    output: Tensor
    padding_info: Any = None
    added: bool = False
    _sum: tuple[Tensor, Inverse] | None = None

    @property
    def summed(self) -> bool:
        """Whether anything was added."""
        return self._sum is not None

    def stream(self, summed: bool) -> Tensor:
        """Return the sum with its tokens in the order of ``output``, or the output if not
        ``summed``."""
        if not summed:
            return self.output
        assert self._sum is not None
        total, inverse = self._sum
        return inverse(total)

    def copy_if_in(self, memory: int) -> None:
        """Copy the tensors that lie in this memory, before it is overwritten."""
        if _memory(self.input) == memory:
            self.input = self.input.clone()
        if _memory(self.output) == memory:
            self.output = self.output.clone()
        if self._sum is not None:
            total, inverse = self._sum
            if _memory(total) == memory:
                self._sum = (total.clone(), inverse)


@dataclass(frozen=True)
class _Alias:
    """A call's output or sum, rearranged, and the inverse of the rearrangement."""

    call: FollowedCall
    tensor: Tensor
    inverse: Inverse


class _Follower(TorchDispatchMode):
    """Follows projections' outputs while it is active.

    Args:
        expected: Leave the pass by ``_AllFollowed`` after this many calls have ended; None runs it
            to its end.
        biases: Numbers of projections by the identity of their bias. These projections read no
            heads, so other code may add their bias without calling them. What the bias is first
            added to counts as the projection's output.
        padding_info: Returns what determines the padding of the running call.
    """

    def __init__(
        self, expected: int | None, biases: Mapping[int, int], padding_info: Callable[[], Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[FollowedCall] = []
        # Followed projections that are running. Nested, so a count.
        self.n_running = 0
        self._stop_after = expected
        self._number_of_bias = biases
        self._padding_info = padding_info
        self._ended: list[FollowedCall] = []
        # By identity of the tensor. An alias holds its tensor, so no identity is used twice.
        self._aliases: dict[int, list[_Alias]] = {}

    def begin(self, number: int, read: Tensor, output: Tensor) -> None:
        """Follow the output that a projection has returned."""
        call = FollowedCall(number, read, output, self._padding_info())
        self.calls.append(call)
        self._note(call, output, _identity)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before the first call there is nothing to follow, only biases to find.
        if not self.calls and not self._number_of_bias:
            return func(*args, **kwargs)
        # 1. Before the operation: end calls that it does not continue, copy what it overwrites.
        operands: list[_Alias] = []
        for tensor in tensors((args, kwargs)):
            operands += self._aliases.get(id(tensor), ())
        for alias in operands:
            self._prepare(func, alias, operands, args, kwargs)
        if func._schema.is_mutable:
            self._protect_ended_calls(func, args, kwargs)

        output = func(*args, **kwargs)

        # 2. After it: follow its output in place of its operands.
        for alias in operands:
            if self._is_followed(alias):
                self._continue_with(func, alias, args, output)
        if self._number_of_bias and not self.n_running and func.overloadpacket is _ATEN.add:
            self._begin_at_bias(args, output)
        return output

    def _prepare(
        self, func: Any, alias: _Alias, operands: list[_Alias], args: Any, kwargs: Any
    ) -> None:
        """End the alias's call if the operation does not continue it; else keep its output."""
        # An operation on two aliases of one call, such as x + x.T, has no inverse.
        occurrences = sum(other.call is alias.call for other in operands)
        if occurrences > 1 or not _continues(func, alias.tensor, args, kwargs):
            self._end(alias.call)
            return
        # ``output += residual`` writes the sum into the output itself.
        overwrites = func.overloadpacket is _ATEN.add_ and args[0] is alias.tensor
        if overwrites and not alias.call.summed:
            alias.call.output = alias.call.output.clone()

    def _is_followed(self, alias: _Alias) -> bool:
        return any(other is alias for other in self._aliases.get(id(alias.tensor), ()))

    def _continue_with(self, func: Any, alias: _Alias, args: Any, output: Tensor) -> None:
        """Follow the output of a sum or a rearrangement."""
        call, shape = alias.call, alias.tensor.shape
        if func.overloadpacket in _SUMS:
            # Broadcasting to more tokens has no inverse.
            if output.shape != shape:
                self._end(call)
                return
            # A parameter is a bias; activations make the sum a stream.
            other = args[1] if args[0] is alias.tensor else args[0]
            self._forget(call)
            call.added |= not isinstance(other, nn.Parameter)
            call._sum = (output, alias.inverse)
            self._note(call, output, alias.inverse)
            return
        if func.overloadpacket in _COPIES and output.shape != shape:
            self._end(call)
            return
        # Inverses are applied in reverse order: first that of the last rearrangement.
        undo = _inverse_of(func, shape, args)
        self._note(call, output, lambda x: alias.inverse(undo(x)))

    def _begin_at_bias(self, args: Any, output: Tensor) -> None:
        """Begin a call where the bias of a projection that reads no heads is added."""
        for operand in args:
            number = self._number_of_bias.get(id(operand))
            if number is not None:
                # The projection reads no channels: [..., 0].
                self.begin(number, output.new_empty(*output.shape[:-1], 0), output)
                return

    def _note(self, call: FollowedCall, tensor: Tensor, inverse: Inverse) -> None:
        self._aliases.setdefault(id(tensor), []).append(_Alias(call, tensor, inverse))

    def _forget(self, call: FollowedCall) -> None:
        """Drop all aliases of a call."""
        remaining = {}
        for identity, aliases in self._aliases.items():
            others = [alias for alias in aliases if alias.call is not call]
            if others:
                remaining[identity] = others
        self._aliases = remaining

    def _end(self, call: FollowedCall) -> None:
        """Stop following a call; leave the pass if it was the last one expected."""
        aliases = itertools.chain.from_iterable(self._aliases.values())
        if any(alias.call is call for alias in aliases):
            self._forget(call)
            self._ended.append(call)
        if len(self._ended) == self._stop_after:
            raise _AllFollowed

    def _protect_ended_calls(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copy tensors of ended calls that the operation is about to overwrite."""
        arguments = func._schema.arguments
        names = (argument.name for argument in arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        written = []
        for argument in arguments:
            info = argument.alias_info
            if info is not None and info.is_write and argument.name in given:
                written.append(given[argument.name])
        for tensor in tensors(written):
            memory = _memory(tensor)
            for call in self._ended:
                call.copy_if_in(memory)


def _identity(x: Tensor) -> Tensor:
    return x


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _continues(func: Any, tensor: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether an operation only rearranges the tensor or adds another to it."""
    packet = func.overloadpacket
    if packet in _SUMS:
        # alpha scales the second operand: a scaled projection is not followed.
        scaled = args[0] is not tensor and kwargs.get("alpha", 1) != 1
        return isinstance(args[1], Tensor) and not scaled
    return packet in _REARRANGEMENTS and args[0] is tensor


def _inverse_of(func: Any, shape: torch.Size, args: Any) -> Inverse:
    """Return the inverse of a rearrangement of a tensor of this shape."""
    packet = func.overloadpacket
    if packet in _RESHAPES:
        return lambda x: x.reshape(shape)
    if packet is _ATEN.transpose:
        return lambda x: x.transpose(args[1], args[2])
    if packet is _ATEN.t:
        return lambda x: x.t()
    if packet is _ATEN.permute:
        order = [axis % len(shape) for axis in args[1]]
        inverse_order = [order.index(axis) for axis in range(len(order))]
        return lambda x: x.permute(inverse_order)
    if packet is _ATEN.roll:
        shifts = [-shift for shift in args[1]]
        return lambda x: x.roll(shifts, *args[2:])
    return _identity


def _biases_of_empty(projections: Mapping[int, nn.Module]) -> dict[int, int]:
    """Return, by identity of the bias, the numbers of projections that read no channels."""
    numbers = {}
    for number, module in projections.items():
        weight = module._parameters.get("weight")
        bias = module._parameters.get("bias")
        if weight is not None and bias is not None and not weight.numel():
            numbers[id(bias)] = number
    return numbers


def follow(
    run: Callable[[], Any],
    projections: Mapping[int, nn.Module],
    expected: int | None = None,
    padding_info: Callable[[], Any] = lambda: None,
) -> list[FollowedCall]:
    """Run a pass and follow the outputs of some projections.

    Args:
        run: The pass, without gradients.
        projections: The projections by number. One that reads no heads may have its bias added by
            other code than its own.
        expected: Leave the pass when this many calls have ended; None runs it to its end.
        padding_info: Returns what determines the padding of the running call.

    Returns:
        The calls, in the order in which they returned.
    """
    follower = _Follower(expected, _biases_of_empty(projections), padding_info)

    def called(module: nn.Module, args: Any) -> None:
        follower.n_running += 1

    def returned(number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            follower.n_running -= 1
            follower.begin(number, args[0], output)

        return hook

    with ExitStack() as stack:
        for number, module in projections.items():
            stack.callback(module.register_forward_pre_hook(called).remove)
            stack.callback(module.register_forward_hook(returned(number)).remove)
        try:
            with follower:
                run()
        except _AllFollowed:
            pass
    return follower.calls
