"""A model of images and text: budgets for each tower, named by what ``find_sites`` calls its
attentions."""

import pytest

import headprune as hp
from tests.laws.families import assert_equal, far, run
from tests.laws.support import CLOSE, family_subject


@pytest.fixture
def llava():
    return family_subject("llama", "llava")


def plan_of(subject, **keep_heads):
    scores = hp.score(subject.model, [subject.batch], "magnitude")
    names = {"vision": "*vision_tower*", "text": "*language_model*"}
    budgets = {names.get(k, k): hp.Budget(keep_heads=n) for k, n in keep_heads.items()}
    return hp.select(scores, budgets)


def counts(sites):
    return {
        "vision": [len(s.heads) for s in sites if "vision_tower" in s.name],
        "text": [len(s.heads) for s in sites if "language_model" in s.name],
    }


def test_the_towers_are_told_apart_by_name_kind_and_layout(llava):
    told = {(s.name.split(".")[1], s.kind, s.layout) for s in llava.sites}
    assert told == {("vision_tower", "self", "bart"), ("language_model", "causal", "llama")}
    assert counts(llava.sites) == {"vision": [4, 4], "text": [6, 6, 6]}


@pytest.mark.parametrize("key", ["causal", "text"])
def test_each_tower_meets_its_own_budget(llava, key):
    plan = plan_of(llava, vision=0.25, **{key: 12})
    full, small = run(llava.model, llava.batch), llava.copy()
    with hp.gated(llava.model, plan):
        expected = run(llava.model, llava.batch)
    hp.prune_(small, plan)
    left = counts(hp.find_sites(small))
    assert (sum(left["vision"]), sum(left["text"])) == (2, 12)
    assert_equal(run(small, llava.batch), expected, **CLOSE)
    assert far(expected, full)


def test_a_tower_without_a_budget_is_kept_whole(llava):
    plan = plan_of(llava, vision=0.5)
    held = {n: p for n, p in llava.model.named_parameters() if "language_model" in n}
    hp.prune_(llava.model, plan)
    left = counts(hp.find_sites(llava.model))
    assert (sum(left["vision"]), left["text"]) == (4, [6, 6, 6])
    now = dict(llava.model.named_parameters())
    assert held
    assert all(now[name] is parameter for name, parameter in held.items())
