"""Phi-3: queries, keys and values fused in `qkv_proj`; it asks its configuration how many query
heads it has."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab
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


class LayerConfig:
    """The model's configuration as one layer sees it: with a number of heads of its own, and else
    as it is now."""

    def __init__(self, shared: Any, num_attention_heads: int) -> None:
        self.shared = shared
        self.num_attention_heads = num_attention_heads

    def __getattr__(self, name: str) -> Any:
        if name == "shared":  # a copy asks before it has one
            raise AttributeError(name)
        return getattr(self.shared, name)


def _own_head_count(module: Any, model: Any) -> None:
    """Each layer sees a configuration with its own number of query heads; keys are repeated as in
    Llama."""
    shared = module.config.shared if isinstance(module.config, LayerConfig) else module.config
    module.config = LayerConfig(shared, len(getattr(module, STATE_ATTRIBUTE).heads))
    repeat_keys(module, model)


FAMILIES = (("phi3", decoder("Phi3ForCausalLM", **SIZES)),)

LAYOUT = AttentionLayout(
    name="phi3",
    gate="o_proj",
    slabs=(
        HeadSlab("qkv_proj", "out", ("query", "key", "value")),
        HeadSlab("o_proj", "in", "context"),
    ),
    head_dim="head_dim",
    kind=kind,
    requires=(
        "num_key_value_groups",
        "num_key_value_heads",
        "layer_idx",
        "config.num_attention_heads",
    ),
    absent=SHARED_KEYS,
    counts=COUNTS,
    policies=POLICIES,
    adapt=_own_head_count,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
