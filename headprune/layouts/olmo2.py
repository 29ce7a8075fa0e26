"""OLMo 2, OLMoE: norms span all heads, so kept heads are picked after the norms."""

from __future__ import annotations

from typing import Any

from headprune.core.errors import InvalidValue
from headprune.core.layout import STATE_ATTRIBUTE, AttentionLayout, HeadSlab
from headprune.layouts._grouped import GROUPED, SIZES, repeat_keys, without_heads
from headprune.layouts._tiny import decoder


def _head_dim(module: Any) -> int:
    """Return the width of a head; refuse norms that do not span all heads."""
    for norm, projection in ((module.q_norm, module.q_proj), (module.k_norm, module.k_proj)):
        shape = tuple(norm.weight.shape)
        n_rows = projection.weight.shape[0]
        # With a single query head, a norm per head has this shape too.
        single_head = norm is module.q_norm and n_rows == module.head_dim
        if shape != (n_rows,) or single_head:
            must = f"over all heads together, of width {n_rows}"
            raise InvalidValue("its norms", must, f"weights of shape {shape}")
    return int(module.head_dim)


def _pick_after_norm(module: Any, model: Any) -> None:
    """Take the kept heads' queries and keys after the norms; repeat keys as in Llama."""
    from headprune.layouts._olmo2 import pick_

    state = getattr(module, STATE_ATTRIBUTE)
    group = state.n_query_heads // state.n_kv_heads
    kv_heads = sorted({head // group for head in state.heads})
    pick_(module.q_norm, state.heads, module.head_dim)
    pick_(module.k_norm, tuple(kv_heads), module.head_dim)
    repeat_keys(module, model)


FAMILIES = (
    ("olmo2", decoder("Olmo2ForCausalLM", **SIZES)),
    ("olmoe", decoder("OlmoeForCausalLM", **SIZES, num_experts=3, num_experts_per_tok=2)),
)

LAYOUT = AttentionLayout(
    name="olmo2",
    gate="o_proj",
    # The projections of queries and keys are not cut, because their norms need every head.
    slabs=(
        HeadSlab("v_proj", "out", "value"),
        HeadSlab("o_proj", "in", "context"),
    ),
    head_dim=_head_dim,
    requires=(
        "num_key_value_groups",
        "head_dim",
        "layer_idx",
        "q_proj",
        "k_proj",
        "q_norm",
        "k_norm",
    ),
    untouched=("q_proj", "k_proj", "q_norm", "k_norm"),
    **GROUPED,
    adapt=_pick_after_norm,
    empty=without_heads("o_proj"),
    families=FAMILIES,
)
