"""timm's models: what is exact, and what is refused because its code or its norms span the heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts._timm import Attention, OlderAttention
from headprune.layouts.timm import LAYOUT
from headprune.model.sites import reason_against
from tests.laws.support import CLOSE, ragged, shaken


class Nested(OlderAttention):
    """NesT's: the same parts, and the heads' outputs inside out."""

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.heads(x).transpose(2, 3).reshape(x.shape))


class Rotated(OlderAttention):
    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        return super().forward(x if rope is None else x + rope)


class Talking(OlderAttention):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.proj_l = nn.Linear(num_heads, num_heads)


class Normed(Attention):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)

    def heads(self, x: Tensor) -> Tensor:
        return self.norm(super().heads(x).flatten(2)).view(*x.shape[:2], self.num_heads, -1)


REASONS = {
    Nested: "one that computes something else",
    Rotated: "one that takes rope",
    Talking: "must be made of qkv, proj, got proj_l.weight",
    Normed: "it has 'norm.",
}


@pytest.mark.parametrize("kind", REASONS)
def test_look_alikes_are_refused(kind: Any) -> None:
    assert reason_against(LAYOUT, OlderAttention(12, 4)) is None
    assert REASONS[kind] in str(reason_against(LAYOUT, kind(12, 4)))


def test_newer_code_keeps_its_class_and_older_code_is_replaced() -> None:
    for kind, replaced in ((Attention, False), (OlderAttention, True)):
        model = nn.Sequential(shaken(kind(12, 4, norms=True))).double().eval()
        small, x = copy.deepcopy(model), torch.randn(2, 5, 12).double()
        mask = hp.HeadMask.from_keep({"0": [0, 2, 3]}, {"0": 4})
        with hp.gated(model, mask):
            expected = model(x)
        hp.prune_(small, mask)
        assert_close(small(x), expected, **CLOSE)
        assert (type(small[0]) is not kind) == replaced
        assert isinstance(small[0], kind)
        assert getattr(small[0], "attn_dim", 9) == 9


@pytest.fixture
def timm() -> Any:
    return pytest.importorskip("timm", exc_type=ImportError)


MODELS = {
    "plain": ("vit_tiny_patch16_224", {}),
    "norms of queries and keys": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "scale_norm": ("vit_tiny_patch16_224", {"scale_attn_norm": True}),
    "convit": ("convit_tiny", {}),
    "eva": ("eva02_tiny_patch14_224", {}),
    "beit": ("beit_base_patch16_224", {}),
    "swin": ("swin_tiny_patch4_window7_224", {}),
    "nest": ("nest_tiny_jx", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_real_models(timm: Any, name: str) -> None:
    model, settings = MODELS[name]
    built = timm.create_model(model, **({"depth": 2} if model.startswith("vit") else {}), **settings)
    if name not in ("plain", "norms of queries and keys", "convit"):
        with pytest.raises(UnsupportedModel, match="fit no layout"):
            hp.find_sites(built)
        return
    built = shaken(built, norms=False).double().eval()
    small, sites = copy.deepcopy(built), hp.find_sites(built)
    x, mask = torch.randn(1, *built.default_cfg["input_size"]).double(), ragged(sites)
    with torch.no_grad():
        full = built(x)
        with hp.gated(built, mask, sites):
            expected = built(x)
        hp.prune_(small, mask, sites=sites)
        assert_close(small(x), expected, **CLOSE)
        assert (full - expected).abs().max() > 1e-6
