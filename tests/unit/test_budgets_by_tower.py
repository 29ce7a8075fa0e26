"""A model of images and text: budgets for each tower, named by what ``find_sites`` calls its
attentions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headprune as hp
from headprune.core.errors import InvalidValue
from tests.laws.families import assert_equal, far, run
from tests.laws.support import CLOSE, Subject, family_subject

VISION = "*vision_tower*"


@pytest.fixture
def llava() -> Subject:
    return family_subject("llama", "llava")


def counts(sites: Any) -> dict[str, list[int]]:
    """Heads that are left in every layer of each tower."""
    return {
        "vision": [len(s.heads) for s in sites if "vision_tower" in s.name],
        "text": [len(s.heads) for s in sites if "language_model" in s.name],
    }


def test_the_towers_are_told_apart_by_name_kind_and_layout(llava: Subject) -> None:
    told = {(s.name.split(".")[1], s.kind, s.layout) for s in llava.sites}
    assert told == {("vision_tower", "self", "bart"), ("language_model", "causal", "llama")}
    assert counts(llava.sites) == {"vision": [4, 4], "text": [6, 6, 6]}


@pytest.mark.parametrize("key", ["causal", "*language_model*"])
def test_each_tower_meets_its_own_budget(llava: Subject, key: str) -> None:
    scores = hp.score(llava.model, [llava.batch], "magnitude")
    budgets = {VISION: hp.Budget(keep_heads=0.25), key: hp.Budget(keep_heads=12)}
    plan = hp.select(scores, budgets)
    full, small = run(llava.model, llava.batch), llava.copy()
    with hp.gated(llava.model, plan):
        expected = run(llava.model, llava.batch)
    hp.prune_(small, plan)
    left = counts(hp.find_sites(small))
    assert (sum(left["vision"]), sum(left["text"])) == (2, 12)
    assert_equal(run(small, llava.batch), expected, **CLOSE)
    assert far(expected, full)


def test_a_tower_without_a_budget_stays_whole(llava: Subject) -> None:
    scores = hp.score(llava.model, [llava.batch], "magnitude")
    plan = hp.select(scores, {VISION: hp.Budget(keep_heads=0.5)})
    held = {n: p for n, p in llava.model.named_parameters() if "language_model" in n}
    hp.prune_(llava.model, plan)
    left = counts(hp.find_sites(llava.model))
    assert (sum(left["vision"]), left["text"]) == (4, [6, 6, 6])
    now = dict(llava.model.named_parameters())
    assert held
    assert all(now[name] is parameter for name, parameter in held.items())


def test_budgets_that_overlap_between_towers_are_refused(llava: Subject) -> None:
    scores = hp.score(llava.model, [llava.batch], "magnitude")
    with pytest.raises(InvalidValue, match="leaves"):
        hp.select(scores, {VISION: hp.Budget(keep_heads=0.5), "self": hp.Budget(keep_heads=0.5)})


def test_what_an_image_says_reaches_the_text_through_the_cut_tower(llava: Subject) -> None:
    """Another image gives other logits after the cut: the towers are still joined."""
    scores = hp.score(llava.model, [llava.batch], "magnitude")
    hp.prune_(llava.model, hp.select(scores, {VISION: hp.Budget(keep_heads=0.25)}))
    first = run(llava.model, llava.batch)
    second = run(llava.model, {**llava.batch, "pixel_values": -llava.batch["pixel_values"]})
    assert all(torch.isfinite(t).all() for t in second)
    assert far(first, second)
