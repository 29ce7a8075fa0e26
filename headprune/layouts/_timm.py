"""timm's plain attention for any number of heads, and the proof that a class of older code computes the same."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headprune.core.layout import STATE_ATTRIBUTE
from headprune.core.mixin import Mixin
from headprune.layouts._once import once
from headprune.layouts._stand_in import agree, linear, stand_in, wave

_N_HEADS, _WIDTH = 2, 3


class Plain(Mixin, nn.Module):
    """Put in front of older code that takes the heads' total width from its input."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return plain(self, getattr(self, STATE_ATTRIBUTE).widths[0], x, attn_mask, is_causal)


def plain(module: Any, head_dim: int, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, head_dim)).permute(2, 0, 3, 1, 4)
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    dropout = module.attn_drop.p if module.training else 0.0
    heads = scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal, scale=module.scale)
    out: Tensor = module.proj_drop(module.proj(heads.transpose(1, 2).flatten(2)))
    return out


@once
def is_plain(module: nn.Module) -> bool:
    """Whether the ``forward`` of the module's class computes what ``plain`` does: both run on a small stand-in.

    Structure alone does not tell: NesT's attention has the same parts and lays the heads' outputs inside out.
    """
    width = _N_HEADS * _WIDTH
    parts: dict[str, nn.Module] = {"qkv": linear(width, 3 * width), "proj": linear(width, width, 1)}
    for name in ("q_norm", "k_norm"):
        if not isinstance(getattr(module, name, nn.Identity()), nn.Identity):
            parts[name] = nn.LayerNorm(_WIDTH, elementwise_affine=False)
    small = stand_in(module, parts, num_heads=_N_HEADS, head_dim=_WIDTH, scale=_WIDTH**-0.5)
    x = wave(1, 4, width)
    return agree(lambda: plain(small, _WIDTH, x), lambda: small.forward(x))
