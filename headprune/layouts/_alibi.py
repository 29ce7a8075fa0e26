"""Run attention after a cut where the model computes position biases for all heads (ALiBi)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headprune.core.layout import HeadState
from headprune.core.mixin import Mixin
from headprune.layouts._transformers import WithoutHeads, present_heads


class SlicedAlibi(Mixin, nn.Module):
    """Put in front of an attention class: take the kept heads' part of ALiBi and masks."""

    headprune_state: HeadState

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        n_heads = self.headprune_state.n_query_heads
        if alibi is not None:
            # [batch * heads, 1, keys] or [batch, heads, 1, keys] -> [batch, heads, 1, keys]
            rows = alibi.reshape(hidden_states.shape[0], n_heads, *alibi.shape[-2:])
            alibi = present_heads(self, rows, 1).flatten(0, 1)
        # A mask with an axis for heads holds ALiBi already.
        if attention_mask is not None and attention_mask.shape[1] == n_heads > 1:
            attention_mask = present_heads(self, attention_mask, 1)
        return super().forward(
            hidden_states, *args, alibi=alibi, attention_mask=attention_mask, **kwargs
        )


class OnlyResidual(WithoutHeads):
    """An attention without heads that adds the residual itself (BLOOM)."""

    hidden_dropout: float

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        (residual,) = args
        output, weights = super().forward(hidden_states, **kwargs)
        return residual + nn.functional.dropout(output, self.hidden_dropout, self.training), weights
