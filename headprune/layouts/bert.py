"""BERT-style encoders (BERT, RoBERTa, ELECTRA ...): `query`, `key`, `value` in `self`; `output`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, separate_projections
from headprune.core.mixin import Mixin, mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import TEXT_SIZES, encoder

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def _kind(module: Any, name: str) -> Kind:
    if getattr(module, "is_cross_attention", False) or name.endswith("crossattention"):
        return "cross"
    # BLIP's text tower has no flag of its own, only its configuration's.
    decodes = getattr(getattr(module.self, "config", None), "is_decoder", False)
    return "causal" if getattr(module.self, "is_causal", decodes) else "self"


class PresentHeadsOfBias(Mixin):
    """Put in front of a cut attention that gets position biases of all heads (LayoutLMv2, v3)."""

    headprune_heads: tuple[int, ...]

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        rel_pos: Any = None,
        rel_2d_pos: Any = None,
        **kwargs: Any,
    ) -> Any:
        heads = list(self.headprune_heads)
        # Each bias is [batch, original heads, queries, keys].
        if rel_pos is not None:
            rel_pos = rel_pos[:, heads]
        if rel_2d_pos is not None:
            rel_2d_pos = rel_2d_pos[:, heads]
        return super().forward(  # type: ignore[misc]
            hidden_states, attention_mask, rel_pos, rel_2d_pos, **kwargs
        )


def _adapt(module: Any, model: Any) -> None:
    """Take the kept heads' part of the model's position biases (LayoutLMv2, LayoutLMv3)."""
    relative = getattr(module.self, "has_relative_attention_bias", False)
    spatial = getattr(module.self, "has_spatial_attention_bias", False)
    if relative or spatial:
        mix_in(module.self, PresentHeadsOfBias)
        # The inner module computes the heads, but the outer one holds the state.
        module.self.headprune_heads = getattr(module, STATE_ATTRIBUTE).heads


FAMILIES = (
    ("bert", encoder("BertForSequenceClassification", **TEXT_SIZES)),
    ("roberta", encoder("RobertaForSequenceClassification", **TEXT_SIZES)),
    ("xlm-roberta", encoder("XLMRobertaForSequenceClassification", **TEXT_SIZES)),
    ("camembert", encoder("CamembertForSequenceClassification", **TEXT_SIZES)),
    ("electra", encoder("ElectraForSequenceClassification", **TEXT_SIZES, embedding_size=8)),
)

LAYOUT = AttentionLayout(
    name="bert",
    gate="output.dense",
    slabs=separate_projections("self.query", "self.key", "self.value", "output.dense"),
    head_dim="self.attention_head_size",
    kind=_kind,
    requires=("self.num_attention_heads", "self.all_head_size"),
    # BigBird swaps `self` for an attention of the configuration's size.
    absent=("attention_type",),
    # Norms of the model's width; the last two are Megatron-BERT's and XLM-RoBERTa-XL's.
    untouched=("output.LayerNorm", "ln", "self_attn_layer_norm"),
    counts=(("self.num_attention_heads", "n_query_heads"), ("self.all_head_size", "query_width")),
    adapt=_adapt,
    # `output` adds the bias and the residual.
    empty=without_heads(None, "self", attends=_kind),
    families=FAMILIES,
)
