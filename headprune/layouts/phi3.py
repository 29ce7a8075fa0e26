"""Phi-3: `qkv_proj` is fused; the number of query heads comes from the configuration."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab
from headprune.layouts._grouped import GROUPED, SIZES, repeat_keys, without_heads
from headprune.layouts._tiny import decoder


class LayerConfig:
    """The model's configuration for one layer, with that layer's number of query heads."""

    def __init__(self, shared: Any, num_attention_heads: int) -> None:
        self.shared = shared
        self.num_attention_heads = num_attention_heads

    def __getattr__(self, name: str) -> Any:
        # While it is copied or unpickled, it has no ``shared`` yet; this would never end.
        if name == "shared":
            raise AttributeError(name)
        return getattr(self.shared, name)


def _own_head_count(module: Any, model: Any) -> None:
    """Give each layer a configuration with its own head count; repeat keys as in Llama."""
    shared = module.config
    # A module that was cut before has such a configuration already.
    if isinstance(shared, LayerConfig):
        shared = shared.shared
    module.config = LayerConfig(shared, len(getattr(module, STATE_ATTRIBUTE).heads))
    repeat_keys(module, model)


FAMILIES = (("phi3", decoder("Phi3ForCausalLM", **SIZES)),)

LAYOUT = AttentionLayout(
    name="phi3",
    gate="o_proj",
    slabs=(
        # All queries, then all keys, then all values.
        HeadSlab("qkv_proj", "out", ("query", "key", "value")),
        HeadSlab("o_proj", "in", "context"),
    ),
    head_dim="head_dim",
    requires=(
        "num_key_value_groups",
        "num_key_value_heads",
        "layer_idx",
        "config.num_attention_heads",
    ),
    **GROUPED,
    adapt=_own_head_count,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
