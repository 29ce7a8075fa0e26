"""GPT-2: queries, keys and values fused in one Conv1D (`c_attn`); output in a Conv1D (`c_proj`)."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import decoder

FAMILIES = (("gpt2", decoder("GPT2LMHeadModel", n_embd=16, n_layer=3, n_head=4, n_positions=64)),)

LAYOUT = AttentionLayout(
    name="gpt2",
    gate="c_proj",
    slabs=(
        # All queries, then all keys, then all values; a Conv1D's weight is [in, out].
        HeadSlab("c_attn", "out", ("query", "key", "value")),
        HeadSlab("c_proj", "in", "context"),
    ),
    head_dim="head_dim",
    kind="causal",
    requires=("split_size", "num_heads"),
    # Cross-attention has `q_attn`. GPT-BigCode has `kv_dim`, and orders `c_attn` head by head.
    absent=("q_attn", "kv_dim"),
    counts=(("num_heads", "n_query_heads"), ("split_size", "query_width")),
    empty=without_heads("c_proj"),
    families=FAMILIES,
)
