"""T5's attention after a cut: the position bias that it is given, makes and passes on is for the
original heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from headprune.core.mixin import Mixin
from headprune.layouts._transformers import WithoutHeads, present_heads


class WithPositionBias(Mixin, nn.Module):
    """Put in front of an attention that takes a position bias of all original heads and returns it
    for the next."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
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
    """Without heads, such an attention still returns the bias that the next layers need."""

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
    """The bias of all original heads ``[1, heads, queries, keys]``; call it before the cache learns
    of the tokens."""
    if given is not None:
        return given
    length, index = hidden_states.shape[1], module.layer_idx
    n_keys = length if key_value_states is None else key_value_states.shape[1]
    seen: Any = 0
    if cache is not None and key_value_states is None:
        seen, n_keys = cache.get_seq_length(index), cache.get_mask_sizes(length, index)[0]
    elif cache is not None:
        crossed = getattr(cache, "cross_attention_cache", cache)
        known = getattr(cache, "is_updated", {}).get(index)
        n_keys = (
            crossed.layers[index].keys.shape[-2]
            if known
            else crossed.get_mask_sizes(n_keys, index)[0]
        )
    if module.has_relative_attention_bias:
        bias: Tensor = module.compute_bias(
            length, n_keys, device=hidden_states.device, past_seen_tokens=seen
        )
        return bias
    state: HeadState = getattr(module, STATE_ATTRIBUTE)
    return torch.zeros(
        1,
        state.n_query_heads,
        length,
        n_keys,
        dtype=hidden_states.dtype,
        device=hidden_states.device,
    )
