"""Falcon: fused `query_key_value`, group by group its queries, a key and a value; one group or
many, ALiBi or not."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, Cached, HeadSlab
from headprune.core.mixin import mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._grouped import POLICIES
from headprune.layouts._tiny import decoder


def _correct(module: Any, model: Any) -> None:
    """Of ALiBi biases, which arrive for all heads, those of the kept heads are taken; groups of
    unlike size are split one by one."""
    from headprune.layouts._alibi import SlicedAlibi
    from headprune.layouts._repeated import Split, repeat_

    if module.config.alibi and getattr(module, STATE_ATTRIBUTE).heads:
        mix_in(module, SlicedAlibi)
    repeat_(module, getattr(module, STATE_ATTRIBUTE).uneven, Split)


def _cached(module: Any) -> Cached:
    return "query" if module.new_decoder_architecture else "key/value"


def _falcon(**settings: Any) -> Any:
    given = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "bias": True}
    return decoder("FalconForCausalLM", **given | settings)


FAMILIES = (
    ("falcon", _falcon(new_decoder_architecture=True, num_kv_heads=3)),
    ("falcon-mqa", _falcon(multi_query=True)),
    ("falcon-alibi", _falcon(multi_query=False, alibi=True, parallel_attn=False)),
)

LAYOUT = AttentionLayout(
    name="falcon",
    gate="dense",
    slabs=(
        HeadSlab("query_key_value", "out", ("query", "key", "value"), "grouped"),
        HeadSlab("dense", "in", "context"),
    ),
    head_dim="head_dim",
    kind="causal",
    requires=("num_heads", "num_kv_heads", "inv_norm_factor", "config.alibi"),
    counts=(("num_heads", "n_query_heads"), ("num_kv_heads", "n_kv_heads")),
    policies=POLICIES,
    cached=_cached,
    adapt=_correct,
    empty=without_heads("dense"),
    families=FAMILIES,
)
