"""The last step of an attention under gates: its output, or its projection's weight."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn

from headprune.attention.linear import effective_weight, is_conv1d
from headprune.core.layout import STATE_ATTRIBUTE
from headprune.gating.context import for_all_heads, multiplied, multiplied_output
from headprune.model.sites import BoundSite

#: The values that replace the outputs of closed heads: ``[heads * width]``, or one tensor
#: ``[tokens, heads * width]`` per example.
Stand: TypeAlias = "Tensor | tuple[Tensor, ...]"


def output_gated(out: Any, gate: Tensor, bound: BoundSite, fill: Stand | None) -> Any:
    """Apply gates to the output of an attention without an output projection."""
    state = getattr(bound.module, STATE_ATTRIBUTE, None)
    gated = multiplied_output(out, [gate], state)
    if not isinstance(fill, Tensor):
        return gated
    is_tensor = isinstance(out, Tensor)
    context = gated if is_tensor else gated[0]
    heads = for_all_heads(fill.to(context).unflatten(0, (gate.shape[-2], -1)), state)
    replaced = heads.flatten().expand_as(context)
    context = context + multiplied(replaced, [1 - for_all_heads(gate, state)])
    if is_tensor:
        return context
    return (context, *gated[1:])


def plain_weight(bound: BoundSite) -> Tensor | None:
    """Return the output projection's weight ``[out, heads * width]``, or None.

    None where the projection does anything but multiply by its weight and add its bias.
    """
    gate = bound.gate
    # The tape has put its own function in the place of the forward and wrapped the original.
    own: Any = gate.__dict__["forward"].__wrapped__
    linear = type(gate).forward is nn.Linear.forward
    plain = linear or (is_conv1d(gate) and type(gate).__module__ == "transformers.pytorch_utils")
    if not plain or getattr(own, "__func__", None) is not type(gate).forward:
        return None
    if gate._forward_hooks or gate._forward_pre_hooks or gate._compiled_call_impl is not None:
        return None
    return effective_weight(gate).detach()
