"""WavLM: `q_proj`, `k_proj`, `v_proj`, `out_proj`, and gates of a position bias per head.

The first layer computes the bias for all heads and every layer reuses it, so its table is not cut.
The gate of head h reads the h-th part of the input. A cut attention reads the parts of its kept
heads. WavLM's code never calls its projections, so other code runs instead.
"""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab, separate_projections
from headprune.core.mixin import Mixin
from headprune.layouts._tiny import SPEECH_SIZES, speech


class CalledProjections(Mixin):
    """Put in front of WavLM's attention: the same for the kept heads, but calls its projections."""

    def forward(
        self: Any,
        hidden_states: Any,
        attention_mask: Any = None,
        position_bias: Any = None,
        **kwargs: Any,
    ) -> Any:
        from torch.nn.functional import dropout

        from headprune.layouts._transformers import present_heads

        # 1. The bias of all heads, [batch * original heads, queries, keys].
        batch, length, _ = hidden_states.shape
        if position_bias is None:
            position_bias = self.compute_bias(length, length).repeat(batch, 1, 1)
        bias = present_heads(self, position_bias.unflatten(0, (batch, -1)), 1)

        # 2. Each kept head's gates of it, from that head's part of the input.
        parts = hidden_states.unflatten(-1, (-1, self.head_dim))  # [batch, length, heads, head_dim]
        parts = present_heads(self, parts, 2).transpose(1, 2)
        gates = self.gru_rel_pos_linear(parts).unflatten(-1, (2, 4)).sum(-1).sigmoid()
        # [batch, heads, queries, 2] -> [batch, heads, queries, 1]
        strength = gates[..., :1] * (gates[..., 1:] * self.gru_rel_pos_const - 1.0) + 2.0
        scores = strength * bias
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask.ne(1)[:, None, None], float("-inf"))

        # 3. Attention, [batch, heads, length, head_dim].
        shape = (batch, length, self.num_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2) * self.scaling
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        weights = (scores + query @ key.transpose(-1, -2)).softmax(-1)
        weights = dropout(weights, self.dropout, self.training)
        output = self.out_proj((weights @ value).transpose(1, 2).flatten(2))

        # 4. WavLM returns the mean weights for every head.
        mean = weights.mean(1, keepdim=True).expand(batch, self.num_heads, length, length)
        return output, mean, position_bias


FAMILIES = (
    (
        "wavlm",
        speech(
            "WavLMForSequenceClassification",
            **SPEECH_SIZES,
            num_buckets=8,
            max_bucket_distance=12,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="wavlm",
    gate="out_proj",
    slabs=(
        *separate_projections("q_proj", "k_proj", "v_proj", "out_proj"),
        HeadSlab("gru_rel_pos_const", 1, "head"),
    ),
    head_dim="head_dim",
    untouched=("rel_attn_embed",),  # the bias table: other layers need every head's bias
    per_head=("gru_rel_pos_linear",),  # one layer that each head's part passes by itself
    counts=(("num_heads", "n_query_heads"), ("embed_dim", "query_width")),
    exposed=CalledProjections,
    families=FAMILIES,
)
