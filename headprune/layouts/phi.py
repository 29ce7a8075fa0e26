"""Phi: as Llama, with another output projection (`dense`) and norms (`q_layernorm`)."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, separate_projections
from headprune.layouts._grouped import GROUPED, SIZES, repeat_keys, without_heads
from headprune.layouts._tiny import decoder

# With norms, which are off by default.
FAMILIES = (("phi", decoder("PhiForCausalLM", **SIZES, qk_layernorm=True)),)

LAYOUT = AttentionLayout(
    name="phi",
    gate="dense",
    slabs=separate_projections("q_proj", "k_proj", "v_proj", "dense"),
    head_dim="head_dim",
    requires=("num_key_value_groups", "layer_idx"),
    per_head=("q_layernorm", "k_layernorm"),
    **GROUPED,
    adapt=repeat_keys,
    empty=without_heads("dense"),
    families=FAMILIES,
)
