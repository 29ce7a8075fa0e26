"""BLOOM: `query_key_value` fused head by head; ALiBi is an argument, the residual added inside."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab
from headprune.core.mixin import mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import decoder


def _slice_alibi(module: Any, model: Any) -> None:
    """Take the kept heads' part of the ALiBi biases, which the model computes for all heads."""
    from headprune.layouts._alibi import SlicedAlibi

    # Without heads, no bias is read.
    if getattr(module, STATE_ATTRIBUTE).heads:
        mix_in(module, SlicedAlibi)


FAMILIES = (("bloom", decoder("BloomForCausalLM", hidden_size=16, n_layer=3, n_head=4)),)

LAYOUT = AttentionLayout(
    name="bloom",
    gate="dense",
    slabs=(
        # A query, a key and a value of head 0, then of head 1, ...
        HeadSlab("query_key_value", "out", ("query", "key", "value"), "grouped"),
        HeadSlab("dense", "in", "context"),
    ),
    head_dim="head_dim",
    kind="causal",
    requires=("num_heads", "inv_norm_factor", "pretraining_tp"),
    absent=("slow_but_exact",),  # then its code never calls the output projection
    counts=(("num_heads", "n_query_heads"),),
    adapt=_slice_alibi,
    empty=without_heads("dense", kind="_alibi.OnlyResidual"),
    families=FAMILIES,
)
