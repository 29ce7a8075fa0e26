"""diffusers, timm and x-transformers: what is exact, and what is refused because its code, its norms
or its options span the heads."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts import diffusers as diffusers_layout
from headprune.layouts import timm as timm_layout
from headprune.layouts._tiny_textbook import Processed, Processor
from headprune.layouts._tiny_timm import Attention, AttentionRope, OlderAttention
from headprune.model.sites import reason_against
from tests.laws.support import CLOSE, picture, ragged, shaken


def cut_as_gated(
    model: nn.Module, run: Callable[[Any], Tensor], mask: Any = None, sites: Any = None
) -> Any:
    """The cut model, which computes what the gated one does, and something else than the whole."""
    sites = sites or hp.find_sites(model)
    mask, small = mask or ragged(sites), copy.deepcopy(model)
    with torch.no_grad():
        with hp.gated(model, mask, sites):
            expected = run(model)
        hp.prune_(small, mask, sites=sites)
        assert_close(run(small), expected, **CLOSE)
        assert (run(model) - expected).abs().max() > 1e-6
    return small


# ---------------------------------------------------------------- diffusers: the processor is proved


class Mixed(Processor):
    """Attends by the mean of all heads."""

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any) -> Tensor:
        read = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        made = attn.to_q(hidden_states), attn.to_k(read), attn.to_v(read)
        q, k, v = (y.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for y in made)
        heads = scaled_dot_product_attention(q.mean(1, keepdim=True).expand_as(q), k, v)
        return attn.to_out[0](heads.transpose(1, 2).flatten(2))


def test_another_processor_is_refused() -> None:
    module = Processed(12, 4)
    assert reason_against(diffusers_layout.LAYOUT, module) is None
    module.processor = Mixed()
    reason = str(reason_against(diffusers_layout.LAYOUT, module))
    assert "by its processor, got Mixed" in reason


@pytest.fixture
def processors() -> Any:
    return pytest.importorskip("diffusers.models.attention_processor")


NORMS = {"qk_norm": "layer_norm", "norm_num_groups": 2, "residual_connection": True}


@pytest.mark.parametrize(
    ("processor", "options"),
    [
        ("AttnProcessor2_0", {}),
        ("AttnProcessor", {"cross_attention_dim": 10}),
        ("AttnProcessor2_0", {**NORMS, "rescale_output_factor": 3.0}),
        ("AttnProcessor", {"bias": True, "upcast_softmax": False}),
    ],
    ids=["self", "cross", "norms", "bias"],
)
def test_attention_of_diffusers(processors: Any, processor: str, options: dict[str, Any]) -> None:
    module = processors.Attention(query_dim=16, heads=4, dim_head=4, **options)
    module.set_processor(getattr(processors, processor)())
    model = shaken(nn.ModuleList([module]), norms=False).double().eval()
    x = torch.randn(2, 5, 16).double()
    context = torch.randn(2, 6, 10).double() if "cross_attention_dim" in options else None
    sites = hp.find_sites(model)
    assert [s.kind for s in sites] == ["self" if context is None else "cross"]
    small = cut_as_gated(model, lambda model: model[0](x, encoder_hidden_states=context))
    assert small[0].heads == ragged(sites).n_kept


@pytest.mark.parametrize(
    "options", [{"added_kv_proj_dim": 8}, {"qk_norm": "layer_norm_across_heads", "kv_heads": 4}]
)
def test_joint_attention_and_norms_across_heads_are_refused(processors: Any, options: Any) -> None:
    module = processors.Attention(query_dim=16, heads=4, dim_head=4, **options)
    assert reason_against(diffusers_layout.LAYOUT, module) is not None


# ---------------------------------------------------------------- timm


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
def test_look_alikes_of_timm_are_refused(kind: Any) -> None:
    assert reason_against(timm_layout.LAYOUT, OlderAttention(12, 4)) is None
    assert REASONS[kind] in str(reason_against(timm_layout.LAYOUT, kind(12, 4)))


@pytest.mark.parametrize(("kind", "replaced"), [(Attention, False), (OlderAttention, True)])
def test_newer_code_keeps_its_class_and_older_code_is_replaced(kind: Any, replaced: bool) -> None:
    model, x = nn.Sequential(shaken(kind(12, 4, norms=True))).double().eval(), torch.randn(2, 5, 12)
    mask = hp.HeadMask.from_keep({"0": [0, 2, 3]}, {"0": 4})
    small = cut_as_gated(model, lambda model: model(x.double()), mask)
    assert (type(small[0]) is not kind) == replaced
    assert isinstance(small[0], kind)
    assert getattr(small[0], "attn_dim", 9) == 9


#: By policy: units, heads to keep, and the counts after: query heads, key/value heads and query
#: heads a key/value head.
POLICIES: dict[Any, tuple[Any, list[int], tuple[int, int, int]]] = {
    "group": (((0, 1), (2, 3), (4, 5)), [0, 1, 4, 5], (4, 2, 2)),
    "balanced": (tuple((h,) for h in range(6)), [1, 2, 4], (3, 3, 1)),
}
MASK = torch.arange(5) < torch.tensor([[5], [3]])[:, None, None]


def check_grouped_queries(attention: Any, policy: Any, **more: Any) -> None:
    """Six query heads in three groups: counts are true, keys and values shrink with whole groups
    only."""
    units, keep, counts = POLICIES[policy]
    model = nn.Sequential(shaken(attention, norms=False)).double().eval()
    sites, x = hp.find_sites(model, policy=policy), torch.randn(2, 5, 12).double()
    assert sites[0].units == units
    mask = hp.HeadMask.from_keep({"0": keep}, {"0": 6})
    cut, (n_query, n_kv, _) = cut_as_gated(model, lambda m: m[0](x, **more), mask, sites)[0], counts
    assert (cut.num_heads, cut.num_kv_heads, cut.num_kv_groups) == counts
    assert cut.attn_dim == 2 * n_query
    assert cut.q_proj.weight.shape == (2 * n_query, 12)
    assert cut.k_proj.weight.shape == cut.v_proj.weight.shape == (2 * n_kv, 12)
    assert type(cut) is type(attention)


@pytest.mark.parametrize(("policy", "norms"), [("group", True), ("balanced", False)])
def test_grouped_queries(policy: Any, norms: bool) -> None:
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
def test_models_of_timm_are_exact(timm: Any, name: str, settings: dict[str, Any]) -> None:
    model = shaken(timm.create_model(name, **settings), norms=False).double().eval()
    x = torch.randn(1, *model.default_cfg["input_size"]).double()
    cut_as_gated(model, lambda model: model(x))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vit_tiny_patch16_224", {"depth": 2, "scale_attn_norm": True}),
        ("eva02_tiny_patch14_224", {}),
        ("beit_base_patch16_224", {}),
        ("swin_tiny_patch4_window7_224", {}),
        ("nest_tiny_jx", {}),
    ],
)
def test_models_of_timm_that_are_refused(timm: Any, name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        hp.find_sites(timm.create_model(name, **settings))


# ---------------------------------------------------------------- x-transformers


@pytest.fixture
def x_transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("x_transformers")


SIZES: dict[str, Any] = {"dim": 16, "depth": 2, "ff_mult": 1}
SIZES |= {"heads": 6, "attn_kv_heads": 3, "attn_dim_head": 4}
ROTARY: dict[str, Any] = {"rotary_pos_emb": True, "rotary_emb_dim": 4}
EXACT: list[dict[str, Any]] = [
    {"attn_flash": True},
    {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    {"attn_qk_rmsnorm": True},
    {"attn_gate_value_heads": True},
    {"attn_head_scale": True},
    {"attn_num_mem_kv": 2},
    {"attn_head_learned_sink": True},
    {"attn_value_dim_head": 5},
    {"attn_kv_heads": None},
    {"attn_sparse_topk": 3},
    ROTARY,
]
REFUSED: list[dict[str, Any]] = [
    {"attn_pre_talking_heads": True, "attn_kv_heads": None},
    {"attn_gate_values": True},
    {"attn_on_attn": True},
    {"attn_use_latent_kv": True, "attn_dim_latent_kv": 8},
    {"attn_selective": True},
    {**ROTARY, "rotate_num_heads": 3, "attn_kv_heads": None},
]
REFUSED_BY_A_CUT: list[dict[str, Any]] = [
    {"alibi_pos_bias": True},
    {"rel_pos_bias": True},
    {"add_value_residual": True},
    {"residual_attn": True},
]


def named(options: Any) -> str:
    return " ".join(options)


def built(package: Any, options: dict[str, Any], kind: str = "Decoder") -> nn.Module:
    options = {k: v for k, v in {**SIZES, **options}.items() if v is not None}
    return shaken(getattr(package, kind)(**options), norms=False).double().eval()


@pytest.mark.parametrize("options", EXACT, ids=named)
def test_options_that_are_exact(x_transformers: Any, options: dict[str, Any]) -> None:
    model, x = built(x_transformers, options), torch.randn(2, 7, 16).double()
    assert [s.kind for s in hp.find_sites(model)] == ["causal"] * 2
    cut_as_gated(model, lambda model: model(x))


def test_every_third_head_shares(x_transformers: Any) -> None:
    site = hp.find_sites(built(x_transformers, {}))[0]
    assert site.units == ((0, 3), (1, 4), (2, 5))


@pytest.mark.parametrize("options", REFUSED, ids=named)
def test_what_spans_heads_is_refused(x_transformers: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        hp.find_sites(built(x_transformers, options))


@pytest.mark.parametrize("options", REFUSED_BY_A_CUT, ids=named)
def test_what_passes_between_layers_is_refused_by_a_cut(
    x_transformers: Any, options: dict[str, Any]
) -> None:
    model = built(x_transformers, options, "Encoder" if "rel_pos_bias" in options else "Decoder")
    mask, before = ragged(hp.find_sites(model)), picture(model)
    with pytest.raises(UnsupportedModel, match="share nothing between heads"):
        hp.prune_(model, mask)
    assert picture(model) == before


def test_generation_with_a_cache(x_transformers: Any) -> None:
    layers = built(x_transformers, {})
    network = x_transformers.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)
    model = x_transformers.AutoregressiveWrapper(network).double().eval()
    mask, small = ragged(hp.find_sites(model)), copy.deepcopy(model)
    prompt = torch.randint(0, 20, (2, 4))
    hp.prune_(small, mask)
    with hp.gated(model, mask):
        expected = model.generate(prompt, 8, temperature=0.0, cache_kv=True)
    for cached in (True, False):
        got = small.generate(prompt, 8, temperature=0.0, cache_kv=cached)
        assert torch.equal(got, expected)
