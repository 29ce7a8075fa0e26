"""Vision transformers (ViT, DeiT, DINO, BEiT): `q_proj`, `k_proj`, `v_proj`, `o_proj`.

BEiT computes its position bias outside of the attention, per layer or once for all layers. It
arrives as a mask with a row per head. The bias tables are not cut; a cut attention takes its kept
heads' part of the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import AttentionLayout, separate_projections
from headprune.core.mixin import Mixin, mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import SIZES, images

if TYPE_CHECKING:
    from headprune.core.heads import Kind

#: Settings with which BEiT computes a position bias.
_BIASES = ("use_relative_position_bias", "use_shared_relative_position_bias")


class PresentHeadsOfMask(Mixin):
    """Put in front of a cut attention that gets a mask of all heads."""

    def forward(self: Any, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        from headprune.layouts._transformers import present_heads

        # [batch or 1, original heads, queries, keys]; a mask of one head is for all of them.
        if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[1] != 1:
            attention_mask = present_heads(self, attention_mask, 1)
        return super().forward(hidden_states, attention_mask, **kwargs)  # type: ignore[misc]


def _kind(module: Any, name: str) -> Kind:
    attribute = name.rpartition(".")[2]
    if "cross" in attribute or attribute == "encoder_attn":
        return "cross"
    return "self"


def _adapt(module: Any, model: Any) -> None:
    """Take the kept heads' part of the model's position bias (BEiT)."""
    # The settings tell; the table may lie outside of ``model``, if that is part of a larger model.
    config = getattr(module, "config", None)
    if any(getattr(config, name, False) for name in _BIASES):
        mix_in(module, PresentHeadsOfMask)


_SIZES: dict[str, Any] = {**SIZES, "patch_size": 4}

FAMILIES = (
    ("vit", images("ViTForImageClassification", **_SIZES)),
    ("deit", images("DeiTForImageClassification", **_SIZES)),
    ("dinov2", images("Dinov2ForImageClassification", **_SIZES)),
    ("dinov3", images("DINOv3ViTModel", labelled=False, **_SIZES)),
    ("beit", images("BeitForImageClassification", **_SIZES, use_relative_position_bias=True)),
    (
        "beit-shared-bias",
        images("BeitForImageClassification", **_SIZES, use_shared_relative_position_bias=True),
    ),
)

LAYOUT = AttentionLayout(
    name="vit",
    gate="o_proj",
    slabs=separate_projections("q_proj", "k_proj", "v_proj", "o_proj"),
    head_dim="head_dim",
    kind=_kind,
    requires=("head_dim", "scaling"),
    # Grouped queries, decoders, and attention with an inner width have other layouts.
    absent=("num_key_value_groups", "layer_idx", "inner_dim"),
    untouched=("sequence_reduction",),  # SegFormer's, of the input of keys and values
    counts=(
        ("num_attention_heads", "n_query_heads"),
        ("num_heads", "n_query_heads"),
        ("embed_dim", "query_width"),
    ),
    adapt=_adapt,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
