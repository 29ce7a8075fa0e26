"""What the Transformers families share: an attention without heads that keeps bias and cache calls working."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import UnsupportedModel
from headprune.core.mixin import Mixin, mix_in, original_class


class WithoutHeads(Mixin, nn.Module):
    """Put in front of an attention class: adds the output projection's bias and nothing else.

    The cache is told of every token through a key of one head of width 1: Transformers reads a layer's length off
    its cached keys and takes keys without elements for an empty cache, so that positions after a headless first
    layer would start again from zero.
    """

    headprune_gate: str | None
    headprune_cross: bool

    def forward(self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        shape = hidden_states.shape  # [batch, length, width], or [batch, height, width of the image, width]
        n_keys = shape[1]
        if past_key_values is not None and not self.headprune_cross:
            # An encoder-decoder's cache is a pair; that of the cross-attention holds no positions of the decoder.
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            marker = hidden_states.new_zeros(shape[0], 1, shape[1], 1)
            n_keys = cache.update(marker, marker, self.layer_idx)[0].shape[-2]
        weights = hidden_states.new_zeros(shape[0], 0, shape[1], n_keys)
        if self.headprune_gate is None:  # the output projection is a sibling and adds its bias itself
            return hidden_states.new_zeros(*shape[:-1], 0), weights
        projection = self.get_submodule(self.headprune_gate)
        output = torch.zeros_like(hidden_states)
        bias = projection.bias
        return (output + bias if isinstance(bias, Tensor) else output), weights


def without_heads(
    module: nn.Module, gate: str | None, cross: bool = False, kind: type[WithoutHeads] = WithoutHeads
) -> None:
    """Turns ``module`` in place into its own subclass that has no heads; it keeps its class name and its place.

    Args:
        module: The attention module whose ``forward`` computes the heads.
        gate: The output projection inside it, None where that is a sibling.
        cross: Whether it attends to another sequence, whose keys a cache keeps apart.
        kind: A subclass of ``WithoutHeads`` for a module that is called or answers in another way.

    Raises:
        UnsupportedModel: the module has a ``forward`` of its own that would hide the class's.
    """
    if "forward" in module.__dict__ and "_old_forward" not in module.__dict__:
        name = original_class(module).__name__
        raise UnsupportedModel(name, "left with a head, for its forward is replaced", "none kept")
    mix_in(module, kind)
    module.headprune_gate, module.headprune_cross = gate, cross  # type: ignore[assignment]
    if "_old_forward" in module.__dict__:  # accelerate's hooks (device_map) call the forward that they wrapped
        module.__dict__["_old_forward"] = MethodType(kind.forward, module)
