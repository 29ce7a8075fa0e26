"""OLMo 2 and its likes: norms over all heads together, so queries and keys stay whole up to the
norm."""

from __future__ import annotations

from typing import Any

from headprune.core.errors import InvalidValue
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


def _head_dim(module: Any) -> int:
    for norm, projection in ((module.q_norm, module.q_proj), (module.k_norm, module.k_proj)):
        shape, n_rows = tuple(norm.weight.shape), projection.weight.shape[0]
        if shape != (n_rows,) or (norm is module.q_norm and n_rows == module.head_dim):
            raise InvalidValue(
                "its norms",
                f"over all heads together, of width {n_rows}",
                f"weights of shape {shape}",
            )
    return int(module.head_dim)


def _pick_after_norm(module: Any, model: Any) -> None:
    """All queries and keys pass the norms, then those of the kept heads are taken; keys are
    repeated as in Llama."""
    from headprune.layouts._olmo2 import pick_

    state = getattr(module, STATE_ATTRIBUTE)
    group = state.n_query_heads // state.n_kv_heads
    pick_(module.q_norm, state.heads, module.head_dim)
    pick_(module.k_norm, tuple(sorted({h // group for h in state.heads})), module.head_dim)
    repeat_keys(module, model)


FAMILIES = (
    ("olmo2", decoder("Olmo2ForCausalLM", **SIZES)),
    ("olmoe", decoder("OlmoeForCausalLM", **SIZES, num_experts=3, num_experts_per_tok=2)),
)

LAYOUT = AttentionLayout(
    name="olmo2",
    gate="o_proj",
    slabs=(
        HeadSlab("v_proj", "out", "value"),
        HeadSlab("o_proj", "in", "context"),
    ),
    head_dim=_head_dim,
    kind=kind,
    requires=(
        "num_key_value_groups",
        "head_dim",
        "layer_idx",
        "q_proj",
        "k_proj",
        "q_norm",
        "k_norm",
    ),
    absent=SHARED_KEYS,
    untouched=("q_proj", "k_proj", "q_norm", "k_norm"),
    counts=COUNTS,
    policies=POLICIES,
    adapt=_pick_after_norm,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
