"""BLIP's vision tower: queries, keys and values fused in `qkv`; output in `projection`.

BLIP's code reshapes the heads to the width of its input, so a cut attention runs other code. Its
text tower has the layout ``bert``.
"""

from __future__ import annotations

from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import Mixin, mix_in
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import SIZES, images_and_text


class FewerHeads(Mixin):
    """Put in front of a cut attention: compute the same for the kept heads."""

    def forward(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        heads = self.qkv(hidden_states).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head_dim]
        weights = self.dropout((query @ key.transpose(-1, -2) * self.scale).softmax(-1))
        return self.projection((weights @ value).transpose(1, 2).flatten(2)), weights


def _adapt(module: Any, model: Any) -> None:
    """Run the same attention for the kept heads; BLIP's code needs the uncut width."""
    mix_in(module, FewerHeads)


_SIZES: dict[str, Any] = {**SIZES, "num_hidden_layers": 2}
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}

FAMILIES = (
    (
        "blip",
        images_and_text(
            "BlipForConditionalGeneration",
            {**_SIZES, "patch_size": 4},
            {**_SIZES, **_TOKENS, "encoder_hidden_size": 16, "max_position_embeddings": 32},
            channels=3,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="blip",
    gate="projection",
    slabs=(
        # All queries, then all keys, then all values.
        HeadSlab("qkv", "out", ("query", "key", "value")),
        HeadSlab("projection", "in", "context"),
    ),
    head_dim="head_dim",
    # ``FewerHeads`` calls `dropout` as a module.
    requires=("num_heads", "scale", "embed_dim", "dropout.p"),
    counts=(("num_heads", "n_query_heads"),),
    adapt=_adapt,
    empty=without_heads("projection"),
    families=FAMILIES,
)
