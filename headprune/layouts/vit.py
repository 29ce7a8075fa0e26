"""Vision transformers of Transformers (ViT and its likes): q_proj, k_proj, v_proj, o_proj without grouped queries."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab


def _without_heads(module: Any) -> None:
    from headprune.layouts._transformers import without_heads

    without_heads(module, gate="o_proj")


def tiny(seed: int) -> tuple[Any, Any]:
    """Three layers of 4 heads on 8 x 8 images, image classification."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=24,
        num_labels=3,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        batch = {"pixel_values": torch.randn(3, 1, 8, 8), "labels": torch.tensor([0, 2, 1])}
        return ViTForImageClassification(config), batch


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
    tiny=tiny,
)
