"""Layouts of the user's own, and proposed ones: registered for a process, saved with the model."""

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import CheckpointError, InvalidValue, NameClash
from headprune.core.layout_data import data_of
from headprune.layouts import register, registry
from tests.laws.support import mask_of
from tests.unit.test_sites import ODD, odd_model

NEURONS = hp.AttentionLayout(
    name="own_neurons",
    gate="down",
    slabs=(hp.HeadSlab("up", "out", "head"), hp.HeadSlab("down", "in", "context")),
    head_dim=1,
    kind="feed_forward",
    policies=("group",),
)


class Mine(nn.Module):
    """Attention that no layout knows, with its heads inside of the fused projection."""

    def __init__(self):
        super().__init__()
        self.n, self.everything, self.end = 4, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.everything(x).unflatten(-1, (self.n, 3, -1)).permute(3, 0, 2, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.end(heads.transpose(1, 2).flatten(2))


def mine():
    torch.manual_seed(0)
    return nn.Sequential(Mine(), Mine()).eval(), torch.randn(3, 5, 16)


@pytest.fixture
def clean():
    yield
    for name in registry._added:
        registry._loaded.pop(name)
    registry._added.clear()


def without_first(sites):
    return mask_of(sites, {sites[0].name: sites[0].heads[1:]})


def test_a_proposed_layout_travels_with_the_folder(tmp_path):
    model, x = mine()
    sites = hp.find_sites(model, layouts=hp.propose_layouts(model, x))
    hp.prune_(model, without_first(sites), x, sites)
    hp.save_pretrained(model, tmp_path)
    again = hp.from_pretrained(tmp_path, model=mine()[0])
    assert torch.equal(model(x), again(x))
    assert [s.heads for s in hp.find_sites(again)] == [(1, 2, 3), (0, 1, 2, 3)]


def test_a_layout_with_code_stays_out_of_files(tmp_path):
    layout = dataclasses.replace(ODD, name="odd_with_code", adapt=lambda module, model: None)
    assert data_of(layout) is None
    model, x = odd_model()
    whole = copy.deepcopy(model)  # it has numbers that no file holds
    sites = hp.find_sites(model, layouts=[layout])
    hp.prune_(model, mask_of(sites, {s.name: s.groups[0] for s in sites}), x, sites)
    hp.save_pretrained(model, tmp_path)
    with pytest.raises(CheckpointError, match="full-size model"):
        hp.from_pretrained(tmp_path, model=whole)
    again = hp.from_pretrained(tmp_path, whole, hp.find_sites(whole, layouts=[layout]))
    assert torch.equal(model(x), again(x))


def test_neurons_cut_by_an_own_layout_are_saved_without_sites(tmp_path):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = hp.MultiHeadAttention(8, 2)
            self.forward_part = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})

        def forward(self, x):
            x = x + self.attention(x)
            return self.forward_part.down(self.forward_part.up(x).relu())

    model, x = nn.Sequential(Layer()).eval(), torch.randn(2, 3, 8)
    sites = hp.find_sites(model, layouts=[NEURONS])
    keep = {s.name: range(4) for s in sites if s.is_feed_forward}
    hp.prune_(model, mask_of(sites, keep), x, sites)
    hp.save_pretrained(model, tmp_path)
    again = hp.from_pretrained(tmp_path, model=nn.Sequential(Layer()))
    assert torch.equal(model(x), again(x))
    assert [s.name for s in hp.find_sites(model)] == ["0.attention"]  # neurons only if asked for


def test_a_registered_layout_is_found_by_every_verb(clean):
    model, x = mine()
    (layout,) = hp.propose_layouts(model, x)
    register(layout)
    register(layout)  # twice is once
    assert [s.layout for s in hp.find_sites(model)] == [layout.name] * 2
    assert hp.prune_heads_(model, {0: [1]}, x).n_removed == 1


def test_what_cannot_be_registered(clean):
    with pytest.raises(NameClash, match="another one has this name"):
        register(dataclasses.replace(ODD, name="llama"))
    with pytest.raises(InvalidValue, match="an AttentionLayout"):
        register([ODD])


def test_folders_of_registered_layouts_are_as_before(tmp_path):
    model, _ = registry.get("bert").tiny(0)
    hp.prune_heads_(model, {0: [1]})
    hp.save_pretrained(model, tmp_path)
    assert "layouts" not in json.loads((tmp_path / "headprune.json").read_text())
