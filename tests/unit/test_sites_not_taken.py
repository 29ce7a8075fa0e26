"""Attention and feed-forwards that no layout takes: ``find_sites`` names them, and so do scores,
plans and cuts of the rest."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import headprune as hp
from headprune.core.coverage import coverage_notes
from headprune.core.errors import UnsupportedModel
from headprune.layouts import registry
from headprune.model.near_misses import attention_like
from headprune.model.sites import Sites, not_taken
from tests.command_line import done
from tests.laws.families import FAMILIES
from tests.unit.test_sites import ODD
from tests.unit.test_sites import Odd as WithLayout

TEXT = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 16}
TEXT |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TEXT |= {"max_position_embeddings": 64, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}


def qwen2_5_vl():
    sees = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    sees |= {"out_hidden_size": 16, "patch_size": 4, "window_size": 8}
    sees["fullatt_block_indexes"] = [1]
    marks = {"image_token_id": 50, "video_token_id": 51}
    marks |= {"vision_start_token_id": 52, "vision_end_token_id": 53}
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=sees, **marks)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def gpt2_with_cross_attention():
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, add_cross_attention=True))


#: A model, and the classes of what it has besides, with how many modules there are of each.
PARTIAL = {
    qwen2_5_vl: {"Qwen2_5_VLVisionAttention": 2},
    gpt2_with_cross_attention: {"GPT2Attention": 2},
}
#: Families of the registry that have linear attention between layers of a known kind.
LINEAR = {"qwen3_next": ["Qwen3NextGatedDeltaNet"]}


@pytest.mark.parametrize("build", PARTIAL)
def test_what_is_not_taken_is_named_with_its_reason(build):
    model = build()
    sites = hp.find_sites(model)
    modules = dict(model.named_modules())
    counted = {}
    for group in sites.not_taken:
        assert group.reason
        assert {type(modules[name]).__name__ for name in group.modules} == {group.kind}
        counted[group.kind] = counted.get(group.kind, 0) + len(group.modules)
    assert counted == PARTIAL[build]
    lines = str(sites).splitlines()[len(sites) :]
    assert lines == [f"not recognised: {group}" for group in sites.not_taken]
    named = [name for group in sites.not_taken for name in group.modules]
    taken = tuple(f"{site.name}." for site in sites)
    like = {name for name, _ in attention_like(model) if not f"{name}.".startswith(taken)}
    around = {name for name in like if any(t.startswith(f"{name}.") for t in taken)}
    assert sorted(named) == sorted(like - around)


@pytest.mark.parametrize(("layout", "family"), FAMILIES, ids=[family for _, family in FAMILIES])
def test_families_are_taken_whole_and_named_without_their_layout(layout, family, monkeypatch):
    model, _ = registry.get(layout).tiny(0, family)
    sites = hp.find_sites(model)
    assert [group.kind for group in sites.not_taken] == LINEAR.get(family, [])
    monkeypatch.setattr(
        "headprune.model.near_misses.reason_against", lambda layout, module: "no layout"
    )
    seen = [name for group in not_taken(model, []) for name in group.modules]
    for site in sites:
        kind = type(model.get_submodule(site.name)).__name__
        # A list of four linear layers; those who build it so call it MultiHeadedAttention.
        known = kind == "Annotated"
        assert known or any(f"{name}.".startswith(f"{site.name}.") for name in seen), kind


def made(kind, **parts):
    """A module of a class of this name."""
    module = type(kind, (nn.Module,), {})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def matrix():
    return nn.Parameter(torch.randn(4, 8, 2))


#: Known by its sizes, by tensors of its own, and by two names.
ATTENTION = {
    "Unnamed": lambda: {"a": nn.Linear(8, 24), "b": nn.Linear(8, 8)},
    "Bare": lambda: {f"w_{letter}": matrix() for letter in "qkv"},
    "LocalAttn": lambda: {"mix": nn.Linear(8, 8)},
    "MHSA": lambda: {"mix": nn.Linear(8, 8)},
}
#: Three times as wide within; gates and values of a convolution; names of what are no matrices.
OTHERS = {
    "FeedForward": {"up": nn.Linear(8, 24), "same": nn.Linear(8, 8), "down": nn.Linear(24, 8)},
    "Gated": {"parts": nn.Linear(8, 24), "over": nn.Conv1d(8, 8, 3), "end": nn.Linear(8, 8)},
    "Biases": {f"{letter}_bias": nn.Parameter(torch.zeros(8)) for letter in "qkv"},
    "Norms": {f"{letter}_norm": nn.LayerNorm(8) for letter in "qkv"},
    "Recurrent": {"inner": nn.GRU(8, 8)},
}


class Odd(nn.Module):
    """Attention of one head that no layout takes."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q, k, v = self.queries(x), self.keys(x), self.values(x)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_of_any_make_is_seen(kind):
    first, second = (made(kind, **ATTENTION[kind]()) for _ in range(2))
    (group,) = hp.find_sites(nn.Sequential(hp.MultiHeadAttention(8, 2), first, second)).not_taken
    assert (group.modules, group.kind) == (("1", "2"), kind)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_are_no_attention(kind):
    other = made(kind, **OTHERS[kind])
    assert hp.find_sites(nn.Sequential(hp.MultiHeadAttention(8, 2), other)).not_taken == ()


def partial():
    return nn.Sequential(hp.MultiHeadAttention(8, 2), hp.MultiHeadAttention(8, 2), Odd(), Odd())


def loss(model, batch):
    return model(batch).square().mean((1, 2))


BATCHES = [torch.randn(4, 5, 8) for _ in range(2)]


def test_copies_slices_and_pickles_keep_it():
    sites = hp.find_sites(partial())
    assert sites.not_taken[0].modules == ("2", "3")
    saved = pickle.loads(pickle.dumps(sites))
    for other in (saved, copy.copy(sites), copy.deepcopy(sites), sites[:1], sites[:]):
        assert isinstance(other, Sites)
        assert other.not_taken == sites.not_taken
        assert other.layouts == sites.layouts
    assert "not_taken=(NotTaken(modules=('2', '3'), kind='Odd'" in repr(sites)


@pytest.mark.parametrize("given", ["none", "tuple", "slice"])
def test_scores_plans_and_cuts_of_a_partial_model_say_so(given):
    model = partial()
    found = hp.find_sites(model)
    sites = {"none": None, "tuple": tuple(found), "slice": found[:1]}[given]
    scores = hp.score(model, BATCHES, ["taylor", "magnitude"], loss=loss, sites=sites)
    for one in (*scores, hp.scoring.rank_average(scores)):
        (note,) = coverage_notes(one.notes)
        assert note.startswith("Attention that no layout matches: 2 and 1 more (Odd; ")
        assert note in str(one)
        plan = hp.select(one, hp.Budget(keep_heads=0.5))
        assert coverage_notes(plan.notes) == (note,)
        assert coverage_notes(plan.then(plan).notes) == (note,)
    report = hp.prune_(model, plan, BATCHES[0], sites)
    assert coverage_notes(report.warnings) == (note,)
    assert report.sites.not_taken == found.not_taken
    again = hp.score(model, BATCHES, loss=loss, sites=report.sites)
    assert coverage_notes(again.notes) == (note,)


def test_feed_forwards_that_no_layout_takes_are_named_where_neurons_are_asked_for():
    plain, mixing = (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=activation)
        for activation in (nn.SiLU(), nn.Softmax(-1))
    )
    model = nn.Sequential(plain, mixing).eval()
    assert hp.find_sites(model).not_taken == ()
    sites = hp.find_sites(model, feed_forward=True)
    (group,) = sites.not_taken
    assert (group.modules, group.is_feed_forward) == (("1",), True)
    assert "whose activation treats every neuron by itself" in group.reason
    scores = hp.score(model, BATCHES, loss=loss, sites=sites)
    plan = hp.select(scores, hp.Budget(keep_params=0.8))
    report = hp.prune_(model, plan, BATCHES[0])
    for notes in (scores.notes, plan.notes, report.warnings):
        (note,) = coverage_notes(notes)
        assert note.startswith("Feed-forwards that no layout matches: 1 (TransformerEncoderLayer; ")
        assert note.endswith("The neurons there are neither scored nor cut.")


def test_feed_forwards_are_known_by_their_name_or_their_sizes():
    """Of classes that are called otherwise; an adapter and a list of layers are none."""

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    model = nn.ModuleDict(
        {
            "known": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            "feed_forward": Wrapped(),
            "other": nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)),
            "adapter": nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8)),
            "mlps": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
        }
    )
    found = hp.find_sites(model, feed_forward=True).not_taken
    assert [group.modules for group in found] == [("feed_forward",), ("other",)]
    del model["known"]
    with pytest.raises(UnsupportedModel, match=r"got none of feed_forward \(Wrapped; .*other"):
        hp.find_sites(model, feed_forward=True)


def test_experts_of_a_mixture_are_named_beside_the_feed_forwards_that_are_sites(tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "mlp_only_layers": [0]}
    sizes |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "num_experts": 2}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, num_experts_per_tok=1))
    sites = hp.find_sites(model, feed_forward=True)
    assert [site.name for site in sites if site.is_feed_forward] == [
        "model.layers.0.mlp",
        "model.layers.1.mlp.shared_expert",
    ]
    (group,) = sites.not_taken
    assert (group.modules, group.kind) == (("model.layers.1.mlp.experts",), "Qwen2MoeExperts")
    model.save_pretrained(tmp_path / "mixture")
    said = done("inspect --feed-forward", tmp_path / "mixture").output
    assert f"not recognised: {group}" in said
    assert "propose_layouts" not in said


def test_experts_in_a_list_of_another_name_are_no_sites():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = FeedForward()
            self.expert_list = nn.ModuleList(FeedForward() for _ in range(3))

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.fc2(self.fc1(x).relu())

    sites = hp.find_sites(nn.Sequential(Block()), feed_forward=True)
    assert [site.name for site in sites] == ["0.mlp"]
    (group,) = sites.not_taken
    assert group.modules == tuple(f"0.expert_list.{number}" for number in range(3))


def test_a_model_that_is_taken_whole_has_no_note():
    model = nn.Sequential(hp.MultiHeadAttention(8, 2), hp.MultiHeadAttention(8, 2))
    sites = hp.find_sites(model)
    assert sites.not_taken == ()
    # One site is left out on purpose
    scores = hp.score(model, BATCHES, loss=loss, sites=sites[:1])
    assert scores.notes == ()
    assert coverage_notes(hp.select(scores, hp.Budget(keep_heads=0.5)).notes) == ()


def test_a_layout_of_ones_own_takes_it_and_no_note_is_there():
    model = nn.Sequential(hp.MultiHeadAttention(10, 2), WithLayout()).double()
    assert [group.modules for group in hp.find_sites(model).not_taken] == [("1",)]
    sites = hp.find_sites(model, [ODD])
    assert [site.layout for site in sites] == ["multi_head_attention", "odd"]
    assert sites.not_taken == ()
    batches = [torch.randn(4, 5, 10).double()]
    for given in (sites, sites[:1]):
        assert hp.score(model, batches, loss=loss, sites=given).notes == ()


def test_attention_inside_a_layer_whose_feed_forward_is_taken_is_named():
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.NystromformerConfig(**sizes, intermediate_size=24, num_landmarks=4)
    sites = hp.find_sites(transformers.NystromformerModel(config), feed_forward=True)
    assert all(site.is_feed_forward for site in sites)
    assert {group.kind for group in sites.not_taken} >= {"NystromformerAttention"}


def test_inspect_shows_feed_forwards_where_no_layout_takes_the_attention(tmp_path):
    sizes = {"vocab_size": 50, "d_model": 16, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2}
    transformers.MptForCausalLM(transformers.MptConfig(**sizes)).save_pretrained(tmp_path)
    said = done(f"inspect {tmp_path} --feed-forward")
    assert "0 heads and 128 neurons" in said.stdout
    assert "MptAttention" in said.stdout + said.stderr
