"""What the Transformers families share: an attention without heads that keeps bias and cache calls working."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _WithoutHeads(nn.Module):
    """Mixed into an attention class: adds the output projection's bias and nothing else.

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


def without_heads(module: nn.Module, gate: str | None, cross: bool = False) -> None:
    """Turns ``module`` in place into its own subclass that has no heads; it keeps its class name and its place.

    Args:
        module: The attention module whose ``forward`` computes the heads.
        gate: The output projection inside it, None where that is a sibling.
        cross: Whether it attends to another sequence, whose keys a cache keeps apart.
    """
    original = type(module)
    if issubclass(original, _WithoutHeads):
        return
    ours = {"headprune_gate": gate, "headprune_cross": cross}
    body = {**ours, "__doc__": original.__doc__, "__module__": original.__module__}
    module.__class__ = type(original.__name__, (_WithoutHeads, original), body)
