"""GPT-2: queries, keys and values fused in one Conv1D (`c_attn`), the output projection a Conv1D too (`c_proj`)."""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab


def _without_heads(module: Any) -> None:
    from headprune.layouts._transformers import without_heads

    without_heads(module, gate="c_proj")


def tiny(seed: int) -> tuple[Any, Any]:
    """Three layers of 4 heads, causal language model, one padded example."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=3,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mask = torch.tensor([[1] * 7, [1] * 7, [1, 1, 1, 1, 0, 0, 0]])
        batch = {"input_ids": torch.randint(3, 50, (3, 7)) * mask, "attention_mask": mask}
        return GPT2LMHeadModel(config), batch


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
    empty=_without_heads,
    tiny=tiny,
)
