"""MPNet: q, k, v and o; the encoder computes one bias of relative positions, for all heads, that every layer adds."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab
from headprune.core.mixin import Mixin
from headprune.layouts._tiny import encoder


class PresentHeadsOfBias(Mixin):
    """Put in front of a cut attention: takes its heads' part of the bias, which comes for all heads."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, position_bias: Any = None, **kwargs: Any) -> Any:
        if position_bias is not None:
            position_bias = position_bias[:, list(getattr(self, STATE_ATTRIBUTE).heads)]
        return super().forward(hidden_states, attention_mask, position_bias, **kwargs)  # type: ignore[misc]


def _adapt(module: Any, model: Any) -> None:
    """Takes its heads' part of the position bias, which the encoder keeps for all heads."""
    from headprune.layouts._transformers import put_in_front

    put_in_front(module, PresentHeadsOfBias)


def _without_heads(module: Any) -> None:
    from headprune.layouts._transformers import without_heads

    without_heads(module, gate="o")


FAMILIES = (
    (
        "mpnet",
        encoder(
            "MPNetForSequenceClassification",
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=24,
            max_position_embeddings=32,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="mpnet",
    gate="o",
    slabs=(
        HeadSlab("q", "out", "query"),
        HeadSlab("k", "out", "key"),
        HeadSlab("v", "out", "value"),
        HeadSlab("o", "in", "context"),
    ),
    head_dim="attention_head_size",
    requires=("num_attention_heads", "all_head_size"),
    counts=(("num_attention_heads", "n_query_heads"), ("all_head_size", "query_width")),
    adapt=_adapt,
    empty=_without_heads,
    families=FAMILIES,
)
