"""timm's plain attention for any number of heads, and the proof that a class of older code computes
the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headprune.core.layout import STATE_ATTRIBUTE
from headprune.core.mixin import Mixin
from headprune.layouts._once import once
from headprune.layouts._proofs import EXAMPLES, HEADS, QUERIES, WIDTH
from headprune.layouts._stand_in import agree, linear, same, stand_in, tried, wave


class Plain(Mixin, nn.Module):
    """Put in front of older code that takes the heads' total width from its input."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return plain(self, getattr(self, STATE_ATTRIBUTE).widths[0], x, attn_mask, is_causal)


def plain(
    module: Any, head_dim: int, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    if (
        attn_mask is not None
        and attn_mask.dtype == torch.bool
        and not getattr(module, "fused_attn", True)
    ):
        attn_mask = attn_mask.to(
            x.dtype
        )  # older code without a fused kernel adds every mask to the scores
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, head_dim)).permute(2, 0, 3, 1, 4)
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    dropout = module.attn_drop.p if module.training else 0.0
    heads = scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal, scale=module.scale)
    out: Tensor = module.proj_drop(module.proj(heads.transpose(1, 2).flatten(2)))
    return out


@once
def is_plain(module: nn.Module) -> bool:
    """Whether the ``forward`` of the module's class computes what ``plain`` does, under every mask
    that it takes: both run on a small stand-in.

    Structure alone does not tell: NesT's attention has the same parts and lays the heads' outputs
    inside out.
    """
    n_heads = HEADS[1]
    width = n_heads * WIDTH
    parts: dict[str, nn.Module] = {"qkv": linear(width, 3 * width), "proj": linear(width, width, 1)}
    for name in ("q_norm", "k_norm"):
        if not isinstance(getattr(module, name, nn.Identity()), nn.Identity):
            parts[name] = nn.LayerNorm(WIDTH, elementwise_affine=False)
    small = stand_in(module, parts, num_heads=n_heads, head_dim=WIDTH, scale=WIDTH**-0.5)
    x = wave(EXAMPLES, QUERIES, width)
    if not agree(lambda: plain(small, WIDTH, x), lambda: small.forward(x)):
        return False
    for masked in _masked(small):
        found = tried(lambda masked=masked: small.forward(x, **masked))  # type: ignore[misc]
        if found is not None and not same(found, plain(small, WIDTH, x, **masked)):
            return False
    return True


def _masked(module: Any) -> Iterator[dict[str, Any]]:
    """Masks as timm's attentions take them, those of a module's arguments."""
    taken = inspect.signature(module.forward).parameters
    causal = torch.ones(QUERIES, QUERIES).tril().bool()
    padding = (torch.arange(QUERIES) < torch.tensor([2, 4])[:, None])[:, None, None]
    for seen in (causal, padding, padding & causal):
        yield from ({"attn_mask": m} for m in (seen, seen.float().log()) if "attn_mask" in taken)
    if "is_causal" in taken:
        yield {"is_causal": True}
