"""The last step of an attention under gates: its output where it has no projection, and the
projection's weight."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn

from headprune.attention.linear import effective_weight, is_conv1d
from headprune.core.layout import STATE_ATTRIBUTE
from headprune.gating.context import for_all_heads, multiplied, multiplied_output
from headprune.model.sites import BoundSite

#: What stands in for the outputs of closed heads.
Stand: TypeAlias = "Tensor | tuple[Tensor, ...]"


def output_gated(out: Any, gate: Tensor, bound: BoundSite, fill: Stand | None) -> Any:
    """What an attention without an output projection returns under gates."""
    state = getattr(bound.module, STATE_ATTRIBUTE, None)
    found = multiplied_output(out, [gate], state)
    if not isinstance(fill, Tensor):
        return found
    first = found if isinstance(out, Tensor) else found[0]
    heads = for_all_heads(fill.to(first).unflatten(0, (gate.shape[-2], -1)), state)
    first = first + multiplied(heads.flatten().expand_as(first), [1 - for_all_heads(gate, state)])
    return first if isinstance(out, Tensor) else (first, *found[1:])


def plain_weight(bound: BoundSite) -> Tensor | None:
    """The output projection's weight ``[out, heads * width]``, if it does nothing but multiply by
    it."""
    gate = bound.gate
    own: Any = gate.__dict__["forward"].__wrapped__  # what stands there while a tape runs
    linear = type(gate).forward is nn.Linear.forward
    plain = linear or (is_conv1d(gate) and type(gate).__module__ == "transformers.pytorch_utils")
    if not plain or getattr(own, "__func__", None) is not type(gate).forward:
        return None
    if gate._forward_hooks or gate._forward_pre_hooks or gate._compiled_call_impl is not None:
        return None
    return effective_weight(gate).detach()
