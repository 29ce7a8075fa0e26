"""WavLM: its attention passes by its projections' code, and gates a position bias for all heads by
parts of its input.

The first layer makes the bias for all heads and every layer reuses it, so its table stays whole.
The gate of head h reads the h-th part of the input: a cut attention goes on to read the parts of
the heads that it has left.
"""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import Mixin
from headprune.layouts._tiny import speech


class CalledProjections(Mixin):
    """Computes what WavLM's attention computes, but calls its projections as modules; for any heads
    that are left."""

    def forward(
        self: Any,
        hidden_states: Any,
        attention_mask: Any = None,
        position_bias: Any = None,
        **kwargs: Any,
    ) -> Any:
        from torch.nn.functional import dropout

        from headprune.layouts._transformers import present_heads

        size, length, _ = hidden_states.shape
        if position_bias is None:
            position_bias = self.compute_bias(length, length).repeat(
                size, 1, 1
            )  # [batch * all heads, query, key]

        parts = present_heads(self, hidden_states.unflatten(-1, (-1, self.head_dim)), 2).transpose(
            1, 2
        )
        gates = (
            self.gru_rel_pos_linear(parts).unflatten(-1, (2, 4)).sum(-1).sigmoid()
        )  # [batch, heads, query, 2]
        strength = gates[..., :1] * (gates[..., 1:] * self.gru_rel_pos_const - 1.0) + 2.0
        scores = strength * present_heads(self, position_bias.unflatten(0, (size, -1)), 1)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask.ne(1)[:, None, None], float("-inf"))

        shape = (size, length, self.num_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2) * self.scaling
        key, value = (
            p(hidden_states).view(shape).transpose(1, 2) for p in (self.k_proj, self.v_proj)
        )
        weights = (scores + query @ key.transpose(-1, -2)).softmax(-1)
        weights = dropout(weights, self.dropout, self.training)
        output = self.out_proj((weights @ value).transpose(1, 2).flatten(2))
        return (
            output,
            weights.mean(1, keepdim=True).expand(size, self.num_heads, length, length),
            position_bias,
        )


FAMILIES = (
    (
        "wavlm",
        speech(
            "WavLMForSequenceClassification",
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=24,
            conv_dim=(8, 8),
            conv_kernel=(10, 4),
            conv_stride=(10, 4),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=8,
            num_buckets=8,
            max_bucket_distance=12,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="wavlm",
    gate="out_proj",
    slabs=(
        HeadSlab("q_proj", "out", "query"),
        HeadSlab("k_proj", "out", "key"),
        HeadSlab("v_proj", "out", "value"),
        HeadSlab("out_proj", "in", "context"),
        HeadSlab("gru_rel_pos_const", 1, "head"),
    ),
    head_dim="head_dim",
    untouched=("rel_attn_embed",),
    per_head=("gru_rel_pos_linear",),
    counts=(("num_heads", "n_query_heads"), ("embed_dim", "query_width")),
    exposed=CalledProjections,
    families=FAMILIES,
)
