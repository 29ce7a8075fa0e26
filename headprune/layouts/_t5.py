"""Run T5's attention after a cut: its position bias is for all original heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from headprune.core.mixin import Mixin
from headprune.layouts._transformers import WithoutHeads, present_heads


class WithPositionBias(Mixin, nn.Module):
    """Put in front of an attention class: use the kept heads' bias, return all heads' bias."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        # The next layer may have kept other heads, so it needs the bias of all of them.
        bias = full_bias(self, hidden_states, key_value_states, position_bias, past_key_values)
        output, _, weights = super().forward(
            hidden_states,
            mask=mask,
            key_value_states=key_value_states,
            position_bias=present_heads(self, bias, 1),
            past_key_values=past_key_values,
            **kwargs,
        )
        return output, bias, weights


class WithoutHeadsWithPositionBias(WithoutHeads):
    """For such an attention without heads: still return the bias that the next layers need."""

    def forward(  # type: ignore[override]  # called with T5's arguments
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        bias = full_bias(self, hidden_states, key_value_states, position_bias, past_key_values)
        # Without heads a mask has no effect; the bias is for the next layer alone.
        output, weights = super().forward(
            hidden_states, key_value_states=key_value_states, past_key_values=past_key_values
        )
        return output, bias, weights


def full_bias(
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None,
    given: Tensor | None,
    cache: Any,
) -> Tensor:
    """Return the position bias of all original heads, ``[batch or 1, heads, queries, keys]``.

    Call it before the cache gets the new tokens.

    Args:
        module: The attention module.
        hidden_states: Its input.
        key_value_states: The encoder's output for cross-attention, else None.
        given: The bias of an earlier layer, if there is one.
        cache: The cache, or None.
    """
    if given is not None:
        return given
    length = hidden_states.shape[1]
    n_past, n_keys = _cached_sizes(module, length, key_value_states, cache)
    if module.has_relative_attention_bias:
        bias: Tensor = module.compute_bias(
            length, n_keys, device=hidden_states.device, past_seen_tokens=n_past
        )
        return bias
    # Cross-attention has no position bias; T5 passes zeros on.
    state: HeadState = getattr(module, STATE_ATTRIBUTE)
    return torch.zeros(
        1,
        state.n_query_heads,
        length,
        n_keys,
        dtype=hidden_states.dtype,
        device=hidden_states.device,
    )


def _cached_sizes(
    module: Any, length: int, key_value_states: Tensor | None, cache: Any
) -> tuple[Any, int]:
    """Return how many tokens the cache holds already, and how many keys this call attends to."""
    index = module.layer_idx
    # Self-attention: earlier tokens come from the cache.
    if key_value_states is None:
        if cache is None:
            return 0, length
        return cache.get_seq_length(index), cache.get_mask_sizes(length, index)[0]

    # Cross-attention: all keys are the encoder's, cached at the first step.
    n_keys = key_value_states.shape[1]
    if cache is not None:
        encoder_part = getattr(cache, "cross_attention_cache", cache)
        if getattr(cache, "is_updated", {}).get(index):
            n_keys = encoder_part.layers[index].keys.shape[-2]
        else:
            n_keys = encoder_part.get_mask_sizes(n_keys, index)[0]
    return 0, n_keys
