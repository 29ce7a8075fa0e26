"""BLOOM: fused `query_key_value` head by head, ALiBi as an argument, the residual added inside."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab
from headprune.core.mixin import mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import decoder


def _slice_alibi(module: Any, model: Any) -> None:
    """Of the ALiBi biases, which arrive for all heads, those of the kept heads are taken."""
    from headprune.layouts._alibi import SlicedAlibi

    if getattr(module, STATE_ATTRIBUTE).heads:
        mix_in(module, SlicedAlibi)


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
    empty=without_heads("dense", kind="_alibi.OnlyResidual"),
    families=FAMILIES,
)
