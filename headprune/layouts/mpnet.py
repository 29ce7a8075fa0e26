"""MPNet: `q`, `k`, `v`, `o`; every layer adds one position bias that the encoder computes."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, separate_projections
from headprune.core.mixin import Mixin, mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import TEXT_SIZES, encoder


class PresentHeadsOfPositionBias(Mixin):
    """Put in front of a cut attention that gets a position bias of all heads."""

    def forward(
        self: Any,
        hidden_states: Any,
        attention_mask: Any = None,
        position_bias: Any = None,
        **kwargs: Any,
    ) -> Any:
        from headprune.layouts._transformers import present_heads

        if position_bias is not None:
            # [1, original heads, queries, keys]
            position_bias = present_heads(self, position_bias, 1)
        return super().forward(hidden_states, attention_mask, position_bias, **kwargs)  # type: ignore[misc]


#: The class's former name, by which pickles of cut models import it.
PresentHeadsOfBias = PresentHeadsOfPositionBias


def _adapt(module: Any, model: Any) -> None:
    """Take the kept heads' part of the position bias, which the encoder computes for all heads."""
    mix_in(module, PresentHeadsOfPositionBias)


FAMILIES = (("mpnet", encoder("MPNetForSequenceClassification", **TEXT_SIZES)),)

LAYOUT = AttentionLayout(
    name="mpnet",
    gate="o",
    slabs=separate_projections("q", "k", "v", "o"),
    head_dim="attention_head_size",
    requires=("num_attention_heads", "all_head_size"),
    counts=(("num_attention_heads", "n_query_heads"), ("all_head_size", "query_width")),
    adapt=_adapt,
    empty=without_heads("o"),
    families=FAMILIES,
)
