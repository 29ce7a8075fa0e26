"""BERT-style encoders (BERT, RoBERTa, ELECTRA and their likes): query, key, value in `self`, the
output in `output`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab
from headprune.core.mixin import Mixin, mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import encoder

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def _kind(module: Any, name: str) -> Kind:
    if getattr(module, "is_cross_attention", False) or name.endswith("crossattention"):
        return "cross"
    decodes = getattr(getattr(module.self, "config", None), "is_decoder", False)  # BLIP
    return "causal" if getattr(module.self, "is_causal", decodes) else "self"


class PresentHeadsOfBias(Mixin):
    """Put in front of a cut attention whose biases of positions come for all heads (LayoutLMv2 and
    v3)."""

    headprune_heads: tuple[int, ...]

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        rel_pos: Any = None,
        rel_2d_pos: Any = None,
        **kwargs: Any,
    ) -> Any:
        kept = [b if b is None else b[:, list(self.headprune_heads)] for b in (rel_pos, rel_2d_pos)]
        return super().forward(hidden_states, attention_mask, *kept, **kwargs)  # type: ignore[misc]


def _adapt(module: Any, model: Any) -> None:
    """Takes its heads' part of biases of positions that the model keeps for all heads (LayoutLMv2
    and v3)."""
    if any(
        getattr(module.self, f"has_{which}_attention_bias", False)
        for which in ("relative", "spatial")
    ):
        mix_in(module.self, PresentHeadsOfBias)
        module.self.headprune_heads = getattr(module, STATE_ATTRIBUTE).heads


_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}

FAMILIES = (
    ("bert", encoder("BertForSequenceClassification", **_SIZES)),
    ("roberta", encoder("RobertaForSequenceClassification", **_SIZES)),
    ("xlm-roberta", encoder("XLMRobertaForSequenceClassification", **_SIZES)),
    ("camembert", encoder("CamembertForSequenceClassification", **_SIZES)),
    ("electra", encoder("ElectraForSequenceClassification", **_SIZES, embedding_size=8)),
)

LAYOUT = AttentionLayout(
    name="bert",
    gate="output.dense",
    slabs=(
        HeadSlab("self.query", "out", "query"),
        HeadSlab("self.key", "out", "key"),
        HeadSlab("self.value", "out", "value"),
        HeadSlab("output.dense", "in", "context"),
    ),
    head_dim="self.attention_head_size",
    kind=_kind,
    requires=("self.num_attention_heads", "self.all_head_size"),
    absent=(
        "attention_type",
    ),  # BigBird puts another attention in place of `self`, of the configuration's size
    untouched=(
        "output.LayerNorm",
        "ln",
        "self_attn_layer_norm",
    ),  # the last two: Megatron-BERT, XLM-RoBERTa-XL
    counts=(("self.num_attention_heads", "n_query_heads"), ("self.all_head_size", "query_width")),
    adapt=_adapt,
    empty=without_heads(None, "self", attends=_kind),
    families=FAMILIES,
)
