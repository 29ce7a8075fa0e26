"""find_sites: what it finds, what it refuses and in which words; layouts that a user brings
along."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.attention.kept_heads import KEPT_HEADS
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.layouts import registry
from headprune.model.matching import reason_against
from headprune.model.near_misses import attention_like, closest_reason
from headprune.model.sites import bind
from tests.laws.support import CLOSE, ragged, subject_of


class Odd(nn.Module):
    """Grouped queries, q/k/v fused group by group, and per-head tensors of every kind.

    Those are a parameter (temperature), a column of a table, a buffer (slopes) and a plain
    attribute (scale).
    """

    def __init__(self):
        super().__init__()
        self.n_heads, self.n_kv, self.head_dim, self.value_dim = 6, 3, 4, 3
        self.qkv = nn.Linear(10, 6 * 4 + 3 * (4 + 3))
        self.out = nn.Linear(6 * 3, 10)
        self.temperature = nn.Parameter(torch.rand(6) + 0.5)
        self.table = nn.Parameter(torch.randn(9, 6))
        self.register_buffer("slopes", torch.rand(1, 6, 1))
        self.scale = torch.rand(6, dtype=torch.float64) + 0.5
        self.norm = nn.LayerNorm(10)

    def forward(self, x):
        batch, length, _ = x.shape
        group = self.n_heads // self.n_kv
        fused = self.qkv(self.norm(x)).unflatten(-1, (self.n_kv, -1))
        q, k, v = fused.split((group * self.head_dim, self.head_dim, self.value_dim), dim=-1)
        q = q.reshape(batch, length, self.n_heads, self.head_dim).transpose(1, 2)
        k, v = (t.transpose(1, 2).repeat_interleave(group, dim=1) for t in (k, v))
        logits = q @ k.transpose(-2, -1) * self.temperature[:, None, None]
        distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
        logits = (
            logits + self.table[distance].permute(2, 0, 1) - self.slopes[0, :, :, None] * distance
        )
        context = (logits.softmax(-1) @ v) * self.scale[:, None, None]
        out = self.out(context.transpose(1, 2).flatten(2))
        return x + out


ODD = hp.AttentionLayout(
    name="odd",
    gate="out",
    slabs=(
        hp.HeadSlab("qkv", "out", ("query", "key", "value"), "grouped"),
        hp.HeadSlab("out", "in", "context"),
        hp.HeadSlab("temperature", 0, "head"),
        hp.HeadSlab("table", -1, "head"),
        hp.HeadSlab("slopes", 1, "head"),
        hp.HeadSlab("scale", 0, "head"),
    ),
    head_dim="head_dim",
    value_dim="value_dim",
    kind="self",
    requires=("temperature",),
    untouched=("norm",),
    counts=(("n_heads", "n_query_heads"), ("n_kv", "n_kv_heads")),
)


def odd_model():
    model = nn.Sequential(Odd(), nn.Tanh(), Odd()).double().eval()
    return model, torch.randn(2, 5, 10, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(2))
def test_an_odd_module_with_a_layout_of_its_own_is_exact(seed):
    model, x = odd_model()
    sites = hp.find_sites(model, layouts=[ODD])
    assert [(s.name, s.layout) for s in sites] == [("0", "odd"), ("2", "odd")]
    sizes = {(s.n_query_heads, s.n_kv_heads, s.head_dim, s.value_dim) for s in sites}
    assert sizes == {(6, 3, 4, 3)}
    mask, small, names = ragged(sites, seed), copy.deepcopy(model), list(model.state_dict())
    with hp.gated(model, mask, sites):
        expected = model(x)
    report = hp.prune_(small, mask, x, sites)
    assert_close(small(x), expected, **CLOSE)
    assert (expected - model(x)).abs().max() > 1e-3
    assert [name for name in small.state_dict() if not name.endswith(KEPT_HEADS)] == names
    for whole, cut, name in ((model[0], small[0], "0"), (model[2], small[2], "2")):
        kept = list(mask.kept(name))
        assert torch.equal(cut.temperature, whole.temperature[kept])
        assert torch.equal(cut.table, whole.table[:, kept])
        assert torch.equal(cut.slopes, whole.slopes[:, kept])
        assert torch.equal(cut.scale, whole.scale[kept])
        assert type(cut.temperature) is nn.Parameter
        assert (cut.n_heads, cut.n_kv) == (len(kept), len(kept) // 2)
    again = hp.prune_(small, mask, x, report.sites)  # the sites it returns carry the layout on
    assert again.n_removed == 0


def test_a_layout_given_once_is_tried_before_the_registered_ones():
    attention = hp.MultiHeadAttention(8, 2)
    mine = replace(subject_of("multi_head_attention").layout, name="mine")
    assert hp.find_sites(attention, layouts=[mine])[0].layout == "mine"
    assert hp.find_sites(attention)[0].layout == "multi_head_attention"


def with_slab(path, axis, role="head"):
    """Another third slab, and none after it."""
    return {"slabs": (*ODD.slabs[:2], hp.HeadSlab(path, axis, role))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"requires": ("nothing.here",)}, "it has no 'nothing.here'"),
        ({"absent": ("norm",)}, "it has 'norm'"),
        ({"untouched": ()}, "its parameter 'norm.weight' is not accounted for"),
        ({"head_dim": 5}, "multiple of the head width"),
        ({"head_dim": "no_such"}, "the width of a head"),
        ({"head_dim": 0}, "Odd.odd: must be a head width >= 1, got 0"),
        ({"value_dim": lambda module: 1.5}, "Odd.odd: must be a head width >= 1, got 1.5"),
        (with_slab("gone", 0), "it has no 'gone'"),
        (with_slab("temperature", "out"), "a dimension of the tensor [6]"),
        (with_slab("temperature", 1), "a dimension of the tensor [6]"),
        (with_slab("qkv", 0), "because it is a projection"),
        (with_slab("norm", "out"), "a projection or a tensor"),
        (with_slab("qkv", "list"), "and only for one, got 'list' of a Linear"),
        (with_slab("table", 0), "must be 6"),
    ],
)
def test_a_layout_that_does_not_fit_says_why(change, words):
    model, _ = odd_model()
    layout = replace(ODD, **change)
    assert words in str(reason_against(layout, model[0]))
    with pytest.raises(UnsupportedModel):
        hp.find_sites(model, layouts=[layout])


def test_key_value_heads_that_serve_no_whole_number_of_query_heads():
    module = Odd()
    module.qkv, module.n_kv = nn.Linear(10, 6 * 4 + 4 * 7), 4
    layout = replace(ODD, grouping="interleaved")
    must = "n_kv_heads: must be a divisor of the 6 query heads, got 4"
    assert must in str(reason_against(layout, module))


def test_a_flag_that_is_off_counts_as_absent():
    model, _ = odd_model()
    model[0].shares, model[2].shares = False, True
    sites = hp.find_sites(model, layouts=[replace(ODD, absent=("shares",))])
    assert [s.name for s in sites] == ["0"]


class Outer(nn.Module):
    def __init__(self, features=(4,)):
        super().__init__()
        self.inner = hp.MultiHeadAttention(8, 2)
        self.q_norm = nn.LayerNorm(features)


_INNER = registry.get("multi_head_attention")
OUTER = hp.AttentionLayout(
    name="outer",
    gate="inner.W_o",
    slabs=tuple(replace(s, path=f"inner.{s.path}") for s in _INNER.slabs),
    head_dim="inner.head_dim",
    per_head=("q_norm",),
)


def test_one_head_may_have_a_norm_and_more_than_one_may_not():
    assert reason_against(OUTER, Outer()) is None
    for features in ((8,), (2, 4), (1, 4)):
        assert "not one head's width" in str(reason_against(OUTER, Outer(features)))


def test_a_parameter_under_a_second_name_is_accounted_for_too():
    model, _ = odd_model()
    model[0].alias = model[0].temperature
    assert "'alias' is not accounted for" in str(reason_against(ODD, model[0]))


def test_a_site_is_not_looked_for_inside_a_site():
    model = nn.Sequential(Outer())
    assert [s.name for s in hp.find_sites(model, layouts=[OUTER])] == ["0"]
    assert [s.name for s in hp.find_sites(model)] == ["0.inner"]


@pytest.mark.parametrize("model", [None, "bert-base", lambda x: x])
def test_something_that_is_no_module(model):
    with pytest.raises(InvalidValue, match=r"model: must be a torch\.nn\.Module"):
        hp.find_sites(model)


def test_a_model_without_any_attention():
    with pytest.raises(UnsupportedModel, match="no attention-like module") as caught:
        hp.find_sites(nn.Sequential(nn.Linear(3, 3)))
    assert "find_sites(model, layouts=[...])" in str(caught.value)


class StrangeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4) for _ in range(3))


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_unknown_attention_is_listed_with_what_is_missing():
    parts = {"a": StrangeAttention(), "b": SelfAttention(), "c": nn.Linear(2, 2)}
    with pytest.raises(UnsupportedModel) as caught:
        hp.find_sites(nn.ModuleDict(parts))
    text = str(caught.value)
    assert "a (StrangeAttention; nearest layout " in text
    assert ": it has no '" in text
    assert "b (SelfAttention; no layout is close; its parts are parameters only)" in text
    assert "c (" not in text
    assert "propose_layouts" in text
    with pytest.raises(UnsupportedModel, match="and 3 more"):
        hp.find_sites(nn.ModuleList(StrangeAttention() for _ in range(11)))


class Mixer(nn.Module):
    pass


ALIKE = ["q k v out_proj", "to_q to_k to_v", "Wq Wk Wv", "query_1 keys value", "Wqkv out"]
ALIKE += ["query_key_value dense", "to_q to_kv to_out", "in_proj_qkvz out_proj"]
UNLIKE = ["q k out", "kernel quality volume", "a b c", "to_kv out"]


@pytest.mark.parametrize("names", ALIKE + UNLIKE)
def test_attention_is_known_by_its_parts_too(names):
    mixer = Mixer()
    for name in names.split():
        mixer.add_module(name, nn.Linear(4, 4))
    assert bool(list(attention_like(nn.Sequential(mixer)))) == (names in ALIKE)
    if names in ALIKE:
        with pytest.raises(UnsupportedModel, match=r"0 \(Mixer; "):
            hp.find_sites(nn.Sequential(mixer))


def test_the_nearest_layout_lacks_less_than_it_finds():
    layouts = [registry.get(name) for name in registry.names()]
    attention = subject_of("llama").model.model.layers[0].self_attn
    del attention.q_proj
    assert closest_reason(attention, layouts) == "nearest layout 'llama': it has no 'q_proj'"
    del attention.k_proj, attention.v_proj
    assert closest_reason(attention, layouts) == "no layout is close; its parts are o_proj"


@pytest.mark.parametrize(
    "odd", [nn.LayerNorm(16), nn.Conv1d(16, 16, 1), nn.Embedding(3, 16), nn.Identity()]
)
def test_a_projection_with_something_odd_in_its_place_is_no_crash(odd):
    """Norms, embeddings and convolutions bear the names of projections in some models."""
    model = subject_of("llama").model
    for layer in model.model.layers:
        layer.self_attn.q_proj = odd
    with pytest.raises(UnsupportedModel):
        hp.find_sites(model)


def test_a_module_cut_by_other_hands_is_noticed():
    subject = subject_of("multi_head_attention")
    hp.prune_(subject.model, subject.ragged())
    attention = subject.model.layers[0].attention
    attention.W_q, attention.W_k = nn.Linear(16, 5), nn.Linear(16, 5)
    attention.W_v, attention.W_o = nn.Linear(16, 6), nn.Linear(6, 16)
    with pytest.raises(UnsupportedModel, match="cut only through headprune"):
        hp.find_sites(subject.model)


def test_bind_refuses_sites_of_another_model():
    llama, bert = subject_of("llama"), subject_of("bert")
    with pytest.raises(UnknownName, match=r"modules of BertForSequenceClassification") as caught:
        bind(bert.model, llama.sites)
    assert "model.layers.0.self_attn" in str(caught.value)
    moved = replace(bert.sites[0], name="bert.encoder")
    with pytest.raises(UnsupportedModel, match="layout 'bert'"):
        bind(bert.model, [moved])
    with pytest.raises(UnknownName, match="layout"):
        bind(bert.model, [replace(bert.sites[0], layout="brt")])


def test_bind_reads_the_heads_that_are_there_now():
    subject = subject_of("llama")
    hp.prune_(subject.model, subject.ragged())
    bound = bind(subject.model, subject.sites)
    assert [b.site.heads for b in bound] == [subject.ragged().kept(s.name) for s in subject.sites]
    assert bound[0].gate is subject.model.model.layers[0].self_attn.o_proj
