"""DeepSeek-V3: latent attention; keys and values of each head are made from a latent that all heads
share."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import decoder


def _latents(module: Any) -> int:
    """Numbers a token in the cache: the latent of keys and values, and the rotated part of the
    keys, once for all."""
    return int(module.kv_lora_rank + module.qk_rope_head_dim)


_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 3,
    "v_head_dim": 5,
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
        HeadSlab("q_proj", "out", "query", optional=True),
        HeadSlab("q_b_proj", "out", "query", optional=True),
        HeadSlab("kv_b_proj", "out", ("key", "value"), "grouped"),
        HeadSlab("o_proj", "in", "context"),
    ),
    head_dim="qk_head_dim",
    value_dim="v_head_dim",
    key_dim="qk_nope_head_dim",
    kind="causal",
    requires=("kv_a_proj_with_mqa", "kv_lora_rank", "layer_idx"),
    untouched=("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
    counts=(("num_heads", "n_query_heads"),),
    cached=_latents,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
