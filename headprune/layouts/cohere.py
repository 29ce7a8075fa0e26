"""Cohere's Command R+: as Llama, with norms that have separate weights for every head."""

from __future__ import annotations

from typing import Any

from headprune.core.errors import InvalidValue
from headprune.core.layout import AttentionLayout, HeadSlab, separate_projections
from headprune.layouts._grouped import GROUPED, SIZES, repeat_keys, without_heads
from headprune.layouts._tiny import decoder


def _head_dim(module: Any) -> int:
    """Return the width of a head; refuse norms without a row per head."""
    for norm in (module.q_norm, module.k_norm):
        shape = tuple(norm.weight.shape)
        if len(shape) != 2 or shape[1] != module.head_dim:
            raise InvalidValue(
                "its norms", f"of weights [heads, {module.head_dim}]", f"weights of shape {shape}"
            )
    return int(module.head_dim)


FAMILIES = (("cohere-norms", decoder("CohereForCausalLM", **SIZES, use_qk_norm=True)),)

LAYOUT = AttentionLayout(
    name="cohere",
    gate="o_proj",
    slabs=(
        *separate_projections("q_proj", "k_proj", "v_proj", "o_proj"),
        # ``requires`` below makes both norms mandatory.
        HeadSlab("q_norm.weight", 0, "head", optional=True),
        HeadSlab("k_norm.weight", 0, "kv_head", optional=True),
    ),
    head_dim=_head_dim,
    requires=("num_key_value_groups", "head_dim", "layer_idx", "q_norm.weight", "k_norm.weight"),
    **GROUPED,
    adapt=repeat_keys,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
