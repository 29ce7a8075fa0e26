"""Llama-style decoders (Llama, Mistral, Qwen ...): `q_proj`, `k_proj`, `v_proj`, `o_proj`."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab, separate_projections
from headprune.layouts._grouped import GROUPED, SIZES, repeat_keys, without_heads
from headprune.layouts._tiny import decoder, images_in_text

_WIDE = {**SIZES, "head_dim": 6}  # not hidden_size / num_attention_heads
_SLIDING = {
    **_WIDE,
    "sliding_window": 3,  # shorter than the 7 tokens of a batch
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2}

FAMILIES = (
    ("llama", decoder("LlamaForCausalLM", **SIZES)),
    ("mistral", decoder("MistralForCausalLM", **_WIDE, sliding_window=4)),
    ("mixtral", decoder("MixtralForCausalLM", **_EXPERTS, sliding_window=None)),
    ("qwen2", decoder("Qwen2ForCausalLM", **SIZES)),
    ("qwen3", decoder("Qwen3ForCausalLM", **_WIDE)),
    ("gemma2", decoder("Gemma2ForCausalLM", **_SLIDING, query_pre_attn_scalar=6)),
    ("gemma3", decoder("Gemma3ForCausalLM", **_SLIDING, query_pre_attn_scalar=6)),
    ("starcoder2", decoder("Starcoder2ForCausalLM", **SIZES)),
    # Granite scales its scores by a setting instead of the head's width.
    ("granite", decoder("GraniteForCausalLM", **SIZES, attention_multiplier=0.5)),
    ("cohere2", decoder("Cohere2ForCausalLM", **_SLIDING)),
    # Its last layer has no rotary positions.
    ("smollm3", decoder("SmolLM3ForCausalLM", **SIZES, no_rope_layers=[1, 1, 0])),
    ("gpt_oss", decoder("GptOssForCausalLM", **_EXPERTS, head_dim=6, sliding_window=4)),
    # A Llama that reads an image through a CLIP tower.
    (
        "llava",
        images_in_text(
            "LlavaForConditionalGeneration",
            text_config={
                "model_type": "llama",
                "vocab_size": 50,
                "pad_token_id": 0,
                "initializer_range": 0.3,
                **SIZES,
            },
            vision_config={
                "model_type": "clip_vision_model",
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 24,
                "image_size": 8,
                "patch_size": 4,
                "num_channels": 1,
            },
            vision_feature_layer=-1,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="llama",
    gate="o_proj",
    slabs=(
        *separate_projections("q_proj", "k_proj", "v_proj", "o_proj"),
        # One score per head that takes part in the softmax (GPT-OSS).
        HeadSlab("sinks", 0, "head", optional=True),
        # One gate per head (Laguna).
        HeadSlab("g_proj", "out", "head", optional=True),
    ),
    head_dim="head_dim",
    requires=("num_key_value_groups", "head_dim", "layer_idx"),
    per_head=("q_norm", "k_norm"),
    **GROUPED,
    adapt=repeat_keys,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
