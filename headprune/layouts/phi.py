"""Phi: as Llama, with another output projection (`dense`) and norms (`q_layernorm`)."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._grouped import (
    COUNTS,
    POLICIES,
    SHARED_KEYS,
    SIZES,
    kind,
    repeat_keys,
    without_heads,
)
from headprune.layouts._tiny import decoder

# With norms, which are off by default.
FAMILIES = (("phi", decoder("PhiForCausalLM", **SIZES, qk_layernorm=True)),)

LAYOUT = AttentionLayout(
    name="phi",
    gate="dense",
    slabs=(
        HeadSlab("q_proj", "out", "query"),
        HeadSlab("k_proj", "out", "key"),
        HeadSlab("v_proj", "out", "value"),
        HeadSlab("dense", "in", "context"),
    ),
    head_dim="head_dim",
    kind=kind,
    requires=("num_key_value_groups", "layer_idx"),
    absent=SHARED_KEYS,
    per_head=("q_layernorm", "k_layernorm"),
    counts=COUNTS,
    policies=POLICIES,
    adapt=repeat_keys,
    empty=without_heads("dense"),
    families=FAMILIES,
)
