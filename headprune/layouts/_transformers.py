"""What the Transformers families share: an attention without heads that keeps bias and cache calls working."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class _WithoutHeads(nn.Module):
    """Mixed into an attention class: adds the output projection's bias and nothing else.

    The cache is told of every token through a key of one head of width 1: Transformers reads a layer's length off
    its cached keys and takes keys without elements for an empty cache, so that positions after a headless first
    layer would start again from zero.
    """

    headprune_gate: str | None

    def forward(self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        batch, length = hidden_states.shape[:2]
        n_keys = length
        if past_key_values is not None:
            marker = hidden_states.new_zeros(batch, 1, length, 1)
            n_keys = past_key_values.update(marker, marker, self.layer_idx)[0].shape[-2]
        weights = hidden_states.new_zeros(batch, 0, length, n_keys)
        if self.headprune_gate is None:  # the output projection is a sibling and adds its bias itself
            return hidden_states.new_zeros(batch, length, 0), weights
        projection = self.get_submodule(self.headprune_gate)
        output = hidden_states.new_zeros(batch, length, hidden_states.shape[-1])
        bias = projection.bias
        return (output + bias if isinstance(bias, Tensor) else output), weights


def without_heads(module: nn.Module, gate: str | None) -> None:
    """Turns ``module`` in place into its own subclass that has no heads; it keeps its class name and its place.

    Args:
        module: The attention module whose ``forward`` computes the heads.
        gate: The output projection inside it, None where that is a sibling.
    """
    original = type(module)
    if issubclass(original, _WithoutHeads):
        return
    body = {"headprune_gate": gate, "__doc__": original.__doc__, "__module__": original.__module__}
    module.__class__ = type(original.__name__, (_WithoutHeads, original), body)
