"""find_sites: what it finds, what it refuses and in which words; layouts that a user brings
along."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.attention.kept_heads import KEPT_HEADS
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.layouts import registry
from headprune.model.matching import reason_against
from headprune.model.near_misses import attention_like, closest_reason
from headprune.model.sites import bind
from tests.laws.support import CLOSE, EXACT, picture, ragged, subject_of


class Odd(nn.Module):
    """Grouped queries, q/k/v fused group by group, and per-head tensors of every kind.

    Those are a parameter (temperature), a column of a table, a buffer (slopes) and a plain
    attribute (scale).
    """

    def __init__(
        self,
        width: int = 10,
        n_heads: int = 6,
        n_kv: int = 3,
        head_dim: int = 4,
        value_dim: int = 3,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv, self.head_dim, self.value_dim = n_heads, n_kv, head_dim, value_dim
        fused = n_heads * head_dim + n_kv * (head_dim + value_dim)
        self.qkv = nn.Linear(width, fused)
        self.out = nn.Linear(n_heads * value_dim, width)
        self.temperature = nn.Parameter(torch.rand(n_heads) + 0.5)
        self.table = nn.Parameter(torch.randn(9, n_heads))
        self.register_buffer("slopes", torch.rand(1, n_heads, 1))
        self.scale = torch.rand(n_heads, dtype=torch.float64) + 0.5
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
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
        out: Tensor = self.out(context.transpose(1, 2).flatten(2))
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


def odd_model() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Odd(), nn.Tanh(), Odd()).double().eval(), torch.randn(
        2, 5, 10, dtype=torch.float64
    )


# --- custom layouts
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_an_odd_module_with_a_layout_of_its_own_is_exact(seed: int) -> None:
    model, x = odd_model()
    sites = hp.find_sites(model, layouts=[ODD])
    assert [
        (s.name, s.layout, s.n_query_heads, s.n_kv_heads, s.head_dim, s.value_dim) for s in sites
    ] == [
        ("0", "odd", 6, 3, 4, 3),
        ("2", "odd", 6, 3, 4, 3),
    ]
    mask, small, names = ragged(sites, seed), copy.deepcopy(model), list(model.state_dict())
    with hp.gated(model, mask, sites):
        expected = model(x)
    report = hp.prune_(small, mask, x, sites)
    assert_close(small(x), expected, **CLOSE)
    assert (expected - model(x)).abs().max() > 1e-3
    assert [name for name in small.state_dict() if not name.endswith(KEPT_HEADS)] == names
    for index, name in ((0, "0"), (2, "2")):
        kept = list(mask.kept(name))
        assert torch.equal(small[index].temperature, model[index].temperature[kept])
        assert torch.equal(small[index].table, model[index].table[:, kept])
        assert torch.equal(small[index].slopes, model[index].slopes[:, kept])
        assert torch.equal(small[index].scale, model[index].scale[kept])
        assert type(small[index].temperature) is nn.Parameter
        assert (small[index].n_heads, small[index].n_kv) == (len(kept), len(kept) // 2)
    again = hp.prune_(small, mask, x, report.sites)  # the sites it returns carry the layout on
    assert again.n_removed == 0


def test_a_layout_given_once_is_tried_before_the_registered_ones() -> None:
    attention = hp.MultiHeadAttention(8, 2)
    mine = replace(subject_of("multi_head_attention").layout, name="mine")
    assert hp.find_sites(attention, layouts=[mine])[0].layout == "mine"
    assert hp.find_sites(attention)[0].layout == "multi_head_attention"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"requires": ("nothing.here",)}, "it has no 'nothing.here'"),
        ({"absent": ("norm",)}, "it has 'norm'"),
        ({"untouched": ()}, "its parameter 'norm.weight' is not accounted for"),
        ({"head_dim": 5}, "multiple of the head width"),
        ({"head_dim": "no_such"}, "the width of a head"),
        (
            {"slabs": ODD.slabs[:1] + ODD.slabs[1:2] + ODD.slabs[3:]},
            "its parameter 'temperature' is not accounted for",
        ),
        ({"slabs": (*ODD.slabs, hp.HeadSlab("gone", 0, "head"))}, "it has no 'gone'"),
        (
            {"slabs": (*ODD.slabs[:2], hp.HeadSlab("temperature", "out", "head"))},
            "a dimension of the tensor [6]",
        ),
        (
            {"slabs": (*ODD.slabs[:2], hp.HeadSlab("temperature", 1, "head"))},
            "a dimension of the tensor [6]",
        ),
        ({"slabs": (*ODD.slabs[:2], hp.HeadSlab("qkv", 0, "head"))}, "because it is a projection"),
        (
            {"slabs": (*ODD.slabs[:2], hp.HeadSlab("norm", "out", "head"))},
            "a projection or a tensor",
        ),
        (
            {"slabs": (*ODD.slabs[:2], hp.HeadSlab("qkv", "list", "head"))},
            "and only for one, got 'list' of a Linear",
        ),
        ({"head_dim": 0}, "Odd.odd: must be a head width >= 1, got 0"),
        ({"value_dim": lambda module: 1.5}, "Odd.odd: must be a head width >= 1, got 1.5"),
        ({"slabs": (*ODD.slabs[:2], hp.HeadSlab("table", 0, "head"))}, "must be 6"),
    ],
)
def test_a_layout_that_does_not_fit_says_why(change: dict[str, Any], words: str) -> None:
    model, _ = odd_model()
    layout = replace(ODD, **change)
    assert words in str(reason_against(layout, model[0]))
    with pytest.raises(UnsupportedModel):
        hp.find_sites(model, layouts=[layout])


def test_key_value_heads_that_serve_no_whole_number_of_query_heads() -> None:
    layout = replace(
        ODD, slabs=ODD.slabs[:2], grouping="interleaved", untouched=("norm", "temperature", "table")
    )
    module = nn.Module()
    module.qkv, module.out, module.norm = (
        nn.Linear(10, 6 * 4 + 4 * 7),
        nn.Linear(18, 10),
        nn.LayerNorm(10),
    )
    module.temperature, module.head_dim, module.value_dim, module.n_heads, module.n_kv = (
        nn.Identity(),
        4,
        3,
        6,
        4,
    )
    assert "n_kv_heads: must be a divisor of the 6 query heads, got 4" in str(
        reason_against(layout, module)
    )


def test_a_flag_that_is_off_counts_as_absent() -> None:
    model, _ = odd_model()
    model[0].shares = False
    model[2].shares = True
    assert [s.name for s in hp.find_sites(model, layouts=[replace(ODD, absent=("shares",))])] == [
        "0"
    ]


def test_one_head_may_have_a_norm_and_more_than_one_may_not() -> None:
    class Normed(nn.Module):
        def __init__(self, features: tuple[int, ...]) -> None:
            super().__init__()
            self.inner = hp.MultiHeadAttention(8, 2)
            self.q_norm = nn.LayerNorm(features)

    base = subject_of("multi_head_attention").layout
    slabs = tuple(replace(s, path=f"inner.{s.path}") for s in base.slabs)
    layout = hp.AttentionLayout(
        name="normed",
        gate="inner.W_o",
        slabs=slabs,
        head_dim="inner.head_dim",
        per_head=("q_norm",),
    )
    assert reason_against(layout, Normed((4,))) is None
    for features in ((8,), (2, 4), (1, 4)):
        assert "not one head's width" in str(reason_against(layout, Normed(features)))


def test_a_parameter_under_a_second_name_is_accounted_for_too() -> None:
    model, _ = odd_model()
    model[0].alias = model[0].temperature
    assert "'alias' is not accounted for" in str(reason_against(ODD, model[0]))


# --- what is found
# ----------------------------------------------------------------------------------------------------


def test_sites_come_in_model_order_and_print() -> None:
    sites = subject_of("llama").sites
    assert [s.name for s in sites] == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert (
        str(sites).splitlines()[0]
        == "model.layers.0.self_attn: 6 heads in 3 KV groups of width 4 (llama, causal)"
    )


def test_a_site_is_not_looked_for_inside_a_site() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = hp.MultiHeadAttention(8, 2)

    layout = hp.AttentionLayout(
        name="outer",
        gate="inner.W_o",
        slabs=tuple(
            replace(s, path=f"inner.{s.path}")
            for s in subject_of("multi_head_attention").layout.slabs
        ),
        head_dim=4,
    )
    assert [s.name for s in hp.find_sites(nn.Sequential(Outer()), layouts=[layout])] == ["0"]
    assert [s.name for s in hp.find_sites(nn.Sequential(Outer()))] == ["0.inner"]


def test_a_module_in_two_places_is_one_site_with_two_names() -> None:
    attention = hp.MultiHeadAttention(8, 2)
    (site,) = hp.find_sites(nn.ModuleDict({"a": attention, "b": nn.ModuleList([attention])}))
    assert (site.name, site.shared_with) == ("a", ("b.0",))


def test_a_compiled_model_is_looked_at_from_inside() -> None:
    model = nn.Sequential(hp.MultiHeadAttention(8, 2))
    assert [s.name for s in hp.find_sites(torch.compile(model, backend="eager"))] == ["0"]


def test_finding_changes_nothing() -> None:
    subject = subject_of("bert")
    before = picture(subject.model)
    hp.find_sites(subject.model)
    assert picture(subject.model) == before


# --- refusals
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "bert-base", {"model": 1}, lambda x: x])
def test_something_that_is_no_module(model: Any) -> None:
    with pytest.raises(InvalidValue, match=r"model: must be a torch\.nn\.Module"):
        hp.find_sites(model)


def test_a_model_without_any_attention() -> None:
    with pytest.raises(UnsupportedModel, match="no attention-like module") as caught:
        hp.find_sites(nn.Sequential(nn.Linear(3, 3)))
    assert "find_sites(model, layouts=[...])" in str(caught.value)


def test_unknown_attention_is_listed_with_what_is_missing() -> None:
    class StrangeAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4) for _ in range(3))

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    with pytest.raises(UnsupportedModel) as caught:
        hp.find_sites(
            nn.ModuleDict({"a": StrangeAttention(), "b": SelfAttention(), "c": nn.Linear(2, 2)})
        )
    text = str(caught.value)
    assert "a (StrangeAttention; nearest layout " in text
    assert ": it has no '" in text
    assert "b (SelfAttention; near to no layout, made of parameters alone)" in text
    assert "c (" not in text
    assert "propose_layouts" in text
    with pytest.raises(UnsupportedModel, match="and 3 more"):
        hp.find_sites(nn.ModuleList(StrangeAttention() for _ in range(11)))


def test_attention_is_known_by_its_parts_too() -> None:
    class Mixer(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(4, 4))

    alike = [
        ("q", "k", "v", "out_proj"),
        ("to_q", "to_k", "to_v"),
        ("Wq", "Wk", "Wv"),
        ("query_1", "keys", "value"),
    ]
    alike += [
        ("query_key_value", "dense"),
        ("Wqkv", "out"),
        ("to_q", "to_kv", "to_out"),
        ("in_proj_qkvz", "out_proj"),
    ]
    others = [
        ("q", "k", "out"),
        ("kernel", "quality", "volume"),
        ("a", "b", "c"),
        ("to_kv", "out"),
        ("q", "out"),
    ]
    model = nn.ModuleList(Mixer(*names) for names in (*alike, *others))
    assert [name for name, _ in attention_like(model)] == [str(i) for i in range(len(alike))]
    with pytest.raises(
        UnsupportedModel, match=r"0 \(Mixer; near to no layout, made of q, k, v, out_proj\)"
    ):
        hp.find_sites(model)


def test_the_nearest_layout_lacks_less_than_it_finds() -> None:
    layouts = [registry.get(name) for name in registry.names()]
    attention = subject_of("llama").model.model.layers[0].self_attn
    del attention.q_proj
    assert closest_reason(attention, layouts) == "nearest layout 'llama': it has no 'q_proj'"
    del attention.k_proj, attention.v_proj
    assert closest_reason(attention, layouts) == "near to no layout, made of o_proj"


def test_a_projection_with_something_odd_in_its_place_is_no_crash() -> None:
    """Norms, embeddings and convolutions bear the names of projections in some models."""
    for odd in (nn.LayerNorm(16), nn.Conv1d(16, 16, 1), nn.Embedding(3, 16), nn.Identity()):
        model = subject_of("llama").model
        for layer in model.model.layers:
            layer.self_attn.q_proj = odd
        with pytest.raises(UnsupportedModel):
            hp.find_sites(model)


def test_a_module_cut_by_other_hands_is_noticed() -> None:
    subject = subject_of("multi_head_attention")
    hp.prune_(subject.model, subject.ragged())
    attention = subject.model.layers[0].attention
    attention.W_q, attention.W_k = nn.Linear(16, 5), nn.Linear(16, 5)
    attention.W_v, attention.W_o = nn.Linear(16, 6), nn.Linear(6, 16)
    with pytest.raises(UnsupportedModel, match="cut only through headprune"):
        hp.find_sites(subject.model)


def test_bind_refuses_sites_of_another_model() -> None:
    llama, bert = subject_of("llama"), subject_of("bert")
    with pytest.raises(UnknownName, match=r"modules of BertForSequenceClassification") as caught:
        bind(bert.model, llama.sites)
    assert "model.layers.0.self_attn" in str(caught.value)
    moved = replace(bert.sites[0], name="bert.encoder")
    with pytest.raises(UnsupportedModel, match="layout 'bert'"):
        bind(bert.model, [moved])
    with pytest.raises(UnknownName, match="layout"):
        bind(bert.model, [replace(bert.sites[0], layout="brt")])


def test_bind_reads_the_heads_that_are_there_now() -> None:
    subject = subject_of("llama")
    hp.prune_(subject.model, subject.ragged())
    bound = bind(subject.model, subject.sites)
    assert [b.site.heads for b in bound] == [subject.ragged().kept(s.name) for s in subject.sites]
    assert bound[0].gate is subject.model.model.layers[0].self_attn.o_proj


def test_an_odd_model_is_left_as_it_was_by_gates() -> None:
    model, x = odd_model()
    sites, expected, before = hp.find_sites(model, layouts=[ODD]), model(x), picture(model)
    with hp.gated(model, ragged(sites), sites):
        model(x)
    assert picture(model) == before
    assert_close(model(x), expected, **EXACT)


def test_sites_can_be_copied_sliced_and_pickled_with_their_layouts():
    model, _ = registry.get("bert").tiny(0)
    sites = hp.find_sites(model)
    for twin in (copy.deepcopy(sites), pickle.loads(pickle.dumps(sites)), sites[:]):
        assert twin == sites
        assert twin.layouts == sites.layouts
    assert type(sites[1:]) is type(sites)
    assert len(bind(model, sites[1:])) == len(sites) - 1
