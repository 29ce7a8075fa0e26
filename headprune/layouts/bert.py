"""BERT-style encoders (BERT, RoBERTa, ELECTRA and their likes): query, key, value in `self`, the output in `output`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import AttentionLayout, HeadSlab

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def _kind(module: Any) -> Kind:
    if getattr(module, "is_cross_attention", False):
        return "cross"
    return "causal" if getattr(module.self, "is_causal", False) else "self"


def _without_heads(module: Any) -> None:
    from headprune.layouts._transformers import without_heads

    without_heads(module.self, gate=None, cross=_kind(module) == "cross")


def tiny(seed: int) -> tuple[Any, Any]:
    """Three layers of 4 heads, sequence classification, one padded example."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=32,
        num_labels=3,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mask = torch.tensor([[1] * 7, [1] * 7, [1, 1, 1, 1, 0, 0, 0]])
        batch = {"input_ids": torch.randint(1, 50, (3, 7)) * mask, "attention_mask": mask}
        return BertForSequenceClassification(config), {**batch, "labels": torch.tensor([0, 2, 1])}


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
    untouched=("output.LayerNorm",),
    counts=(("self.num_attention_heads", "n_query_heads"), ("self.all_head_size", "query_width")),
    empty=_without_heads,
    tiny=tiny,
)
