"""Vision transformers of Transformers (ViT and its likes): q_proj, k_proj, v_proj, o_proj without grouped queries."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._tiny import images


def _without_heads(module: Any) -> None:
    from headprune.layouts._transformers import without_heads

    without_heads(module, gate="o_proj")


_SIZES: dict[str, Any] = {
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}

FAMILIES = (("vit", images("ViTForImageClassification", **_SIZES)),)

LAYOUT = AttentionLayout(
    name="vit",
    gate="o_proj",
    slabs=(
        HeadSlab("q_proj", "out", "query"),
        HeadSlab("k_proj", "out", "key"),
        HeadSlab("v_proj", "out", "value"),
        HeadSlab("o_proj", "in", "context"),
    ),
    head_dim="head_dim",
    requires=("num_attention_heads", "head_dim"),
    absent=("num_key_value_groups", "layer_idx"),
    counts=(("num_attention_heads", "n_query_heads"),),
    empty=_without_heads,
    families=FAMILIES,
)
