"""GPT-2: queries, keys and values fused in one Conv1D (`c_attn`), the output projection a Conv1D
too (`c_proj`)."""

from __future__ import annotations

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import decoder

FAMILIES = (("gpt2", decoder("GPT2LMHeadModel", n_embd=16, n_layer=3, n_head=4, n_positions=64)),)

LAYOUT = AttentionLayout(
    name="gpt2",
    gate="c_proj",
    slabs=(
        HeadSlab("c_attn", "out", ("query", "key", "value")),
        HeadSlab("c_proj", "in", "context"),
    ),
    head_dim="head_dim",
    kind="causal",
    requires=("split_size", "num_heads"),
    absent=("q_attn", "kv_dim"),  # cross-attention; GPT-BigCode, which lays c_attn out head by head
    counts=(("num_heads", "n_query_heads"), ("split_size", "query_width")),
    empty=without_heads("c_proj"),
    families=FAMILIES,
)
