"""Run timm's plain attention with any heads, and prove that older code equals it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headprune.core.layout import STATE_ATTRIBUTE
from headprune.core.mixin import Mixin
from headprune.layouts._once import once
from headprune.layouts._proofs import EXAMPLES, HEAD_COUNTS, HEAD_DIM, QUERIES
from headprune.layouts._stand_in import (
    first_tensor,
    fixed_linear,
    fixed_values,
    nearly_equal,
    outputs_agree,
    stand_in,
)


class Plain(Mixin, nn.Module):
    """Put in front of older code, which takes the heads' total width from its input."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return plain(self, getattr(self, STATE_ATTRIBUTE).widths[0], x, attn_mask, is_causal)


def plain(
    module: Any, head_dim: int, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Compute timm's plain attention with a module's parts; takes and returns [batch, length, dim].

    Args:
        module: A module with ``qkv``, ``proj`` and timm's other parts.
        head_dim: Width of a head.
        x: The input.
        attn_mask: Boolean, or added to the scores.
        is_causal: Whether later tokens are hidden.
    """
    fused = getattr(module, "fused_attn", True)
    # Older code without a fused kernel adds every mask to the scores.
    if not fused and attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(x.dtype)
    qkv = module.qkv(x).unflatten(-1, (3, module.num_heads, head_dim))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head_dim]
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    dropout = module.attn_drop.p if module.training else 0.0
    heads = scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal, scale=module.scale)
    out: Tensor = module.proj_drop(module.proj(heads.transpose(1, 2).flatten(2)))
    return out


@once
def is_plain(module: nn.Module) -> bool:
    """Return whether a module's class computes what ``plain`` does, under every mask it accepts."""
    # Structure does not show it: NesT has the same parts and orders the heads' outputs differently.
    n_heads = HEAD_COUNTS[1]
    width = n_heads * HEAD_DIM

    # 1. A stand-in with small parts.
    parts: dict[str, nn.Module] = {
        "qkv": fixed_linear(width, 3 * width),
        "proj": fixed_linear(width, width, 1),
    }
    for name in ("q_norm", "k_norm"):
        if not isinstance(getattr(module, name, nn.Identity()), nn.Identity):
            parts[name] = nn.LayerNorm(HEAD_DIM, elementwise_affine=False)
    small = stand_in(module, parts, num_heads=n_heads, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)

    # 2. The same output without a mask.
    x = fixed_values(EXAMPLES, QUERIES, width)
    if not outputs_agree(lambda: plain(small, HEAD_DIM, x), lambda: small.forward(x)):
        return False

    # 3. The same output under every mask, except where its code fails.
    for masked in _mask_arguments(small):
        output = first_tensor(partial(small.forward, x, **masked))
        if output is not None and not nearly_equal(output, plain(small, HEAD_DIM, x, **masked)):
            return False
    return True


def _mask_arguments(module: Any) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments with masks that the module's ``forward`` accepts."""
    accepted = inspect.signature(module.forward).parameters
    if "attn_mask" in accepted:
        causal = torch.ones(QUERIES, QUERIES).tril().bool()
        # [examples, 1, 1, keys]
        padding = (torch.arange(QUERIES) < torch.tensor([2, 4])[:, None])[:, None, None]
        for visible in (causal, padding, padding & causal):
            yield {"attn_mask": visible}
            # As scores: log 1 = 0 keeps a key, log 0 = -inf hides it.
            yield {"attn_mask": visible.float().log()}
    if "is_causal" in accepted:
        yield {"is_causal": True}
