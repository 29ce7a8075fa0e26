"""Falcon: `query_key_value` fused group by group (queries, key, value), with or without ALiBi."""

from __future__ import annotations

from typing import Any

from headprune.core.heads import POLICIES
from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, Cached, HeadSlab
from headprune.core.mixin import mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import decoder


def _adapt(module: Any, model: Any) -> None:
    """Take the kept heads' ALiBi biases; split groups of different sizes one by one."""
    from headprune.layouts._alibi import SlicedAlibi
    from headprune.layouts._repeated import Split, repeat_

    state = getattr(module, STATE_ATTRIBUTE)
    # Without heads, no bias is read.
    if module.config.alibi and state.heads:
        mix_in(module, SlicedAlibi)
    repeat_(module, state.uneven, Split)


def _cached(module: Any) -> Cached:
    # The newer architecture repeats keys and values before they are cached.
    return "query" if module.new_decoder_architecture else "key/value"


def _falcon(**settings: Any) -> Any:
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "bias": True}
    return decoder("FalconForCausalLM", **sizes | settings)


FAMILIES = (
    # Falcon-40B has several groups, Falcon-7B has one, Falcon-RW has one per head.
    ("falcon", _falcon(new_decoder_architecture=True, num_kv_heads=3)),
    ("falcon-mqa", _falcon(multi_query=True)),
    ("falcon-alibi", _falcon(multi_query=False, alibi=True, parallel_attn=False)),
)

LAYOUT = AttentionLayout(
    name="falcon",
    gate="dense",
    slabs=(
        # The queries, a key and a value of group 0, then of group 1, ...
        HeadSlab("query_key_value", "out", ("query", "key", "value"), "grouped"),
        HeadSlab("dense", "in", "context"),
    ),
    head_dim="head_dim",
    kind="causal",
    requires=("num_heads", "num_kv_heads", "inv_norm_factor", "config.alibi"),
    counts=(("num_heads", "n_query_heads"), ("num_kv_heads", "n_kv_heads")),
    policies=POLICIES,
    cached=_cached,
    adapt=_adapt,
    empty=without_heads("dense"),
    families=FAMILIES,
)
