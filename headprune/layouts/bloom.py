"""BLOOM: fused `query_key_value` head by head, ALiBi as an argument, the residual added inside."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab
from headprune.layouts._tiny import decoder


def _slice_alibi(module: Any, model: Any) -> None:
    """Of the ALiBi biases, which arrive for all heads, those of the kept heads are taken."""
    from headprune.layouts._alibi import SlicedAlibi
    from headprune.layouts._transformers import put_in_front

    if getattr(module, STATE_ATTRIBUTE).heads:
        put_in_front(module, SlicedAlibi)


def _without_heads(module: Any) -> None:
    from headprune.layouts._alibi import OnlyResidual
    from headprune.layouts._transformers import without_heads

    without_heads(module, gate="dense", kind=OnlyResidual)


FAMILIES = (("bloom", decoder("BloomForCausalLM", hidden_size=16, n_layer=3, n_head=4)),)

LAYOUT = AttentionLayout(
    name="bloom",
    gate="dense",
    slabs=(
        HeadSlab("query_key_value", "out", ("query", "key", "value"), "grouped"),
        HeadSlab("dense", "in", "context"),
    ),
    head_dim="head_dim",
    kind="causal",
    requires=("num_heads", "inv_norm_factor", "pretraining_tp"),
    absent=("slow_but_exact",),  # passes by the output projection
    counts=(("num_heads", "n_query_heads"),),
    adapt=_slice_alibi,
    empty=_without_heads,
    families=FAMILIES,
)
