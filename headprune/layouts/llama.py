"""Llama-style decoders (Llama, Mistral, Qwen, Gemma and their likes), grouped queries: the unit is a KV group."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._tiny import decoder

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def _takes_keys(module: Any) -> bool:
    """Whether it can attend to another sequence (T5Gemma, Mllama, Moonshine)."""
    arguments = inspect.signature(type(module).forward).parameters
    return not {"encoder_hidden_states", "cross_attention_states", "key_value_states"}.isdisjoint(arguments)


def _kind(module: Any, name: str) -> Kind:
    if _takes_keys(module):
        return "causal" if getattr(module, "is_causal", False) else "cross"
    return "causal" if getattr(module, "is_causal", True) else "self"


def _without_heads(module: Any) -> None:
    from headprune.layouts._transformers import without_heads

    if _takes_keys(module):  # each of them shares its cache with self-attention in a way of its own
        raise UnsupportedModel(type(module).__name__, "left with a head, for it attends to an encoder", "none kept")
    without_heads(module, gate="o_proj")


_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}

FAMILIES = (("llama", decoder("LlamaForCausalLM", **_SIZES)),)

LAYOUT = AttentionLayout(
    name="llama",
    gate="o_proj",
    slabs=(
        HeadSlab("q_proj", "out", "query"),
        HeadSlab("k_proj", "out", "key"),
        HeadSlab("v_proj", "out", "value"),
        HeadSlab("o_proj", "in", "context"),
    ),
    head_dim="head_dim",
    kind=_kind,
    requires=("num_key_value_groups", "head_dim", "layer_idx"),
    absent=("store_full_length_kv", "is_kv_shared_layer"),  # other layers read its keys (Gemma 3n and 4)
    per_head=("q_norm", "k_norm"),
    counts=(
        ("num_heads", "n_query_heads"),
        ("num_attention_heads", "n_query_heads"),
        ("num_key_value_heads", "n_kv_heads"),
        ("num_key_value_groups", "group_size"),
    ),
    policies=("group", "balanced"),
    empty=_without_heads,
    families=FAMILIES,
)
