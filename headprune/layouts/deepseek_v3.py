"""DeepSeek-V3: latent attention; all heads compute keys and values from one shared latent."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import decoder


def _latents(module: Any) -> int:
    """Return numbers per token in the cache: the latent and the keys' rotated part."""
    return int(module.kv_lora_rank + module.qk_rope_head_dim)


_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "first_k_dense_replace": 2,  # no experts
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 3,
    "v_head_dim": 5,  # keys, values and rotated parts all differ in width
    "max_position_embeddings": 64,
}

FAMILIES = (
    ("deepseek_v3", decoder("DeepseekV3ForCausalLM", **_SIZES, q_lora_rank=6)),
    ("deepseek_v3-full-queries", decoder("DeepseekV3ForCausalLM", **_SIZES, q_lora_rank=None)),
)

LAYOUT = AttentionLayout(
    name="deepseek_v3",
    gate="o_proj",
    slabs=(
        # Queries come from the input, or from a latent.
        HeadSlab("q_proj", "out", "query", optional=True),
        HeadSlab("q_b_proj", "out", "query", optional=True),
        # A key and a value of head 0, then of head 1, ...
        HeadSlab("kv_b_proj", "out", ("key", "value"), "grouped"),
        HeadSlab("o_proj", "in", "context"),
    ),
    head_dim="qk_head_dim",
    value_dim="v_head_dim",
    key_dim="qk_nope_head_dim",  # all heads share the rotated part of a key
    kind="causal",
    requires=("kv_a_proj_with_mqa", "kv_lora_rank", "layer_idx"),
    # They compute the latents, which all heads share.
    untouched=("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
    counts=(("num_heads", "n_query_heads"),),
    cached=_latents,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
