"""T5, mT5, Switch: `q`, `k`, `v`, `o`; all layers share one position bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headprune.core.layout import AttentionLayout, separate_projections
from headprune.core.mixin import mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import encoder_decoder

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def kind_of(module: Any, name: str) -> Kind:
    """Return the kind of attention from the module's flags."""
    if module.is_causal:
        return "causal"
    # In a decoder, attention that is not causal reads the encoder's output.
    return "cross" if module.is_decoder else "self"


def _adapt(module: Any, model: Any) -> None:
    """Take the kept heads' part of the position bias; pass all of it on."""
    from headprune.layouts._t5 import WithPositionBias

    mix_in(module, WithPositionBias)


SIZES: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}

FAMILIES = (
    ("t5", encoder_decoder("T5ForConditionalGeneration", **SIZES)),
    ("mt5", encoder_decoder("MT5ForConditionalGeneration", **SIZES)),
    (
        "switch_transformers",
        encoder_decoder(
            "SwitchTransformersForConditionalGeneration",
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_experts=2,
            expert_capacity=64,  # no expert drops a token
            **SIZES,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="t5",
    gate="o",
    slabs=separate_projections("q", "k", "v", "o"),
    head_dim="key_value_proj_dim",
    kind=kind_of,
    requires=("compute_bias", "is_decoder"),
    absent=(
        "_shape",  # UMT5, where every layer has its own table
        "local_radius",  # LongT5's local attention works on blocks
    ),
    untouched=("relative_attention_bias",),  # other layers need every head's bias
    counts=(("n_heads", "n_query_heads"), ("inner_dim", "query_width")),
    adapt=_adapt,
    empty=without_heads("o", kind="_t5.WithoutHeadsWithPositionBias", attends=kind_of),
    families=FAMILIES,
)
