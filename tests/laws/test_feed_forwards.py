"""The laws for neurons: feed-forwards are gated, cut, stored and cut again like attention; fp64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts import registry
from headprune.model.running import call, outputs
from tests.laws.families import (
    FAMILIES,
    ONE_EACH,
    assert_equal,
    assert_same_gradients,
    far,
    gradients,
    over,
    run,
)
from tests.laws.support import CLOSE, EXACT, Subject, ragged

#: Families whose tiny models have no feed-forward.
WITHOUT = {
    "annotated transformer",
    "d2l",
    "labml",
    "list of heads",
    "list of heads without output",
    "timm.Attention",
    "timm.Attention before 1.0.24",
    "timm.AttentionRope",
    "torch.nn.MultiheadAttention",
}
#: Families whose experts share tensors, which no layout takes.
EXPERTS = {"gpt_oss", "mixtral", "olmoe"}
WITH_NEURONS = [pair for pair in FAMILIES if pair[1] not in WITHOUT | EXPERTS]
#: Attention that PyTorch computes in another order once its output projection is called.
ROUNDED = {"siglip", "torch.nn.TransformerEncoder", "torch.nn.TransformerDecoder", "wavlm"}


def sites_of(subject: Subject) -> hp.Sites:
    try:
        return hp.find_sites(subject.model, feed_forward=True)
    except UnsupportedModel as error:
        if "no module that looks like one" in error.got:
            pytest.skip("its tiny model has no feed-forward")
        raise


def neurons_of(sites: hp.Sites) -> list[hp.AttentionSite]:
    return [site for site in sites if site.kind == "feed_forward"]


def ragged_neurons(sites: hp.Sites, seed: int) -> hp.HeadMask:
    """A mask that keeps all heads."""
    keep = {row.site: row.kept for row in ragged(neurons_of(sites), seed).rows}
    return hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites})


def test_one_family_per_layout_is_tried_in_every_corner() -> None:
    layouts = {name for name in registry.names() if registry.get(name).is_feed_forward}
    found = set()
    for layout, family in ONE_EACH:
        model, _ = registry.get(layout).tiny(0, family)
        found |= {site.layout for site in neurons_of(hp.find_sites(model, feed_forward=True))}
    assert found == layouts


@over(WITH_NEURONS)
def test_gates_of_one_change_nothing_and_gated_is_pruned(subject: Subject) -> None:
    sites = sites_of(subject)
    assert tuple(s for s in sites if s.kind != "feed_forward") == tuple(subject.sites)
    full = run(subject.model, subject.batch)
    ones = {site.name: torch.ones(len(site.heads)) for site in sites}
    with hp.gated(subject.model, ones):
        got = run(subject.model, subject.batch)
    assert_equal(got, full, **(CLOSE if subject.family in ROUNDED else EXACT))

    mask, small = ragged(sites), copy.deepcopy(subject.model)
    with hp.gated(subject.model, mask):
        expected = run(subject.model, subject.batch)
        slopes = gradients(subject.model, subject.batch)
    assert far(expected, full)
    hp.prune_(small, mask)  # finds the feed-forwards that the mask names
    assert_equal(run(small, subject.batch), expected, **CLOSE)
    assert_same_gradients(subject, small, slopes, mask, sites)


@over(WITH_NEURONS)
def test_a_feed_forward_without_neurons_adds_its_bias(subject: Subject) -> None:
    sites, small = sites_of(subject), copy.deepcopy(subject.model)
    keep = {site.name: [] for site in neurons_of(sites)}
    mask = hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites})
    with hp.gated(subject.model, mask):
        expected = run(subject.model, subject.batch)
    hp.prune_(small, mask)
    assert_equal(run(small, subject.batch), expected, **CLOSE)


@over(WITH_NEURONS)
def test_one_cut_after_the_other_is_both_at_once(subject: Subject) -> None:
    sites = sites_of(subject)
    first, second = (ragged_neurons(sites, seed) for seed in (0, 4))
    at_once, in_turn = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
    hp.prune_(at_once, first & second)
    hp.prune_(in_turn, first)
    hp.prune_(in_turn, first & second)
    for name, tensor in at_once.state_dict().items():
        assert torch.equal(in_turn.state_dict()[name], tensor), name


@over(WITH_NEURONS)
def test_save_and_load_give_the_same_bits(subject: Subject, tmp_path: Path) -> None:
    layout, model = subject.layout, subject.model.float()
    batch = {k: v.float() if v.is_floating_point() else v for k, v in subject.batch.items()}
    sites = sites_of(subject)
    first = ragged(sites)
    hp.prune_(model, first)
    hp.save_pretrained(model, tmp_path)
    whole = None if hasattr(model, "config") else layout.tiny(0, subject.family)[0]
    again = hp.from_pretrained(tmp_path, model=whole)
    with torch.no_grad():
        assert_equal(outputs(call(again, batch)), outputs(call(model, batch)), **EXACT)

    # What was loaded can be cut again, as what was saved can.
    both = first & ragged_neurons(sites, 4)
    for one in (model, again):
        hp.prune_(one, both)
    with torch.no_grad():
        assert_equal(outputs(call(again, batch)), outputs(call(model, batch)), **EXACT)


@over(pair for pair in FAMILIES if pair[1] in WITHOUT | EXPERTS)
def test_a_model_without_such_a_feed_forward_is_refused(subject: Subject) -> None:
    with pytest.raises(UnsupportedModel, match="feed-forward") as refused:
        hp.find_sites(subject.model, feed_forward=True)
    if subject.family in EXPERTS:
        assert "Experts" in str(refused.value)
