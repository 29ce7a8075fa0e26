"""diffusers, timm and x-transformers: what is exact, and what is refused because its code, its norms
or its options span the heads."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts import diffusers as diffusers_layout
from headprune.layouts import timm as timm_layout
from headprune.layouts._tiny_textbook import Processed, Processor
from headprune.layouts._tiny_timm import Attention, OlderAttention
from headprune.model.sites import reason_against
from tests.laws.support import CLOSE, ragged, shaken, unchanged


def cut_as_gated(model, run, mask=None, sites=None):
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


class Mixed(Processor):
    def __call__(self, attn, hidden_states, encoder_hidden_states):
        read = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        made = attn.to_q(hidden_states), attn.to_k(read), attn.to_v(read)
        q, k, v = (y.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for y in made)
        heads = scaled_dot_product_attention(q.mean(1, keepdim=True).expand_as(q), k, v)
        return attn.to_out[0](heads.transpose(1, 2).flatten(2))


def test_another_processor_is_refused():
    module = Processed(12, 4)
    assert reason_against(diffusers_layout.LAYOUT, module) is None
    module.processor = Mixed()
    reason = str(reason_against(diffusers_layout.LAYOUT, module))
    assert "by its processor, got Mixed" in reason


@pytest.fixture
def processors():
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
def test_attention_of_diffusers(processors, processor, options):
    module = processors.Attention(query_dim=16, heads=4, dim_head=4, **options)
    module.set_processor(getattr(processors, processor)())
    model = shaken(nn.ModuleList([module]), norms=False).double().eval()
    x = torch.randn(2, 5, 16).double()
    context = torch.randn(2, 6, 10).double() if "cross_attention_dim" in options else None
    sites = hp.find_sites(model)
    assert [s.kind for s in sites] == ["self" if context is None else "cross"]
    small = cut_as_gated(model, lambda model: model[0](x, encoder_hidden_states=context))
    assert small[0].heads == ragged(sites).n_kept


@pytest.mark.parametrize("activation", ["gelu", "geglu", "swiglu", "geglu-approximate"])
def test_feed_forwards_of_diffusers(activation):
    attention = pytest.importorskip("diffusers.models.attention")
    block = attention.FeedForward(16, mult=2, activation_fn=activation)
    model = shaken(nn.ModuleList([block]), norms=False).double().eval()
    x = torch.randn(2, 5, 16).double()
    sites = hp.find_sites(model, feed_forward=True)
    assert [len(site.heads) for site in sites] == [32]
    cut_as_gated(model, lambda model: model[0](x), sites=sites)


@pytest.mark.parametrize(
    "options", [{"added_kv_proj_dim": 8}, {"qk_norm": "layer_norm_across_heads", "kv_heads": 4}]
)
def test_joint_attention_and_norms_across_heads_are_refused(processors, options):
    module = processors.Attention(query_dim=16, heads=4, dim_head=4, **options)
    assert reason_against(diffusers_layout.LAYOUT, module) is not None


class Nested(OlderAttention):
    """NesT's: the same parts, and the heads' outputs inside out."""

    def forward(self, x):
        return self.proj(self.heads(x).transpose(2, 3).reshape(x.shape))


class Rotated(OlderAttention):
    def forward(self, x, rope=None):
        return super().forward(x if rope is None else x + rope)


class Talking(OlderAttention):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.proj_l = nn.Linear(num_heads, num_heads)


class Normed(Attention):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)

    def heads(self, x):
        return self.norm(super().heads(x).flatten(2)).view(*x.shape[:2], self.num_heads, -1)


REASONS = {
    Nested: "one that computes something else",
    Rotated: "one that takes rope",
    Talking: "must be made of qkv, proj, got proj_l.weight",
    Normed: "it has 'norm.",
}


@pytest.mark.parametrize("kind", REASONS)
def test_look_alikes_of_timm_are_refused(kind):
    assert reason_against(timm_layout.LAYOUT, OlderAttention(12, 4)) is None
    assert REASONS[kind] in str(reason_against(timm_layout.LAYOUT, kind(12, 4)))


@pytest.fixture
def timm():
    return pytest.importorskip("timm", exc_type=ImportError)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("vit_tiny_patch16_224", {"depth": 2, "qk_norm": True}), ("convit_tiny", {})],
)
def test_models_of_timm_are_exact(timm, name, settings):
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
def test_models_of_timm_that_are_refused(timm, name, settings):
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        hp.find_sites(timm.create_model(name, **settings))


@pytest.fixture
def x_transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("x_transformers")


SIZES = {"dim": 16, "depth": 2, "ff_mult": 1}
SIZES |= {"heads": 6, "attn_kv_heads": 3, "attn_dim_head": 4}
ROTARY = {"rotary_pos_emb": True, "rotary_emb_dim": 4}
EXACT = [
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
REFUSED = [
    {"attn_pre_talking_heads": True, "attn_kv_heads": None},
    {"attn_gate_values": True},
    {"attn_on_attn": True},
    {"attn_use_latent_kv": True, "attn_dim_latent_kv": 8},
    {"attn_selective": True},
    {**ROTARY, "rotate_num_heads": 3, "attn_kv_heads": None},
]
REFUSED_BY_A_CUT = [
    {"alibi_pos_bias": True},
    {"rel_pos_bias": True},
    {"add_value_residual": True},
    {"residual_attn": True},
]


def named(options):
    return " ".join(options)


def built(package, options, kind="Decoder"):
    options = {k: v for k, v in {**SIZES, **options}.items() if v is not None}
    return shaken(getattr(package, kind)(**options), norms=False).double().eval()


@pytest.mark.parametrize("options", EXACT, ids=named)
def test_options_that_are_exact(x_transformers, options):
    model, x = built(x_transformers, options), torch.randn(2, 7, 16).double()
    assert [s.kind for s in hp.find_sites(model)] == ["causal"] * 2
    cut_as_gated(model, lambda model: model(x))


@pytest.mark.parametrize("options", REFUSED, ids=named)
def test_what_spans_heads_is_refused(x_transformers, options):
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        hp.find_sites(built(x_transformers, options))


@pytest.mark.parametrize("options", REFUSED_BY_A_CUT, ids=named)
def test_what_passes_between_layers_is_refused_by_a_cut(x_transformers, options):
    model = built(x_transformers, options, "Encoder" if "rel_pos_bias" in options else "Decoder")
    mask, words = ragged(hp.find_sites(model)), "share nothing between heads"
    with unchanged(model), pytest.raises(UnsupportedModel, match=words):
        hp.prune_(model, mask)


def test_generation_with_a_cache(x_transformers):
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
