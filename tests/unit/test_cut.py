"""cut_: all of it or nothing; and what is shared with something that is not cut is refused before
anything changes."""

from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.model import cut
from headprune.model.sites import bind
from tests.laws.support import EXACT, picture, subject_of, unchanged
from tests.unit.test_sites import ODD, odd_model


@pytest.fixture(params=["bert", "multi_head_attention"])
def subject(request):
    return subject_of(request.param)


class Boom(Exception):
    """What no code of ours expects."""


def odd_mask(keep):
    return hp.HeadMask.from_keep(keep, {"0": 6, "2": 6})


class Failing:
    """Calls the real function, except that its call number ``at`` raises, before or after the
    work."""

    def __init__(self, real, at=None, after=False):
        self.real, self.at, self.after, self.calls = real, at, after, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        fails = self.calls - 1 == self.at
        if fails and not self.after:
            raise Boom
        result = self.real(*args, **kwargs)
        if fails:
            raise Boom
        return result


@pytest.mark.parametrize(("name", "after"), [("_install", False), ("_record", True)])
def test_an_error_at_any_step_leaves_the_model_as_it_was(subject, monkeypatch, name, after):
    # one layer changes its class as well
    mask = subject.ragged() & subject.mask({subject.sites[0].name: []})
    real = getattr(cut, name)
    counted = Failing(real)
    monkeypatch.setattr(cut, name, counted)
    hp.prune_(subject.copy(), mask)
    assert counted.calls >= len(subject.sites)
    expected = subject.run()
    for at in range(counted.calls):
        monkeypatch.setattr(cut, name, Failing(real, at, after))
        with unchanged(subject.model), pytest.raises(Boom):
            hp.prune_(subject.model, mask)
    monkeypatch.undo()
    assert_close(subject.run(), expected, **EXACT)
    hp.prune_(subject.model, mask, subject.batch)


def test_an_error_between_weight_and_bias_leaves_the_model_as_it_was(subject, monkeypatch):
    def half(module, tensors):
        module.weight = tensors["weight"]
        raise Boom

    monkeypatch.setattr(cut, "replace_features_", half)
    with unchanged(subject.model), pytest.raises(Boom):
        hp.prune_(subject.model, subject.ragged())


def test_undo_puts_everything_back_also_to_an_earlier_cut(subject):
    everything = subject.mask({s.name: [] for s in subject.sites})
    for mask in (subject.mask({subject.sites[0].name: []}), everything):
        before, expected = picture(subject.model), subject.run()
        state = list(subject.model.state_dict())
        undo = cut.cut_(subject.model, bind(subject.model), mask)
        assert picture(subject.model) != before
        undo.restore()
        assert picture(subject.model) == before
        assert list(subject.model.state_dict()) == state
        assert_close(subject.run(), expected, **EXACT)
        hp.prune_(subject.model, subject.ragged())


def test_undo_puts_back_what_was_frozen_or_not_in_the_meantime():
    model, _ = odd_model()
    model[2].norm.weight.requires_grad_(False)
    undo = cut.Undo()
    undo.remember(model)
    needed = [p.requires_grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    undo.restore()
    assert [p.requires_grad for p in model.parameters()] == needed
    assert needed.count(False) == 1


def emptied(module):
    module.out.__class__ = type("Other", (nn.Linear,), {})
    module.extra = 1
    raise Boom


def adapted(module, whole):
    module.register_parameter("more", nn.Parameter(torch.zeros(1)))
    module.register_buffer("seen", torch.zeros(1))
    module.add_module("another", nn.Identity())
    raise Boom


@pytest.mark.parametrize(
    ("hook", "keep"),
    [({"empty": emptied}, []), ({"adapt": adapted}, [0, 1])],
    ids=["empty", "adapt"],
)
def test_what_a_layout_does_before_it_fails_is_undone(hook, keep):
    model, _ = odd_model()
    sites = hp.find_sites(model, layouts=[replace(ODD, **hook)])
    with unchanged(model), pytest.raises(Boom):
        hp.prune_(model, odd_mask({"2": keep}), sites=sites)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = hp.MultiHeadAttention(8, 2, dtype=torch.float64)
        self.other = nn.Linear(8, 8, dtype=torch.float64)
        self.twin = hp.MultiHeadAttention(8, 2, dtype=torch.float64)


def prune_pair(model, keep):
    hp.prune_(model, hp.HeadMask.from_keep(keep, {"attention": 2, "twin": 2}))


@pytest.mark.parametrize(
    ("owner", "attribute", "source", "words"),
    [
        ("other", "weight", "W_v.weight", r"one shared with \['other'\]"),
        ("other", "bias", "W_k.bias", r"one shared with \['other'\]"),
        ("attention.W_o", "weight", "W_q.weight", "with which it is shared"),
        ("twin.W_q", "weight", "W_q.weight", r"one shared with \['twin.W_q'\]"),
        ("attention", "W_k", "W_q", "used in this place only"),
    ],
)
def test_what_is_shared_beyond_the_cut_is_refused_before_any_change(
    owner, attribute, source, words
):
    model = Pair()
    setattr(model.get_submodule(owner), attribute, attrgetter(source)(model.attention))
    with unchanged(model), pytest.raises(UnsupportedModel, match=words):
        prune_pair(model, {"attention": [1]})


def test_two_sites_that_share_a_parameter_are_cut_alike_or_not_at_all():
    model = Pair()
    model.twin.W_q.weight = model.attention.W_q.weight
    with unchanged(model), pytest.raises(UnsupportedModel, match="with which it is shared"):
        prune_pair(model, {"attention": [1], "twin": [0]})
    prune_pair(model, {"attention": [1], "twin": [1]})
    assert model.twin.W_q.weight is model.attention.W_q.weight
    assert model.twin.W_q.weight.shape == (4, 8)


def test_a_projection_that_a_layout_names_twice():
    model, x = odd_model()
    layout = replace(ODD, slabs=(*ODD.slabs, ODD.slabs[2]))
    sites, words = hp.find_sites(model, layouts=[layout]), r"0\.temperature: .*got one shared"
    with unchanged(model), pytest.raises(UnsupportedModel, match=words):
        hp.prune_(model, odd_mask({"0": [2, 3]}), x, sites)


def test_rows_of_heads_that_are_modules_are_told_by_nobody():
    subject = subject_of("head_list")
    bound, mask = bind(subject.model, subject.sites), subject.ragged()
    with pytest.raises(UnsupportedModel, match="got a list of modules"):
        cut.kept_rows_of(subject.model, bound, mask)


def test_what_is_shared_but_not_cut_is_no_hindrance():
    model = Pair()
    model.other.bias = model.attention.W_o.bias
    prune_pair(model, {"attention": [1]})
    assert model.other.bias is model.attention.W_o.bias


def test_a_projection_with_more_than_weight_and_bias_is_refused_before_any_change():
    model = Pair()
    model.twin.W_o.register_buffer("scale", torch.ones(1))
    with unchanged(model), pytest.raises(UnsupportedModel, match=r"twin\.W_o"):
        prune_pair(model, {"attention": [1], "twin": [1]})


def test_a_model_inside_its_own_gates_is_cut_and_the_gates_are_taken_away():
    """Not a use, but it must not leave the gates in the model for ever."""
    model = Pair()
    kinds = [type(m) for m in model.modules()]
    with hp.gated(model, {"attention": torch.ones(2)}):
        prune_pair(model, {"twin": [0]})
    assert [type(m) for m in model.modules()] == kinds
