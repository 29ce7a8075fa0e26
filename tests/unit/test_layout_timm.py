"""timm's models: what is exact, and what is refused because its code or its norms span the
heads."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts._tiny_timm import Attention, AttentionRope, OlderAttention
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


#: Heads to keep under a policy, and the counts after: query heads, key/value heads and query heads
#: a key/value head.
POLICIES: dict[Any, tuple[list[int], tuple[int, int, int]]] = {
    "group": ([0, 1, 4, 5], (4, 2, 2)),
    "balanced": ([1, 2, 4], (3, 3, 1)),
}


UNITS = {"group": ((0, 1), (2, 3), (4, 5)), "balanced": tuple((h,) for h in range(6))}


def check_grouped_queries(attention: Any, policy: Any, **more: Any) -> None:
    """Six query heads in three groups: counts are true, keys and values shrink with whole groups
    only."""
    keep, counts = POLICIES[policy]
    model = nn.Sequential(shaken(attention, norms=False)).double().eval()
    small, x = copy.deepcopy(model), torch.randn(2, 5, 12).double()
    sites = hp.find_sites(model, policy=policy)
    assert sites[0].units == UNITS[policy]
    mask = hp.HeadMask.from_keep({"0": keep}, {"0": 6})
    with hp.gated(model, mask, sites):
        expected = model[0](x, **more)
    hp.prune_(small, mask, sites=sites)
    assert_close(small[0](x, **more), expected, **CLOSE)
    assert (model[0](x, **more) - expected).abs().max() > 1e-6
    cut, (n_query, n_kv, _) = small[0], counts
    assert (cut.num_heads, cut.num_kv_heads, cut.num_kv_groups) == counts
    assert cut.attn_dim == 2 * n_query
    assert cut.q_proj.weight.shape == (2 * n_query, 12)
    assert cut.k_proj.weight.shape == cut.v_proj.weight.shape == (2 * n_kv, 12)
    assert type(cut) is type(attention)


MASK = torch.arange(5) < torch.tensor([[5], [3]])[:, None, None]


@pytest.mark.parametrize(("policy", "norms"), [("group", True), ("balanced", False)])
def test_grouped_queries(policy: Any, norms: bool) -> None:
    check_grouped_queries(AttentionRope(12, 6, norms), policy)
    check_grouped_queries(AttentionRope(12, 6, norms), policy, attn_mask=MASK)


def test_groups_of_unlike_size_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="group, balanced"):
        hp.find_sites(nn.Sequential(AttentionRope(12, 6)), policy="free")


@pytest.fixture
def timm() -> Any:
    return pytest.importorskip("timm", exc_type=ImportError)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("vit_tiny_patch16_224", {"depth": 2, "qk_norm": True}), ("convit_tiny", {})],
)
def test_real_models_are_exact(timm: Any, name: str, settings: dict[str, Any]) -> None:
    model = shaken(timm.create_model(name, **settings), norms=False).double().eval()
    small, sites = copy.deepcopy(model), hp.find_sites(model)
    x, mask = torch.randn(1, *model.default_cfg["input_size"]).double(), ragged(sites)
    with torch.no_grad():
        with hp.gated(model, mask, sites):
            expected = model(x)
        hp.prune_(small, mask, sites=sites)
        assert_close(small(x), expected, **CLOSE)
        assert (model(x) - expected).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vit_tiny_patch16_224", {"depth": 2, "scale_attn_norm": True}),
        ("eva02_tiny_patch14_224", {"depth": 2}),
        ("beit_base_patch16_224", {"depth": 1}),
        ("swin_tiny_patch4_window7_224", {}),
        ("nest_tiny_jx", {}),
    ],
)
def test_real_models_that_are_refused(timm: Any, name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        hp.find_sites(timm.create_model(name, **settings))


def rope_with_groups(timm: Any, **options: Any) -> Any:
    kind = timm.layers.AttentionRope
    if "num_kv_heads" not in inspect.signature(kind.__init__).parameters:
        pytest.skip("this version of timm has no grouped queries")
    return kind(12, num_heads=6, num_kv_heads=3, qkv_fused=False, **options)


@pytest.mark.parametrize(("policy", "fused"), [("group", True), ("balanced", False)])
@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True, "norm_layer": nn.LayerNorm}, {"gated": True}]
)
def test_real_grouped_queries(timm: Any, policy: Any, fused: bool, options: Any) -> None:
    attention = rope_with_groups(timm, **options)
    attention.fused_attn = fused  # the kernel, or code by hand
    check_grouped_queries(attention, policy, attn_mask=MASK)
    angles = torch.randn(4, 4).double()  # of all tokens but the first, which is the prefix
    check_grouped_queries(attention, policy, rope=angles)


def test_the_stand_ins_compute_what_the_real_ones_do(timm: Any) -> None:
    x = torch.randn(2, 5, 12)
    for ours, theirs in (
        (Attention(12, 6), timm.layers.Attention(12, 6, qkv_bias=True)),
        (AttentionRope(12, 6), rope_with_groups(timm)),
    ):
        theirs.load_state_dict(ours.state_dict())
        assert_close(theirs(x), ours(x))
