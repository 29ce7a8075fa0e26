"""What the rest of a model does with an attention that fits: refused with an error before anything
changes."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts import registry
from headprune.surgery import prune
from tests.laws.support import EXACT, picture, ragged, subject_of, unchanged


def refused(model, sites, mask, words, where=""):
    with unchanged(model), pytest.raises(UnsupportedModel, match=words) as caught:
        hp.prune_(model, mask, sites=sites)
    assert caught.value.where.startswith(where)


# --- shared modules


def tiny(layout):
    model, batch = registry.get(layout).tiny(0, layout)
    return model.eval(), batch


def mask_of(sites, *heads):
    """These heads of the first site, and all of the others."""
    return hp.HeadMask.from_keep({sites[0].name: heads}, {s.name: s.n_query_heads for s in sites})


def share_an_output_projection(model):
    first, second, *_ = model.model.layers
    second.self_attn.o_proj = first.self_attn.o_proj


def share_keys(model):
    first, second, *_ = model.model.layers
    second.self_attn.k_proj = first.self_attn.k_proj


def use_it_outside(model):
    model.extra = model.model.layers[0].self_attn.o_proj


@pytest.mark.parametrize(
    ("share", "also"),
    [
        (share_an_output_projection, "model.layers.1.self_attn.o_proj"),
        (share_keys, "model.layers.1.self_attn.k_proj"),
        (use_it_outside, "extra"),
    ],
)
def test_a_projection_in_two_places_is_not_cut_for_one(share, also):
    model, _ = tiny("llama")
    share(model)
    sites = hp.find_sites(model)
    words = rf"a module that is also \['{also}'\]"
    refused(model, sites, mask_of(sites, 0, 1), words, sites[0].name)


def test_an_output_that_two_layers_share_is_refused_with_its_counts():
    model, _ = tiny("bert")
    first, second, *_ = model.bert.encoder.layer
    second.attention.output = first.attention.output
    mask = ragged(hp.find_sites(model))
    refused(model, None, mask, "used in this place only", "bert.encoder.layer.0.attention")


@pytest.mark.parametrize("scorer", ["surgeon", "magnitude"])
def test_a_shared_feed_forward_is_refused_before_it_is_scored(scorer):
    model, batch = tiny("bert")
    first, second, *_ = model.bert.encoder.layer
    second.intermediate, second.output = first.intermediate, first.output
    sites = hp.find_sites(model, feed_forward=True)
    with pytest.raises(UnsupportedModel, match="used in this place only"):
        hp.score(model, [batch], scorer, sites=sites)
    hp.score(model, [batch], scorer)  # its attentions are not shared


def test_a_module_that_holds_a_cut_tensor_counts_too():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2, 3))

    model = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(2))
    model[0].table = model[1].table = Table()
    base = registry.get("multi_head_attention")
    slabs = (*base.slabs, hp.HeadSlab("table.bias", 0, "head"))
    sites = hp.find_sites(model, layouts=[replace(base, name="tabled", slabs=slabs)])
    refused(model, sites, mask_of(sites, 1), r"a module that is also \['1.table'\]", "0.table")


@pytest.mark.parametrize("share", [share_an_output_projection, use_it_outside])
def test_gates_on_a_projection_in_two_places_are_refused(share):
    model, batch = tiny("llama")
    share(model)
    sites = hp.find_sites(model)
    with unchanged(model), pytest.raises(UnsupportedModel, match="used in this place only"):
        hp.gated(model, {sites[0].name: torch.zeros(6)}).__enter__()
    with hp.gated(model, {sites[2].name: torch.zeros(6)}):  # the third layer shares nothing
        model(**batch)


@pytest.mark.parametrize("example", [False, True])
def test_an_error_after_the_cut_leaves_the_model_as_it_was(monkeypatch, example):
    subject = subject_of("bert")
    before, calls, real = picture(subject.model), [], prune.bind

    def bind(*args):
        calls.append(args)
        if len(calls) == 2:  # of the sites as they are now
            assert picture(subject.model) != before
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(prune, "bind", bind)
    with pytest.raises(KeyboardInterrupt):
        hp.prune_(subject.model, subject.ragged(), subject.batch if example else None)
    assert picture(subject.model) == before


# --- weights that are no plain tensors of the model


def test_a_quantised_bare_tensor_is_not_cut():
    """Projections of other kinds: ``test_quantised.py``."""
    model = nn.Sequential(nn.MultiheadAttention(16, 4))
    weight = (model[0].in_proj_weight.detach() * 100).to(torch.int8)
    model[0].in_proj_weight = nn.Parameter(weight, requires_grad=False)
    mask = mask_of(hp.find_sites(model), 0, 1)
    before = [(n, id(t), type(t), t.shape) for n, t in model.named_parameters()]
    with pytest.raises(UnsupportedModel, match=r"plain floating-point nn\.Parameter.*quantised"):
        hp.prune_(model, mask)
    assert [(n, id(t), type(t), t.shape) for n, t in model.named_parameters()] == before


# --- adapters


class WithTorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def test_adapters_around_a_whole_attention_are_refused_until_they_are_merged():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    config = peft.LoraConfig(r=4, target_modules=["attention"], init_lora_weights=False)
    model = peft.get_peft_model(WithTorchAttention(), config).eval()
    sites = hp.find_sites(model)
    shapes = {n: t.shape for n, t in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match=r"lora_A.*Merge the adapters first"):
        hp.prune_(model, mask_of(sites, 0, 1), sites=sites)
    # PEFT makes the parameters anew by itself
    assert {n: t.shape for n, t in model.state_dict().items()} == shapes
    merged = model.merge_and_unload()
    assert hp.prune_(merged, mask_of(hp.find_sites(merged), 0, 1), x).n_removed == 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks
def test_prefixes_for_all_heads_are_refused_and_prompts_are_not():
    peft = pytest.importorskip("peft")
    common = {"task_type": "SEQ_CLS", "num_virtual_tokens": 2}
    model, _ = tiny("bert")
    prefixed = peft.get_peft_model(copy.deepcopy(model), peft.PrefixTuningConfig(**common)).eval()
    sites = hp.find_sites(prefixed)
    words = "prefixes for all heads from the adapter 'default'"
    refused(prefixed, sites, ragged(sites), words, sites[0].name)
    prompted = peft.get_peft_model(model, peft.PromptTuningConfig(**common)).eval()
    assert hp.prune_(prompted, ragged(hp.find_sites(prompted))).n_removed


# --- copies


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_made_inside_a_block_keeps_the_class_that_a_cut_put_in_front(copied):
    """Where an attention has no output projection, the gates stand in front of the attention
    itself."""
    subject = subject_of("head_list_bare")
    hp.prune_(subject.model, subject.ragged())
    gates = {s.name: torch.ones(len(s.heads)) for s in hp.find_sites(subject.model)}
    with hp.gated(subject.model, gates):
        twin = copied(subject.model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in subject.model.modules()]
    assert_close(subject.run(twin), subject.run(), **EXACT)
