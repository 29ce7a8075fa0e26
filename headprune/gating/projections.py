"""Gates on the output of an attention without an output projection."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

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
