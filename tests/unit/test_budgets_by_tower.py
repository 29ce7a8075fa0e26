"""A model of images and text: budgets for each tower, named by what ``find_sites`` calls its
attentions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headprune as hp
from tests.laws.families import assert_equal, far, run
from tests.laws.support import CLOSE, Subject, family_subject


@pytest.fixture
def llava() -> Subject:
    return family_subject("llama", "llava")


def plan_of(subject: Subject, **keep_heads: Any) -> hp.PruningPlan:
    """Budgets by a part of the sites' names, or by kind."""
    scores = hp.score(subject.model, [subject.batch], "magnitude")
    names = {"vision": "*vision_tower*", "text": "*language_model*"}
    budgets = {names.get(k, k): hp.Budget(keep_heads=n) for k, n in keep_heads.items()}
    return hp.select(scores, budgets)


def counts(sites: Any) -> dict[str, list[int]]:
    """Heads that are kept in every layer of each tower."""
    return {
        "vision": [len(s.heads) for s in sites if "vision_tower" in s.name],
        "text": [len(s.heads) for s in sites if "language_model" in s.name],
    }


def test_the_towers_are_told_apart_by_name_kind_and_layout(llava: Subject) -> None:
    told = {(s.name.split(".")[1], s.kind, s.layout) for s in llava.sites}
    assert told == {("vision_tower", "self", "bart"), ("language_model", "causal", "llama")}
    assert counts(llava.sites) == {"vision": [4, 4], "text": [6, 6, 6]}


@pytest.mark.parametrize("key", ["causal", "text"])
def test_each_tower_meets_its_own_budget(llava: Subject, key: str) -> None:
    plan = plan_of(llava, vision=0.25, **{key: 12})
    full, small = run(llava.model, llava.batch), llava.copy()
    with hp.gated(llava.model, plan):
        expected = run(llava.model, llava.batch)
    hp.prune_(small, plan)
    left = counts(hp.find_sites(small))
    assert (sum(left["vision"]), sum(left["text"])) == (2, 12)
    assert_equal(run(small, llava.batch), expected, **CLOSE)
    assert far(expected, full)


def test_a_tower_without_a_budget_is_kept_whole(llava: Subject) -> None:
    plan = plan_of(llava, vision=0.5)
    held = {n: p for n, p in llava.model.named_parameters() if "language_model" in n}
    hp.prune_(llava.model, plan)
    left = counts(hp.find_sites(llava.model))
    assert (sum(left["vision"]), left["text"]) == (4, [6, 6, 6])
    now = dict(llava.model.named_parameters())
    assert held
    assert all(now[name] is parameter for name, parameter in held.items())


def test_what_an_image_says_reaches_the_text_through_the_cut_tower(llava: Subject) -> None:
    """Another image gives other logits after the cut: the towers are still joined."""
    hp.prune_(llava.model, plan_of(llava, vision=0.25))
    first = run(llava.model, llava.batch)
    second = run(llava.model, {**llava.batch, "pixel_values": -llava.batch["pixel_values"]})
    assert all(torch.isfinite(t).all() for t in second)
    assert far(first, second)
