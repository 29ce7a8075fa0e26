"""BERT-style encoders (BERT, RoBERTa, ELECTRA and their likes): query, key, value in `self`, the output in `output`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._tiny import encoder

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def _kind(module: Any, name: str) -> Kind:
    if getattr(module, "is_cross_attention", False) or name.endswith("crossattention"):
        return "cross"
    decodes = getattr(getattr(module.self, "config", None), "is_decoder", False)  # BLIP
    return "causal" if getattr(module.self, "is_causal", decodes) else "self"


def _without_heads(module: Any) -> None:
    from headprune.layouts._transformers import without_heads

    without_heads(module.self, gate=None, cross=_kind(module, "") == "cross")


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
    requires=("self.num_attention_heads",),
    untouched=("output.LayerNorm", "ln", "self_attn_layer_norm"),  # the last two: Megatron-BERT, XLM-RoBERTa-XL
    counts=(("self.num_attention_heads", "n_query_heads"), ("self.all_head_size", "query_width")),
    empty=_without_heads,
    families=FAMILIES,
)
